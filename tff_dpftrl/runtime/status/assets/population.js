// The population as a whole: what is now, and what was in the time that is shown.

import { Chart } from "./charts.js";
import { $, el } from "./drawing.js";
import { bytes, duration, short } from "./format.js";
import { WINDOWS } from "./windows.js";

const tiles = Object.fromEntries(
  ["Connected", "Waiting", "Participating", "Rounds", "Drop-outs", "Traffic"].map((name) => {
    const value = el("div", { class: "value" }, "–");
    const note = el("div", { class: "note" });
    $("tiles").append(
      el("div", { class: "tile" }, el("div", { class: "name" }, name), value, note),
    );
    return [name, { value, note }];
  }),
);

function tile(name, value, note) {
  tiles[name].value.textContent = value;
  tiles[name].note.textContent = note;
}

const charts = {
  devices: new Chart("Devices", ""),
  rounds: new Chart("Rounds", ""),
  outcomes: new Chart("What became of devices that took part", ""),
  traffic: new Chart("Traffic", "per second"),
};
$("charts").append(...Object.values(charts).map((chart) => chart.card));

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Shows tiles and charts. */
export function showPopulation(data) {
  document.title = `${data.population} – federated learning server`;
  $("population").textContent = data.population;
  $("about").textContent =
    `Federated learning server, up ${duration(data.now - data.started_at)} · ` +
    (data.epoch ? `lease epoch ${data.epoch}` : "nobody leads") +
    (data.leaders > 1 ? ` · ${data.leaders} Coordinators so far` : "");

  const { step, end } = data.window;
  const { shown, per, numSteps } = WINDOWS[data.window.name];
  const series = data.series;
  const seconds = series.committed.length * step;
  const dropped = sum(series.dropped_participating);
  const configured = sum(series.configured);
  tile("Connected", short(data.totals.connected), `${short(data.totals.sessions)} sessions so far`);
  tile("Waiting", short(data.totals.waiting), "to be selected");
  tile("Participating", short(data.totals.participating), "in the rounds that run");
  tile(
    "Rounds",
    short(data.totals.committed),
    seconds
      ? `${short((sum(series.committed) / seconds) * 3600)} an hour (${shown})`
      : "committed since the start",
  );
  tile(
    "Drop-outs",
    configured ? `${short((100 * dropped) / configured)}\u202f%` : "–",
    `of participants (${shown})`,
  );
  tile(
    "Traffic",
    bytes(data.totals.bytes_sent),
    `down; ${bytes(data.totals.bytes_received)} up, so far`,
  );

  const count = series.committed.length;
  const x = Array.from({ length: count }, (_, i) => end - (count - 1 - i) * step);
  const axis = { x, step, time: true, from: end - numSteps * step, to: end };
  const line = (title, color, values) => ({ name: title, color, values });
  charts.devices.unit.textContent = `mean of ${per.replace("per ", "")}`;
  charts.devices.show({
    ...axis,
    integers: true,
    fromZero: true,
    series: [
      line("participating", 0, series.participating),
      line("waiting", 1, series.waiting),
      line("connected", 5, series.connected),
    ],
  });
  charts.rounds.unit.textContent = per;
  charts.rounds.show({
    ...axis,
    kind: "bars",
    integers: true,
    series: [line("committed", 2, series.committed), line("abandoned", 4, series.abandoned)],
  });
  charts.outcomes.unit.textContent = `devices ${per}`;
  charts.outcomes.show({
    ...axis,
    kind: "bars",
    integers: true,
    series: [
      line("report counted", 2, series.reports),
      line("report refused", 3, series.refused_reports),
      line("dropped out", 4, series.dropped_participating),
    ],
  });
  const rate = (values) => values.map((value) => value / step);
  charts.traffic.show({
    ...axis,
    format: bytes,
    fromZero: true,
    series: [
      line("down to devices", 0, rate(series.bytes_sent)),
      line("up from devices", 3, rate(series.bytes_received)),
    ],
  });
}
