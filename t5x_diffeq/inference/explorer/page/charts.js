// Small line charts in SVG. A series has points [x, y], where y may be null, and a class: a or b.
"use strict";

const WIDTH = 420, HEIGHT = 220, LEFT = 46, BOTTOM = 34, TOP = 22, RIGHT = 12;

function draw(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** About five round numbers that cover the range. */
function ticks(low, high) {
  const rough = (high - low) / 4 || 1, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= rough);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) found.push(n * step);
  return found;
}

function range(values) {
  const low = Math.min(...values), high = Math.max(...values);
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return [low - margin, high + margin];
}

/**
 * A chart of several series.
 * @param {object} chart title (for readers that don't see it), x and y (labels), series, log (of x), here: an x to mark, and flat: true if x and y
 *   have one unit, so that y isn't stretched far beyond x.
 *   A series has points, kind ("a" or "b"), and may have label, dashed, mean, dots (none | all | a function of the index).
 */
function lineChart({ title, x: xLabel, y: yLabel, series, log = false, here = null, flat = false }) {
  const points = series.flatMap((each) => each.points).filter((point) => point[1] !== null);
  const picture = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  if (!points.length) {
    picture.append(draw("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing to show yet"));
    return picture;
  }
  const scale = (value) => (log ? Math.log2(value) : value);
  const [x0, x1] = range(points.map((point) => scale(point[0])));
  let [y0, y1] = range(points.map((point) => point[1]));
  const missing = flat ? Math.max(0, (x1 - x0) / 4 - (y1 - y0)) / 2 : 0;
  [y0, y1] = [y0 - missing, y1 + missing];
  const X = (x) => LEFT + ((scale(x) - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const Y = (y) => HEIGHT - BOTTOM - ((y - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  picture.append(draw("path", { class: "axis", d: `M${LEFT},${TOP}V${HEIGHT - BOTTOM}H${WIDTH - RIGHT}` }));
  for (const tick of ticks(y0, y1)) {
    picture.append(draw("text", { x: LEFT - 6, y: Y(tick) + 4, "text-anchor": "end" }, String(+tick.toPrecision(4))));
  }
  const named = log ? [1, 2, 4, 8, 16, 32, 64, 128, 256].filter((n) => scale(n) >= x0 && scale(n) <= x1) : ticks(x0, x1);
  for (const tick of named) {
    picture.append(draw("text", { x: X(tick), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, String(+tick.toPrecision(4))));
  }
  picture.append(draw("text", { x: (WIDTH + LEFT) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, xLabel));
  picture.append(draw("text", { x: 0, y: 10 }, yLabel));
  if (here !== null) picture.append(draw("path", { class: "here", d: `M${X(here)},${TOP}V${HEIGHT - BOTTOM}` }));
  series.forEach((each, number) => {
    const shown = each.points.filter((point) => point[1] !== null);
    const path = shown.map(([x, y], n) => `${n ? "L" : "M"}${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join("");
    const kinds = `${each.kind}${each.dashed ? " dashed" : ""}${each.mean ? " mean" : ""}`;
    picture.append(draw("path", { class: `line ${kinds}`, d: path }));
    each.points.forEach(([x, y], n) => {
      const dot = each.dots ? each.dots(n) : null;
      if (dot && y !== null) {
        picture.append(draw("circle", { class: `dot ${dot} ${each.kind}`, cx: X(x), cy: Y(y), r: 3.2 },
          draw("title", {}, each.say ? each.say(n) : `${+x.toPrecision(4)}: ${y}`)));
      }
    });
    if (each.label) {
      picture.append(draw("text", { class: `label ${each.kind}`, x: WIDTH - RIGHT, y: 10 + 13 * number, "text-anchor": "end" }, each.label));
    }
  });
  return picture;
}
