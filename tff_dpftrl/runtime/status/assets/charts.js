// Charts of what changes, as inline SVG.

import { MARGIN, el, svg, ticks, timeTicks } from "./drawing.js";
import { clock, isNumber, marked, short } from "./format.js";

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
    this.card = el(
      "div",
      { class: "card" },
      el("h4", {}, `${title} `, this.unit),
      this.legend,
      this.place,
    );
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
    const content = JSON.stringify(spec, (key, value) =>
      typeof value === "function" ? undefined : value,
    );
    if (!anyway && content === this.seen) return;
    this.seen = content;
    const format = spec.format ?? short;
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

    const bars = spec.kind === "bars";
    const stacked = spec.x.map((_, i) =>
      spec.series.reduce((sum, each) => sum + (each.values[i] ?? 0), 0),
    );
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
        svg("line", {
          x1: MARGIN.left,
          x2: width - MARGIN.right,
          y1: y,
          y2: y,
          class: mark === low ? "base" : "rule",
        }),
        svg(
          "text",
          { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" },
          spec.format ? format(mark) : marked(Math.abs(mark) < 1e-9 * gap ? 0 : mark, gap),
        ),
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
        svg("line", {
          x1: across(x),
          x2: across(x),
          y1: MARGIN.top + inner.height,
          y2: MARGIN.top + inner.height + 4,
          class: "base",
        }),
        svg(
          "text",
          {
            x: anchor === "end" ? width - 2 : across(x),
            y: this.height - 5,
            "text-anchor": anchor,
          },
          text,
        ),
      );
    }
    if (empty) {
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
      picture.append(
        svg("line", {
          x1: middle(at),
          x2: middle(at),
          y1: MARGIN.top,
          y2: MARGIN.top + inner.height,
          class: "cursor",
        }),
      );
    }
    this.place.replaceChildren(picture);
    this.#tell(spec, at, format);
  }

  #line(spec, each, across, up) {
    let path = "";
    let pen = false;
    spec.x.forEach((x, i) => {
      const value = each.values[i];
      if (isNumber(value)) {
        path += `${pen ? "L" : "M"}${across(x).toFixed(1)} ${up(value).toFixed(1)}`;
        const next = each.values[i + 1];
        if (!pen && !isNumber(next)) path += "m-1.5 0h3"; // A point by itself.
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
            x: (across(x - spec.step) + gap / 2).toFixed(2),
            y: top.toFixed(2),
            width: Math.max(full - gap, 0.6).toFixed(2),
            height: Math.max(bottom - top, 0.5).toFixed(2),
            class: `s${each.color}`,
          }),
        );
        base += value;
      }
    });
  }

  #tell(spec, at, format) {
    const parts = spec.series.map((each) => {
      const value = at === null ? each.values[each.values.length - 1] : each.values[at];
      return el(
        "span",
        {},
        el("span", { class: `key s${each.color}` }),
        `${each.name} `,
        el("b", {}, format(value)),
      );
    });
    if (at !== null) {
      parts.push(
        el(
          "span",
          {},
          spec.time
            ? clock(spec.x[at], spec.to - spec.from > 90000)
            : `${spec.label ?? ""} ${short(spec.x[at])}`,
        ),
      );
    }
    this.legend.replaceChildren(...parts);
  }
}
