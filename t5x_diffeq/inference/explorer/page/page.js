// The page: what is chosen, which stands in its address, and what is shown of it.
"use strict";

const $ = (id) => document.getElementById(id);
const NUMBERS = { max_tokens: 100, temperature: 0.8, seed: 0 };
const state = { token: "", text: null, colour: "loss", at: null, choices: [{}], ...NUMBERS };
let runs = [], views = [], exponents = new Map(), losses = new Map(), sweep = null;

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  state.token = given.get("token") ?? "";
  state.text = given.get("text");
  state.colour = [...$("colour").options].some((each) => each.value === given.get("colour")) ? given.get("colour") : "loss";
  state.at = given.has("at") ? Number.parseInt(given.get("at"), 10) || 0 : null;
  for (const [name, usual] of Object.entries(NUMBERS)) {
    const value = given.has(name) ? Number(given.get(name)) : usual;
    state[name] = Number.isFinite(value) ? value : usual;
  }
  state.choices = ["a", "b"].filter((view) => view === "a" || given.has(view)).map((view) => {
    const [run, steps, scheme] = (given.get(view) ?? "").split(",").map(decodeURIComponent);
    return { run, steps: Number(steps), scheme };
  });
}

function writeAddress() {
  const given = new URLSearchParams();
  if (state.token) given.set("token", state.token);
  given.set("text", state.text);
  state.choices.forEach((choice, n) => given.set("ab"[n], [choice.run, choice.steps, choice.scheme].map(encodeURIComponent).join()));
  given.set("colour", state.colour);
  if (state.at !== null) given.set("at", state.at);
  for (const [name, usual] of Object.entries(NUMBERS)) if (state[name] !== usual) given.set(name, state[name]);
  history.replaceState(null, "", `#${given}`);
}

function fail(error) {
  $("failure").textContent = error.message;
  $("failure").hidden = false;
}

/** Calls `action` once after the last of several calls. */
function later(action, milliseconds) {
  let timer;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), milliseconds);
  };
}

/** Reads the text in every view; what is shown of the whole run is computed afterwards, since it would slow the reading. */
async function readNow() {
  const shown = views;
  await Promise.all(views.map((view) => view.read()));
  if (shown === views) computeRun();
}

function computeRun() {
  computeLosses();
  showPaths();
}

const readAll = later(readNow, 300);

function makeViews() {
  const tell = {
    changed(view) {
      writeAddress();
      showLosses();
      view.readSoon();
    },
    read() {
      $("failure").hidden = true;
      showTexts();
    },
    failed(error) {
      fail(error);
      showTexts();
    },
    take(text) {
      $("text").value = state.text += text;
      writeAddress();
      readAll();
    },
  };
  views.forEach((view) => view.stop());
  views = state.choices.map((choice, n) => {
    const view = new View(n, runs, choice, tell);
    view.readSoon = later(() => view.read().then(computeRun), 100);
    view.parts.tokens.addEventListener("pointerover", (event) => preview(event.target));
    view.parts.tokens.addEventListener("pointerleave", () => showToken(state.at));
    view.parts.tokens.addEventListener("focusin", (event) => choose(event.target));
    view.parts.tokens.addEventListener("click", (event) => event.target.focus());
    view.parts.tokens.addEventListener("keydown", (event) => move(event, view));
    return view;
  });
  $("views").replaceChildren(...views.map((view) => view.element));
  $("compare").checked = views.length > 1;
  $("colour").querySelector("[value=difference]").disabled = views.length < 2;
  if (views.length < 2 && state.colour === "difference") state.colour = "loss";
  $("colour").value = state.colour;
}

function preview(target) {
  if (target.dataset.token) showToken(Number(target.dataset.token));
}

function choose(target) {
  if (!target.dataset.token || Number(target.dataset.token) === state.at) return;
  state.at = Number(target.dataset.token);
  writeAddress();
  showTexts();
}

/** Arrow keys, Home and End move between tokens. */
function move(event, view) {
  const spans = view.parts.tokens.children, at = Number(event.target.dataset.token);
  const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: spans.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  spans[Math.max(0, Math.min(to, spans.length - 1))].focus();
}

function showTexts() {
  const ready = views.filter((view) => view.reading);
  if (!ready.length) return showNothing();
  const last = Math.max(...ready.map((view) => view.reading.tokens.length));
  if (state.at === null || state.at > last) state.at = last;
  for (const view of ready) {
    const other = views[1 - view.index], key = sensitivityKey(view);
    const shading = shades(state.colour, view, other, exponents.get(key));
    writeTokens(view.parts.tokens, view.reading, shading, Math.min(state.at, view.reading.tokens.length));
    const loss = view.reading.mean_loss;
    const words = [loss === null ? "Too short for a loss" : `${number(loss)} nats per token, perplexity ${Math.exp(loss).toFixed(1)}`];
    if (view.index && ready.length > 1 && loss !== null) {
      const [a, b] = views.map((each) => each.reading);
      const whole = (each) => each.mean_loss * (each.tokens.length - 1);
      const difference = a.ids.join() === b.ids.join()
        ? `${signed(b.mean_loss - a.mean_loss)} nats per token`
        : `${signed(whole(b) - whole(a))} nats for the whole text`;
      words.push(`B − A = ${difference}`);
    }
    view.parts.summary.textContent = words.join("; ");
    if (view.index === 0 || state.colour === "sensitivity") $("legend").textContent = shading.legend;
    if (state.colour === "sensitivity") computeSensitivity(view, key);
  }
  showToken(state.at);
}

function showNothing() {
  $("token_title").textContent = "Token";
  for (const id of ["legend", "token_note", "lenses", "token_charts"]) $(id).replaceChildren();
}

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(4)}`;

function sensitivityKey(view) {
  const output = Math.min(state.at, view.reading.tokens.length - 1);
  return JSON.stringify({ text: state.text, output, ...view.grid });
}

async function computeSensitivity(view, key) {
  if (exponents.has(key)) return;
  exponents.set(key, null);
  try {
    exponents.set(key, (await ask("/api/sensitivity", JSON.parse(key))).exponents);
    if (views.includes(view) && sensitivityKey(view) === key) showTexts();
  } catch (error) {
    exponents.delete(key);
    $("legend").textContent = error.message;
  }
}

/** Shows what every node predicts for a token's place, and its speed. */
function showToken(n) {
  const ready = views.filter((view) => view.reading && n !== null && n <= view.reading.tokens.length);
  if (!ready.length) return;
  const { tokens } = ready[0].reading;
  $("token_title").textContent = n < tokens.length ? `Token ${n}: ${visible(tokens[n])}` : "The next token";
  $("token_note").textContent = n
    ? "What the head would predict for this place if depth ended at each node (logit lens over y(t)). The token itself is outlined in green."
    : "Nothing stands before the first token, so nothing predicts it.";
  const called = (view) => `View ${view.name}: ${view.choice.run}, N = ${view.reading.num_steps}, ${view.reading.scheme}`;
  $("lenses").replaceChildren(...(n ? ready : []).map((view) => {
    const lens = document.createElement("div");
    lens.className = "lens";
    lens.tabIndex = 0;
    lens.append(lensTable(called(view), view.reading, n));
    return lens;
  }));
  const charts = [];
  const chart = (y, title, series) => charts.push(lineChart({ title, x: "depth t", y, series }));
  if (n && n < tokens.length) {
    chart("loss", "Loss of the token at every node", ready.map((view) => ({ kind: view.kind, label: `loss, ${view.name}`, dots: () => "full",
      points: view.reading.times.map((t, node) => [t, view.reading.loss_at[n][node]]) })));
  }
  if (n < tokens.length) {
    chart("|dy/dt|", "Speed of the token's state over depth", ready.flatMap((view) => {
      const { speed, num_steps: N } = view.reading, at = (step) => (step + 0.5) / N;
      return [{ kind: view.kind, label: `this token, ${view.name}`, dots: () => "full", points: speed[n].map((value, step) => [at(step), value]) },
        { kind: view.kind, label: `mean of all, ${view.name} (dashed)`, dashed: true, mean: true,
          points: speed[n].map((_, step) => [at(step), mean(speed.map((each) => each[step]))]) }];
    }));
  }
  $("token_charts").replaceChildren(...charts);
}

/** Computes the loss at every depth that is offered, one after the other, the trained ones first. */
async function computeLosses() {
  showLosses();
  sweep?.abort();
  const { signal } = (sweep = new AbortController());
  try {
    for (const view of views) {
      const { run, grid: { scheme } } = view;
      const first = (steps) => (steps === view.choice.steps ? 0 : run.trained.includes(steps) ? 1 : 2);
      for (const num_steps of [...run.offered].sort((x, y) => first(x) - first(y))) {
        const body = { run: run.name, num_steps, scheme }, key = JSON.stringify(body);
        if (losses.has(key)) continue;
        const answer = await telling($("losses_note"), `Computing the loss for N = ${num_steps}`, ask("/api/validation", body, signal));
        losses.set(key, answer);
        if (signal.aborted) return;
        $("losses_note").textContent = `On the first ${answer.sequences} validation sequences (${answer.tokens} tokens). Full dots: trained.`;
        showLosses();
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") $("losses_note").textContent = error.message;
  }
}

function showLosses() {
  const series = views.map((view) => {
    const { run, choice: { scheme } } = view;
    const of = (steps) => losses.get(JSON.stringify({ run: run.name, num_steps: steps, scheme }));
    const done = run.offered.filter((steps) => of(steps));
    return { kind: view.kind, label: `${run.name}, ${scheme}`, points: done.map((steps) => [steps, of(steps).loss]),
      dots: (n) => (of(done[n]).trained ? "full" : "open"), say: (n) => `N = ${done[n]}: ${of(done[n]).loss} nats per token` };
  });
  $("losses").replaceChildren(lineChart({ title: "Loss against the number of steps", x: "number of steps N", y: "loss",
    log: true, series, here: views[0].choice.steps }));
}

async function showPaths() {
  const shown = views;
  try {
    const asked = Promise.all(views.map((view) => ask("/api/paths", { run: view.choice.run })));
    const answers = await telling($("paths_note"), "Computing the path of W(t)", asked);
    if (shown !== views) return;
    const names = Object.keys(answers[0].kernels), before = $("kernel").value;
    if ([...$("kernel").options].map((each) => each.value).join() !== names.join()) {
      $("kernel").replaceChildren(...names.map((name) => new Option(name)));
      const most = (name) => Math.max(...answers[0].kernels[name].sizes) / Math.min(...answers[0].kernels[name].sizes);
      $("kernel").value = names.includes(before) ? before : names.reduce((a, b) => (most(b) > most(a) ? b : a));
    }
    const known = views.flatMap((view, n) => (answers[n].kernels[$("kernel").value] ? [[view, answers[n]]] : []));
    const series = (points) => known.map(([view, answer]) => ({ kind: view.kind, label: view.choice.run, dashed: !answer.smooth,
      points: points(answer.kernels[$("kernel").value], answer.times), dots: (n) => (answer.is_node[n] ? "full" : null), say: (n) => `t = ${answer.times[n]}` }));
    const share = (n) => (known.length === 1 ? ` (${(100 * known[0][1].kernels[$("kernel").value].shares[n]).toFixed(1)}% of the variance)` : "");
    $("paths").replaceChildren(lineChart({ title: "The path of W(t) in its principal plane", flat: true, series: series((kernel) => kernel.points),
      x: `first principal component${share(0)}`, y: `second${share(1)}` }));
    $("sizes").replaceChildren(lineChart({ title: "The size of W(t) over depth", x: "depth t", y: "|W(t)|",
      series: series((kernel, times) => times.map((t, n) => [t, kernel.sizes[n]])) }));
    const between = answers[0].smooth ? "The line is W(t) between them." : "W(t) means nothing between them: the line is dashed.";
    $("paths_note").textContent = `Dots are the nodes of the trained grid. ${between}`;
  } catch (error) {
    $("paths_note").textContent = error.message;
  }
}

function connect() {
  $("text").oninput = () => {
    state.text = $("text").value;
    writeAddress();
    readAll();
  };
  $("colour").onchange = () => {
    state.colour = $("colour").value;
    writeAddress();
    showTexts();
  };
  for (const name of Object.keys(NUMBERS)) {
    $(name).onchange = () => {
      if (!$(name).reportValidity()) return;
      state[name] = $(name).value === "" ? NUMBERS[name] : Number($(name).value);
      writeAddress();
      views.forEach((view) => view.continue());
    };
  }
  $("compare").onchange = () => {
    state.choices = $("compare").checked ? [state.choices[0], { ...state.choices[0], run: runs[1]?.name ?? runs[0].name }] : [state.choices[0]];
    if (!$("compare").checked && state.colour === "difference") state.colour = "loss";
    begin();
  };
  $("controls").onsubmit = (event) => event.preventDefault();
  $("kernel").onchange = showPaths;
  window.addEventListener("hashchange", () => {
    readAddress();
    begin();
  });
}

function begin() {
  state.text ??= runs[0].text;
  $("text").value = state.text;
  for (const name of Object.keys(NUMBERS)) $(name).value = state[name];
  makeViews();
  writeAddress();
  showLosses();
  for (const id of ["losses_note", "paths_note"]) $(id).textContent ||= "Computed once the text is read.";
  readNow();
}

async function open() {
  readAddress();
  try {
    ({ runs } = await ask("/api/runs"));
  } catch (error) {
    fail(error);
    return;
  }
  document.body.classList.toggle("recorded", Boolean(recorded));
  $("text").readOnly = Boolean(recorded);
  connect();
  begin();
}

open();
