// A view: a run on a grid, its reading of the text, and its continuation.
"use strict";

const recorded = JSON.parse(document.getElementById("recorded")?.textContent ?? "null"); // in a file without a server
const held = new Map(); // answers, by request

/** The answer of an endpoint; throws an Error that says what was wrong. */
async function ask(path, body, signal) {
  const key = requestKey(path, body);
  if (held.has(key)) return held.get(key);
  const answer = send(path, body, signal).then((response) => response.json());
  if (!signal) held.set(key, answer); // whoever asks again waits for this one
  try {
    held.set(key, await answer);
  } catch (error) {
    held.delete(key);
    throw error;
  }
  if (held.size > 200) held.delete(held.keys().next().value);
  return answer;
}

const requestKey = (path, body) => `${path} ${JSON.stringify(body ?? null)}`;

/** The response of an endpoint, or what the file holds of it. */
async function send(path, body, signal) {
  if (recorded) {
    const answer = recorded[requestKey(path, body)];
    if (answer === undefined) throw new Error("This file doesn't hold that; `explore --workdir=DIR` computes it.");
    return new Response(typeof answer === "string" ? answer : JSON.stringify(answer));
  }
  const headers = { authorization: `Bearer ${state.token}`, "content-type": "application/json" };
  let response;
  try {
    response = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server doesn't answer. Is it still running?");
  }
  if (!response.ok) {
    const said = await response.json().catch(() => null);
    throw new Error(said?.error ?? `The server answered with status ${response.status}.`);
  }
  return response;
}

/** What a promise gives. If it takes longer, an element says what is being computed, and for how long already. */
async function telling(element, words, promise) {
  const start = performance.now();
  const tell = () => (element.textContent = `${words} … ${Math.round((performance.now() - start) / 1000)} s`);
  clearInterval(element.telling); // of an earlier promise
  const timer = (element.telling = setInterval(tell, 500));
  try {
    return await promise;
  } finally {
    clearInterval(timer);
    if (element.telling === timer) element.textContent = "";
  }
}

const compiled = new Set(); // runs that have been read, whose model is compiled

class View {
  /**
   * @param {number} index 0 for A, 1 for B.
   * @param {object[]} runs what /api/runs says.
   * @param {{run: string, scheme: string, steps: number}} choice what is shown; kept up to date.
   * @param {{changed: function, read: function}} tell what to call after a choice, and after a reading.
   */
  constructor(index, runs, choice, tell) {
    Object.assign(this, { index, runs, choice, tell, name: "AB"[index], kind: "ab"[index], reading: null });
    this.element = document.getElementById("view").content.firstElementChild.cloneNode(true);
    const part = (name) => this.element.querySelector(name);
    this.parts = { run: part(".run"), scheme: part(".scheme"), slider: part(".slider"), output: part("output"), marks: part(".marks"),
      note: part(".note"), progress: part(".progress"), room: part(".room"), summary: part(".summary"), tokens: part(".tokens"), continuation: part(".continuation") };
    part(".title").textContent = `View ${this.name}`;
    this.parts.tokens.setAttribute("aria-label", `The text in view ${this.name}, token by token`);
    this.parts.run.append(...runs.map((run) => new Option(run.name)));
    this.parts.run.onchange = () => this.choose({ run: this.parts.run.value, scheme: null, steps: null });
    this.parts.scheme.onchange = () => this.choose({ scheme: this.parts.scheme.value });
    this.parts.slider.oninput = () => this.choose({ steps: this.run.offered[this.parts.slider.value] });
    part(".again").onclick = () => this.continue();
    part(".take").onclick = () => tell.take(this.continued ?? "");
    this.show();
  }

  get run() {
    return this.runs.find((run) => run.name === this.choice.run);
  }

  get grid() {
    return { run: this.choice.run, num_steps: this.choice.steps, scheme: this.choice.scheme };
  }

  choose(changes) {
    Object.assign(this.choice, changes);
    this.show();
    this.tell.changed(this);
  }

  /** Shows the choice, with the run's own values for what it doesn't have. */
  show() {
    const { parts, choice } = this;
    choice.run = this.run?.name ?? this.runs[0].name;
    const { offered, schemes, trained, num_steps, scheme } = this.run;
    choice.scheme = schemes.includes(choice.scheme) ? choice.scheme : scheme;
    choice.steps = offered.includes(choice.steps) ? choice.steps : num_steps;
    parts.run.value = choice.run;
    parts.scheme.replaceChildren(...schemes.map((name) => new Option(name === scheme ? `${name} (trained)` : name, name)));
    parts.scheme.value = choice.scheme;
    parts.slider.max = offered.length - 1;
    parts.slider.value = offered.indexOf(choice.steps);
    parts.slider.disabled = offered.length < 2;
    parts.slider.setAttribute("aria-valuetext", `${choice.steps} steps${trained.includes(choice.steps) ? ", trained" : ""}`);
    parts.output.textContent = choice.steps;
    parts.marks.replaceChildren(...trained.map((steps, n) => {
      const mark = document.createElement("span");
      mark.textContent = n < trained.length - 1 ? steps : `${steps} trained`; // the last has the most room
      mark.style.setProperty("--at", `${(100 * offered.indexOf(steps)) / Math.max(1, offered.length - 1)}%`);
      return mark;
    }));
  }

  /** Ends what is under way. */
  stop() {
    this.reader?.abort();
    this.writer?.abort();
  }

  /** Forgets the reading, and shows nothing of it. */
  clear() {
    this.reading = null;
    for (const name of ["note", "summary", "tokens", "room", "continuation"]) this.parts[name].replaceChildren();
    this.parts.note.classList.remove("trained");
  }

  /** Shows what is known before the reading is there. */
  showTokens(known) {
    if (this.reading?.ids.join() === known.ids.join()) return; // the earlier reading, dimmed, says more
    this.clear();
    this.showNote(known);
    writeTokens(this.parts.tokens, { ...known, loss: [] }, { values: [] }, known.tokens.length);
  }

  showNote({ note, trained }) {
    this.parts.note.textContent = note;
    this.parts.note.classList.toggle("trained", trained);
  }

  /** Reads the text; then continuing it begins. A later call ends an earlier one. */
  async read() {
    this.stop();
    const { signal } = (this.reader = new AbortController()), { run, steps, scheme } = this.choice;
    const body = { text: state.text, ...this.grid };
    this.element.classList.add("busy");
    let pending = true;
    const early = setTimeout(async () => {
      const known = await ask("/api/tokens", body, signal).catch(() => null);
      if (known && pending) this.showTokens(known);
    }, 200);
    try {
      const words = `${compiled.has(run) ? "Reading" : "Compiling the model and reading"} the text in ${steps} steps of ${scheme}`;
      this.reading = await telling(this.parts.progress, words, ask("/api/read", body, signal));
      compiled.add(run);
      this.showNote(this.reading);
      this.tell.read(this);
      this.continue();
    } catch (error) {
      if (error.name === "AbortError") return;
      this.clear();
      this.tell.failed(error);
    } finally {
      pending = false;
      clearTimeout(early);
      if (!signal.aborted) this.element.classList.remove("busy");
    }
  }

  /** Streams a continuation of the text. */
  async continue() {
    this.writer?.abort();
    const { signal } = (this.writer = new AbortController());
    const prompt = document.createElement("span"), text = document.createTextNode(""), { continuation, room } = this.parts;
    prompt.className = "prompt";
    prompt.textContent = state.text.slice(-80);
    this.continued = "";
    const { max_tokens, temperature, seed } = state, most = this.run.max_tokens, left = most - (this.reading?.tokens.length ?? 0);
    room.textContent = left < max_tokens ? `The model reads at most ${most} tokens: after this text there is room for ${left || "none"}.` : "";
    try {
      const body = { text: state.text, ...this.grid, max_tokens, temperature, seed };
      const response = await telling(this.parts.progress, "Computing the first new token", send("/api/continue", body, signal));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      continuation.replaceChildren(prompt, text);
      for (let part = await reader.read(); !part.done && !signal.aborted; part = await reader.read()) {
        text.data = this.continued += part.value;
        continuation.scrollTop = continuation.scrollHeight;
      }
      if (!this.continued && !signal.aborted && left && max_tokens) room.textContent = "The model ends the document here.";
    } catch (error) {
      if (error.name !== "AbortError") continuation.replaceChildren(error.message);
    }
  }
}
