// What pages and charts are made of; text is set as text.

import { DAYS, clock } from "./format.js";

/** The element of a name. */
export const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";
/** Around the axes of a chart, in pixels. */
export const MARGIN = { top: 8, right: 12, bottom: 22, left: 48 };

/** Makes an element; strings among the children become text. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** A table of texts and elements; `numbers` are the columns set flush right. */
export function table(head, lines, numbers = [1]) {
  const cell = (tag, value, i) => el(tag, { class: numbers.includes(i) ? "number" : false }, value);
  return el(
    "table",
    {},
    el("thead", {}, el("tr", {}, ...head.map((value, i) => cell("th", value, i)))),
    el(
      "tbody",
      {},
      ...lines.map((line) => el("tr", {}, ...line.map((value, i) => cell("td", value, i)))),
    ),
  );
}

/** The same for parts of pictures. */
export function svg(tag, attributes = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Round numbers that cover 0 (or `least`) to `most`. */
export function ticks(least, most, count) {
  const raw = (most - least) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
  const first = Math.floor(least / step + 1e-9) * step;
  const found = [];
  for (let i = 0; i < 50; i++) {
    found.push(first + i * step);
    if (first + i * step >= most - 1e-9 * step) break;
  }
  return found;
}

/** Times of the clock between two, and what to call them. */
export function timeTicks(from, to, width) {
  const steps = [60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800];
  const wanted = Math.max(2, Math.floor(width / 62));
  const step = steps.find((each) => (to - from) / each <= wanted) ?? 604800;
  const offset = new Date(to * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let time = Math.ceil((from - offset) / step) * step + offset; time <= to; time += step) {
    if (step >= 86400) {
      const date = new Date(time * 1000);
      found.push([time, `${DAYS[date.getDay()]} ${date.getDate()}`]);
    } else {
      found.push([time, clock(time, false)]);
    }
  }
  return found;
}
