// Distributions of durations, as inline SVG.

import { MARGIN, el, svg, ticks } from "./drawing.js";
import { duration, short } from "./format.js";

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
    const inner = {
      width: width - MARGIN.left - MARGIN.right,
      height: this.height - MARGIN.top - MARGIN.bottom,
    };
    const picture = svg("svg", {
      class: "chart",
      height: this.height,
      viewBox: `0 0 ${width} ${this.height}`,
      role: "img",
    });
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
        svg("line", {
          x1: MARGIN.left,
          x2: width - MARGIN.right,
          y1: up(mark),
          y2: up(mark),
          class: mark ? "rule" : "base",
        }),
        svg("text", { x: MARGIN.left - 6, y: up(mark) + 4, "text-anchor": "end" }, short(mark)),
      );
    }
    values.counts.forEach((count, i) => {
      if (!count) return;
      const [left, right] = [across(edges[i] / factor), across(edges[i])];
      picture.append(
        svg("rect", {
          x: (left + 0.5).toFixed(2),
          y: up(count).toFixed(2),
          width: Math.max(right - left - 1, 0.6).toFixed(2),
          height: Math.max(up(0) - up(count), 0.5).toFixed(2),
          class: `s${this.color}`,
        }),
      );
    });
    let last = -Infinity;
    for (const x of [
      0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 36000,
      86400, 172800, 345600,
    ]) {
      const place = across(x);
      if (x < low * 0.999 || x > high * 1.001 || place - last < 46) continue;
      last = place;
      picture.append(
        svg("line", {
          x1: place,
          x2: place,
          y1: MARGIN.top + inner.height,
          y2: MARGIN.top + inner.height + 4,
          class: "base",
        }),
        svg(
          "text",
          { x: place, y: this.height - 5, "text-anchor": place > width - 24 ? "end" : "middle" },
          x === 60
            ? "1\u202fmin"
            : x === 3600
              ? "1\u202fh"
              : x === 86400
                ? "1\u202fd"
                : duration(x),
        ),
      );
    }
    if (!values.count) {
      picture.append(
        svg(
          "text",
          {
            x: MARGIN.left + inner.width / 2,
            y: MARGIN.top + inner.height / 2,
            "text-anchor": "middle",
            class: "empty",
          },
          "no data yet",
        ),
      );
    }
    this.place.replaceChildren(picture);
    const said = [
      ["median", values.p50],
      ["90 %", values.p90],
      ["99 %", values.p99],
    ];
    this.legend.replaceChildren(
      el("span", {}, el("b", {}, short(values.count)), " counted"),
      ...said.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, duration(value)))),
    );
  }
}
