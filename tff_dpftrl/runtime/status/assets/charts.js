// Charts as inline SVG: made of numbers and of text that is set as text.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 8, right: 12, bottom: 22, left: 48 };

/** Makes an element; strings among the children become text. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function svg(tag, attributes = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** A number as people read it. */
export function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return value.toExponential(1).replace(".0e", "e");
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) {
      const scale = letter === "k" ? 1e3 : unit;
      return `${Number((value / scale).toPrecision(3))}\u202f${letter}`;
    }
  }
  return String(Number(value.toPrecision(size >= 1000 ? 4 : 3)));
}

/** A size in bytes. */
export function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  const place = Math.min(Math.floor(Math.log10(Math.max(value, 1)) / 3), units.length - 1);
  return `${Number((value / 1000 ** place).toPrecision(3))}\u202f${units[place]}`;
}

/** Seconds, in a unit that suits them. */
export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * size) return `${Number((seconds / size).toPrecision(seconds >= 100 * size ? 3 : 2))}\u202f${unit}`;
  }
  return `${Number(seconds.toPrecision(2))}\u202fs`;
}

const two = (number) => String(number).padStart(2, "0");
const DAYS = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];

function clock(seconds, withDay) {
  const date = new Date(seconds * 1000);
  const time = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return withDay ? `${DAYS[date.getDay()]} ${date.getDate()}, ${time}` : time;
}

/** Numbers of an axis, with as many places as tell them apart. */
function marked(value, step) {
  const size = Math.abs(value);
  if (size >= 1e4 || (size > 0 && size < 1e-4)) return short(value);
  return value.toFixed(Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9))));
}

/** Round numbers that cover 0 (or `least`) to `most`. */
function ticks(least, most, count) {
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

function timeTicks(from, to, width) {
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

/**
 * A card with a chart that is drawn again with every `show`.
 *
 * show({x, series, kind, time, format, integers}): `x` are the places of the values (for
 * bars, where they end; their width is `step`), `series` a list of {name, color, values},
 * `kind` "lines" or "bars" (stacked), `from` and `to` the ends of the axis.
 */
export class Chart {
  constructor(title, unit, height = 190) {
    this.height = height;
    this.unit = el("span", { class: "unit" }, unit);
    this.title = title;
    this.legend = el("div", { class: "legend" });
    this.place = el("div");
    this.card = el("div", { class: "card" }, el("h4", {}, `${title} `, this.unit), this.legend, this.place);
    this.hover = null;
    this.seen = "";
    new ResizeObserver(() => this.#draw(true)).observe(this.place);
    this.place.addEventListener("pointermove", (event) => {
      this.hover = event.clientX - this.place.getBoundingClientRect().left;
      this.#draw(true);
    });
    this.place.addEventListener("pointerleave", () => {
      this.hover = null;
      this.#draw(true);
    });
  }

  show(spec) {
    this.spec = spec;
    this.#draw(false);
  }

  #draw(anyway) {
    const spec = this.spec;
    const width = this.place.clientWidth;
    if (!spec || !width) return;
    const content = JSON.stringify(spec, (key, value) => (typeof value === "function" ? undefined : value));
    if (!anyway && content === this.seen) return;
    this.seen = content;
    const format = spec.format ?? short;
    const inner = { width: width - MARGIN.left - MARGIN.right, height: this.height - MARGIN.top - MARGIN.bottom };
    const picture = svg("svg", { class: "chart", height: this.height, viewBox: `0 0 ${width} ${this.height}`, role: "img" });
    picture.append(svg("title", {}, this.title));

    const bars = spec.kind === "bars";
    const stacked = spec.x.map((_, i) => spec.series.reduce((sum, each) => sum + (each.values[i] ?? 0), 0));
    const values = (bars ? stacked : spec.series.flatMap((each) => each.values)).filter(isNumber);
    const empty = values.length === 0;
    let least = 0;
    let most = empty ? 1 : Math.max(...values);
    if (!bars && !empty) {
      least = Math.min(0, ...values);
      const smallest = Math.min(...values);
      // Curves far from 0 would be flat lines.
      if (!spec.fromZero && smallest > 0 && most - smallest < 0.4 * most) least = smallest;
    }
    if (most <= least) most = least + (least ? Math.abs(least) * 0.1 : 1);
    if (spec.integers) most = Math.max(most, 4);
    const marks = ticks(least, most, 4);
    const [low, high] = [marks[0], marks[marks.length - 1]];
    const gap = marks.length > 1 ? marks[1] - marks[0] : 1;
    const from = spec.from ?? Math.min(...spec.x);
    const to = spec.to ?? Math.max(...spec.x);
    const across = (x) => MARGIN.left + ((x - from) / (to - from || 1)) * inner.width;
    const up = (y) => MARGIN.top + (1 - (y - low) / (high - low)) * inner.height;

    for (const mark of marks) {
      const y = up(mark);
      picture.append(
        svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y, class: mark === low ? "base" : "rule" }),
        svg("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, spec.format ? format(mark) : marked(Math.abs(mark) < 1e-9 * gap ? 0 : mark, gap)),
      );
    }
    const places = spec.time
      ? timeTicks(from, to, inner.width)
      : ticks(from, to, Math.max(2, Math.floor(inner.width / 60)))
          .filter((x) => x >= from && x <= to && Number.isInteger(x))
          .map((x) => [x, short(x)]);
    for (const [x, text] of places) {
      const anchor = across(x) > width - 30 ? "end" : "middle";
      picture.append(
        svg("line", { x1: across(x), x2: across(x), y1: MARGIN.top + inner.height, y2: MARGIN.top + inner.height + 4, class: "base" }),
        svg("text", { x: anchor === "end" ? width - 2 : across(x), y: this.height - 5, "text-anchor": anchor }, text),
      );
    }
    if (empty) {
      picture.append(svg("text", { x: MARGIN.left + inner.width / 2, y: MARGIN.top + inner.height / 2, "text-anchor": "middle", class: "empty" }, "no data yet"));
    } else if (bars) {
      this.#bars(picture, spec, across, up, low);
    } else {
      for (const each of spec.series) picture.append(this.#line(spec, each, across, up));
    }

    let at = null;
    if (this.hover !== null && spec.x.length) {
      at = 0;
      const middle = (i) => across(spec.x[i] - (bars ? spec.step / 2 : 0));
      spec.x.forEach((_, i) => {
        if (Math.abs(middle(i) - this.hover) < Math.abs(middle(at) - this.hover)) at = i;
      });
      picture.append(svg("line", { x1: middle(at), x2: middle(at), y1: MARGIN.top, y2: MARGIN.top + inner.height, class: "cursor" }));
    }
    this.place.replaceChildren(picture);
    this.#tell(spec, at, format);
  }

  #line(spec, each, across, up) {
    let path = "";
    let pen = false;
    const alone = spec.x.length === 1;
    spec.x.forEach((x, i) => {
      const value = each.values[i];
      if (isNumber(value)) {
        path += `${pen ? "L" : "M"}${across(x).toFixed(1)} ${up(value).toFixed(1)}`;
        const next = each.values[i + 1];
        if (!pen && !isNumber(next)) path += alone ? "h3" : "h1";
      }
      pen = isNumber(value);
    });
    return svg("path", { d: path, class: `s${each.color}` });
  }

  #bars(picture, spec, across, up, low) {
    const full = across(spec.from + spec.step) - across(spec.from);
    const gap = full > 5 ? 1 : full > 2.5 ? 0.5 : 0;
    spec.x.forEach((x, i) => {
      let base = low;
      for (const each of spec.series) {
        const value = each.values[i];
        if (!isNumber(value) || value <= 0) continue;
        const [bottom, top] = [up(base), up(base + value)];
        picture.append(
          svg("rect", {
            x: (across(x - spec.step) + gap / 2).toFixed(2), y: top.toFixed(2),
            width: Math.max(full - gap, 0.6).toFixed(2), height: Math.max(bottom - top, 0.5).toFixed(2), class: `s${each.color}`,
          }),
        );
        base += value;
      }
    });
  }

  #tell(spec, at, format) {
    const parts = spec.series.map((each) => {
      const value = at === null ? each.values[each.values.length - 1] : each.values[at];
      return el("span", {}, el("span", { class: `key s${each.color}` }), `${each.name} `, el("b", {}, format(value)));
    });
    if (at !== null) {
      parts.push(el("span", {}, spec.time ? clock(spec.x[at], spec.to - spec.from > 90000) : `${spec.label ?? ""} ${short(spec.x[at])}`));
    }
    this.legend.replaceChildren(...parts);
  }
}

/** A card with a distribution of durations, on a logarithmic axis. */
export class Durations {
  constructor(title, color) {
    this.color = color;
    this.title = title;
    this.height = 150;
    this.legend = el("div", { class: "legend" });
    this.place = el("div");
    this.card = el("div", { class: "card" }, el("h4", {}, title), this.legend, this.place);
    new ResizeObserver(() => this.#draw()).observe(this.place);
  }

  show(distribution) {
    this.values = distribution;
    this.#draw();
  }

  #draw() {
    const width = this.place.clientWidth;
    const values = this.values;
    if (!values || !width) return;
    const inner = { width: width - MARGIN.left - MARGIN.right, height: this.height - MARGIN.top - MARGIN.bottom };
    const picture = svg("svg", { class: "chart", height: this.height, viewBox: `0 0 ${width} ${this.height}`, role: "img" });
    picture.append(svg("title", {}, this.title));
    const edges = values.edges;
    const factor = 2 ** 0.25;
    let low = edges.length ? edges[0] / factor : 1;
    let high = edges.length ? edges[edges.length - 1] : 60;
    while (high / low < 8) {
      low /= factor;
      high *= factor;
    }
    const across = (x) => MARGIN.left + (Math.log(x / low) / Math.log(high / low)) * inner.width;
    const most = Math.max(4, ...values.counts);
    const marks = ticks(0, most, 3);
    const up = (y) => MARGIN.top + (1 - y / marks[marks.length - 1]) * inner.height;
    for (const mark of marks) {
      picture.append(
        svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: up(mark), y2: up(mark), class: mark ? "rule" : "base" }),
        svg("text", { x: MARGIN.left - 6, y: up(mark) + 4, "text-anchor": "end" }, short(mark)),
      );
    }
    values.counts.forEach((count, i) => {
      if (!count) return;
      const [left, right] = [across(edges[i] / factor), across(edges[i])];
      picture.append(
        svg("rect", { x: (left + 0.5).toFixed(2), y: up(count).toFixed(2), width: Math.max(right - left - 1, 0.6).toFixed(2), height: Math.max(up(0) - up(count), 0.5).toFixed(2), class: `s${this.color}` }),
      );
    });
    let last = -Infinity;
    for (const x of [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 36000, 86400, 172800, 345600]) {
      const place = across(x);
      if (x < low * 0.999 || x > high * 1.001 || place - last < 46) continue;
      last = place;
      picture.append(
        svg("line", { x1: place, x2: place, y1: MARGIN.top + inner.height, y2: MARGIN.top + inner.height + 4, class: "base" }),
        svg("text", { x: place, y: this.height - 5, "text-anchor": place > width - 24 ? "end" : "middle" }, x === 60 ? "1\u202fmin" : x === 3600 ? "1\u202fh" : x === 86400 ? "1\u202fd" : duration(x)),
      );
    }
    if (!values.count) {
      picture.append(svg("text", { x: MARGIN.left + inner.width / 2, y: MARGIN.top + inner.height / 2, "text-anchor": "middle", class: "empty" }, "no data yet"));
    }
    this.place.replaceChildren(picture);
    const said = [["median", values.p50], ["90 %", values.p90], ["99 %", values.p99]];
    this.legend.replaceChildren(
      el("span", {}, el("b", {}, short(values.count)), " counted"),
      ...said.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, duration(value)))),
    );
  }
}
