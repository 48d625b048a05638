// The table of tasks, one of which is chosen.

import { $, el } from "./drawing.js";
import { duration, short, upwards } from "./format.js";

const COLUMNS = [
  "Task",
  "State",
  "This round",
  "Rounds done",
  "Abandoned",
  "Median round",
  "Last commit",
  "ε so far, of all",
];
const STATES = { reporting: "busy", committing: "busy", "too few devices": "bad", over: "over" };
let rows = [];

function makeRows(tasks, choose) {
  const body = el("tbody");
  rows = tasks.map((task, i) => {
    const button = el("button", { type: "button" });
    button.addEventListener("click", () => {
      rows.forEach((row, j) => row.line.classList.toggle("chosen", i === j));
      choose(i);
    });
    const bar = el("progress", { max: 1, value: 0 });
    const said = el("span", { class: "muted" });
    const cells = {
      name: el("td", { class: "name" }, button),
      state: el("td", { "data-label": "State" }, el("span", { class: "state" })),
      round: el("td", { "data-label": "This round" }, el("div", { class: "round" }, bar, said)),
      done: el("td", { class: "number", "data-label": "Rounds done" }),
      abandoned: el("td", { class: "number", "data-label": "Abandoned" }),
      seconds: el("td", { class: "number", "data-label": "Median round" }),
      last: el("td", { class: "number", "data-label": "Last commit" }),
      epsilon: el("td", { class: "number", "data-label": "ε so far, of all" }),
    };
    const line = el("tr", {}, ...Object.values(cells));
    body.append(line);
    return { line, button, bar, said, cells };
  });
  const head = el(
    "tr",
    {},
    ...COLUMNS.map((name, i) => el("th", { class: i > 2 ? "number" : false }, name)),
  );
  $("tasks").replaceChildren(el("table", {}, el("thead", {}, head), body));
}

/** Shows all tasks; `choose` hears of another choice than `chosen`. */
export function showTasks(data, chosen, choose) {
  if (rows.length !== data.tasks.length) makeRows(data.tasks, choose);
  data.tasks.forEach((task, i) => {
    const { line, button, bar, said, cells } = rows[i];
    line.classList.toggle("chosen", i === chosen);
    button.textContent = task.name;
    cells.state.firstChild.textContent = task.phase;
    cells.state.firstChild.className = `state ${STATES[task.phase] ?? ""}`;
    const reports = task.attempt?.reports ?? 0;
    bar.max = task.goal;
    bar.value = Math.min(reports, task.goal);
    said.textContent = task.attempt
      ? `${short(reports)} of ${short(task.goal)} reports, ${short(task.attempt.devices)} devices`
      : `goal ${short(task.goal)} reports`;
    cells.done.textContent =
      task.rounds_done === null
        ? "–"
        : task.rounds_done.toLocaleString("en-GB") +
          (task.num_rounds === null ? "" : ` of ${task.num_rounds.toLocaleString("en-GB")}`);
    cells.abandoned.textContent = short(task.abandoned);
    cells.seconds.textContent = duration(task.round_seconds);
    cells.last.textContent =
      task.last_commit_at === null
        ? "–"
        : `${duration(Math.max(data.now - task.last_commit_at, 0))} ago`;
    cells.epsilon.textContent =
      task.epsilon === undefined
        ? "–"
        : task.epsilon === null
          ? "no guarantee"
          : upwards(task.epsilon) +
            (typeof task.most_epsilon === "number" ? ` of ${upwards(task.most_epsilon)}` : "");
  });
}
