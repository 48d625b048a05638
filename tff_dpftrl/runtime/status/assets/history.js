// What was released of the chosen task, round by round.

import { Chart } from "./charts.js";
import { $ } from "./drawing.js";
import { isNumber, short } from "./format.js";

const MOST_METRICS = 24;

// Order statistics of the devices' own values, by the end of their column's name.
const QUANTILES = { p10: 4, median: 0, p90: 2 };
const RESOLUTION = "resolution";

const DEVICES = {
  "devices/reports": ["reports", 2],
  "devices/dropped": ["dropped out", 4],
  "devices/outstanding": ["not waited for", 1],
  "devices/late": ["late", 3],
  "devices/unusable": ["unusable", 5],
  "devices/group lost": ["in lost groups", 0],
};
let metricCharts = [];

/** The card of devices, for whoever lays out the task. */
export const perRound = new Chart("Devices of committed rounds", "per round");

function note(answer) {
  const history = answer.history;
  if (answer.error) return `The committed rounds ${answer.error}.`;
  if (!history || !history.rounds) return "No round is released yet.";
  const means = history.round.length < history.rounds ? " (means of neighbouring rounds)" : "";
  return (
    `Of ${short(history.rounds)} released rounds${means}. ` +
    "Figures without noise are not covered by the privacy statement: do not publish them."
  );
}

/** Charts of metrics: one for each column, or for the order statistics of a metric together. */
function chartsOf(columns) {
  const values = Object.fromEntries(columns);
  const charts = [];
  for (const [name, column] of columns) {
    const [, metric, end] = /^(.*)\/(\w+)$/.exec(name) ?? [null, "", ""];
    const found = Object.keys(QUANTILES).filter((each) => `${metric}/${each}` in values);
    if (found.length < 3 || !(end in QUANTILES || end === RESOLUTION)) {
      charts.push({ title: name, series: [{ name: "last", color: 0, values: column }] });
    } else if (end === found[0]) {
      const width = (values[`${metric}/${RESOLUTION}`] ?? []).at(-1);
      charts.push({
        title: `${metric} of single devices`,
        series: found.map((each) => ({
          name: each === "median" && isNumber(width) ? `median ± ${short(width)}` : each,
          color: QUANTILES[each],
          values: values[`${metric}/${each}`],
        })),
      });
    }
  }
  return charts;
}

/** Shows the curves of a task. */
export function showHistory(answer) {
  const history = answer.history;
  $("metrics-note").textContent = note(answer);
  const columns = Object.entries(history?.columns ?? {});
  // Rounds are counted from 1, as they are where they are counted.
  const x = (history?.round ?? []).map((round) => round + 1);
  const axis = { x, label: "round", from: Math.min(1, ...x), to: Math.max(2, ...x) };
  const lines = columns
    .filter(([name]) => DEVICES[name])
    .map(([name, values]) => ({
      name: DEVICES[name][0],
      color: DEVICES[name][1],
      values: values.map((value) => value ?? 0), // What did not happen is not told.
    }));
  perRound.show({ ...axis, series: lines, fromZero: true, integers: true });
  const metrics = chartsOf(
    columns.filter(([name]) => !name.startsWith("devices/") && name !== "privacy/delta"),
  ).slice(0, MOST_METRICS);
  if (
    metricCharts.length !== metrics.length ||
    metrics.some(({ title }, i) => metricCharts[i].title !== title)
  ) {
    metricCharts = metrics.map(({ title }) => new Chart(title, "", 150));
    $("metrics").replaceChildren(...metricCharts.map((chart) => chart.card));
  }
  metrics.forEach(({ series }, i) => metricCharts[i].show({ ...axis, series }));
}
