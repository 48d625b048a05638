// The status page: asks the server every second, and shows what it says. Names, reasons and
// values are only ever set as text.

import { showAlerts } from "./alerts.js";
import { $, el } from "./drawing.js";
import { duration } from "./format.js";
import { showHistory } from "./history.js";
import { showPopulation } from "./population.js";
import { showSessions } from "./sessions.js";
import { showTask } from "./task.js";
import { showTasks } from "./tasks.js";
import { WINDOWS, suitable } from "./windows.js";

const POLL = 1000; // Milliseconds.
const PATIENCE = 10000;
const SILENCE = 5000;

const state = { window: null, task: null, listed: [], history: "", answeredAt: null };

async function ask(path) {
  const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (!response.ok) throw new Error(`status ${response.status}`);
  state.answeredAt = performance.now();
  return response.json();
}

async function askForPopulation() {
  const data = await ask(`data.json?window=${state.window ?? "day"}`);
  if (state.window === null) {
    state.window = suitable(data.now - data.started_at);
    $(`window-${state.window}`).checked = true;
  }
  state.listed = data.tasks;
  state.task ??= Math.max(
    data.tasks.findIndex((task) => task.model_of === null),
    0,
  );
  showAlerts(data.alerts);
  showTasks(data, state.task, choose);
  showSessions(data);
  if (data.window.name !== state.window) return askForPopulation(); // Another one was chosen.
  showPopulation(data);
}

async function askForTask() {
  const index = state.task;
  const task = await ask(`task.json?task=${index}`);
  if (index !== state.task || task.name !== state.listed[index]?.name) return;
  showTask(task, state.listed[index], index);
  const history = JSON.stringify([task.name, task.history_state]);
  if (history === state.history) return;
  const answer = await ask(`history.json?task=${index}`);
  if (index !== state.task) return;
  showHistory(answer);
  state.history = JSON.stringify([answer.name, answer.state]);
}

/** What fails now is asked for again; `showContact` tells when that has lasted. */
function quietly(asking) {
  return asking.catch(() => {});
}

async function poll() {
  await quietly(askForPopulation().then(askForTask));
  setTimeout(poll, document.hidden ? 5 * POLL : POLL);
}

function choose(index) {
  state.task = index;
  quietly(askForTask());
}

function showContact() {
  const silence = performance.now() - (state.answeredAt ?? 0);
  const isLost = silence > SILENCE + (document.hidden ? 5 * POLL : 0);
  const [text, kind] = isLost
    ? [`no answer for ${duration(silence / 1000)}`, "pill lost"]
    : state.answeredAt === null
      ? ["connecting", "pill"]
      : ["live", "pill live"];
  const pill = $("contact");
  if (pill.textContent !== text) pill.textContent = text; // Screen readers hear what changes.
  pill.className = kind;
  document.querySelector("main").classList.toggle("stale", isLost);
}

for (const [name, { shown }] of Object.entries(WINDOWS)) {
  const input = el("input", { type: "radio", name: "window", id: `window-${name}`, value: name });
  input.addEventListener("change", () => {
    state.window = name;
    quietly(askForPopulation());
  });
  $("windows").append(el("label", {}, input, shown));
}
setInterval(showContact, 500);
document.addEventListener("visibilitychange", showContact);
poll();
