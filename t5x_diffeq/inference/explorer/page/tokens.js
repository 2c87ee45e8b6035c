// A text token by token: its colours, and what every node predicts for one of its tokens.
"use strict";

/** A token's text in which whitespace can be seen; bytes that are no character stand as a box. */
function visible(piece) {
  return piece.replace(/\n/g, "↵").replace(/\t/g, "→").replace(/ /g, "␣") || "·";
}

function number(value, digits = 3) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

function mean(values) {
  const real = values.filter((value) => value !== null);
  return real.length ? real.reduce((sum, value) => sum + value, 0) / real.length : null;
}

/**
 * What each token is coloured by, and how the colours are to be read.
 * @returns {{values: (number|null)[], most: number, signed: boolean, legend: string}}
 */
function shades(colour, view, other, exponents) {
  const reading = view.reading;
  if (colour === "difference" && other?.reading) {
    if (other.reading.ids.join() !== reading.ids.join()) {
      return { values: [], most: 1, signed: true, legend: "The two runs have other tokens: their texts have no difference per token." };
    }
    const values = reading.loss.map((loss, n) => (loss === null || other.reading.loss[n] === null ? null : loss - other.reading.loss[n]));
    const most = Math.max(0.1, ...values.map((value) => Math.abs(value ?? 0)));
    return { values, most, signed: true,
      legend: `Orange: a higher loss here than in the other view; blue: a lower one; the full colour is ${number(most, 2)} nats.` };
  }
  if (colour === "sensitivity") {
    const real = (exponents ?? []).filter((value) => value !== null);
    const others = real.length > 1 ? real.slice(0, -1) : real; // the token in itself would outshine them
    const low = Math.min(...others), most = Math.max(...others) - low || 1;
    const legend = !exponents ? "The Lyapunov exponents are being computed, which can take a minute."
      : `The largest Lyapunov exponent of the outlined token's output for each token before it, from ${number(low, 2)} (no colour) to ` +
        `${number(low + most, 2)} (full colour), per unit of depth; for the token itself it is ${number(real.at(-1), 2)}.`;
    return { values: (exponents ?? []).map((value) => (value === null ? null : Math.max(0, value - low))), most, signed: false, legend };
  }
  if (colour === "speed") {
    const values = reading.speed.map(mean), most = Math.max(...values.filter((value) => value !== null), 1e-9);
    return { values, most, signed: false,
      legend: `|dy/dt|, root mean square over the width and mean over depth, from 0 (no colour) to ${number(most, 2)} (full colour).` };
  }
  const most = Math.max(1, ...reading.loss.map((loss) => loss ?? 0));
  return { values: reading.loss, most, signed: false,
    legend: `Loss from 0 (no colour) to ${number(most, 2)} nats (full colour). ` +
      "Point at a token, or move with the arrow keys, to see what every node predicts for it." };
}

/** Writes the tokens into an element; the last one stands for what comes next. */
function writeTokens(element, reading, shading, chosen) {
  const texts = [...reading.tokens, null];
  if (element.children.length !== texts.length) {
    element.replaceChildren(...texts.map(() => document.createElement("span")));
  }
  texts.forEach((piece, n) => {
    const span = element.children[n], value = shading.values[n];
    span.dataset.token = n;
    const shown = piece === null ? "⋯" : piece.endsWith("\n") ? piece.replace(/\n/g, "↵\n") : piece;
    if (span.textContent !== shown) span.textContent = shown;
    span.setAttribute("role", "button");
    span.tabIndex = n === chosen ? 0 : -1;
    span.classList.toggle("chosen", n === chosen);
    span.classList.toggle("sign", piece === null);
    const says = piece === null ? "the next token" : `${visible(piece)}, loss ${number(reading.loss[n])}`;
    span.setAttribute("aria-label", `token ${n}: ${says}`);
    const share = value === null || value === undefined ? 0 : Math.min(1, Math.abs(value) / shading.most);
    span.style.background = share ? `rgb(var(${shading.signed && value < 0 ? "--good" : "--bad"}) / ${(0.75 * share).toFixed(3)})` : "";
  });
}

/** A table of the five likeliest tokens at every node, for the place of token n. */
function lensTable(name, reading, n) {
  const table = document.createElement("table"), from = n - 1;
  table.createCaption().textContent = name;
  const head = table.createTHead().insertRow();
  for (const title of ["t", "loss", "the five likeliest tokens"]) {
    const cell = document.createElement("th");
    cell.textContent = title;
    head.append(cell);
  }
  head.lastChild.colSpan = 5;
  const body = table.createTBody();
  reading.times.forEach((t, node) => {
    const row = body.insertRow();
    row.insertCell().textContent = t.toFixed(3);
    row.insertCell().textContent = number(reading.loss_at[n]?.[node]);
    reading.top[from][node].forEach((id, k) => {
      const cell = row.insertCell(), p = reading.p[from][node][k], share = document.createElement("small");
      share.textContent = ` ${p === null ? "–" : (100 * p).toFixed(p < 0.1 ? 1 : 0) + "%"}`;
      cell.className = id === reading.ids[n] ? "piece actual" : "piece";
      cell.style.background = `rgb(var(--good) / ${(0.6 * (p ?? 0)).toFixed(3)})`;
      cell.append(visible(reading.pieces[id]), share);
    });
  });
  return table;
}
