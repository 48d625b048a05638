// The status page: asks the server every second, and shows what it says. Names, reasons and
// values are only ever set as text.

import { Chart, Durations, bytes, duration, el, short } from "./charts.js";

const WINDOWS = { minutes: "10 minutes", day: "24 hours", week: "7 days" };
const NUM_STEPS = { minutes: 120, day: 288, week: 168 };
const PER = { minutes: "per 5 s", day: "per 5 min", week: "per hour" };
const POLL = 1000;
const PATIENCE = 10000;
const SILENCE = 5000;
const MOST_METRICS = 24;

const $ = (id) => document.getElementById(id);
const state = { window: null, task: null, taskName: null, version: undefined, answeredAt: null, clockLead: 0 };

// Asking.

async function ask(path) {
  const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

async function poll() {
  try {
    const data = await ask(`data.json?window=${state.window ?? "day"}`);
    state.answeredAt = performance.now();
    if (state.window === null) {
      chooseWindow(data.now - data.started_at);
      if (state.window !== data.window.name) return setTimeout(poll, 0);
    }
    if (data.window.name === state.window) showPopulation(data);
    state.task ??= Math.max(data.tasks.findIndex((task) => task.model_of === null), 0);
    const task = await ask(`task.json?task=${state.task}`);
    if (task.name === data.tasks[state.task]?.name) {
      showTask(task, data.tasks[state.task]);
      if (state.taskName !== task.name || state.version !== task.history_version) {
        const answer = await ask(`history.json?task=${state.task}`);
        if (answer.name === data.tasks[state.task].name) showHistory(answer);
      }
    }
  } catch (error) {
    // Said by `showContact`, when it has lasted.
  }
  setTimeout(poll, document.hidden ? 5 * POLL : POLL);
}

function showContact() {
  const pill = $("contact");
  const silence = state.answeredAt === null ? performance.now() : performance.now() - state.answeredAt;
  const isLost = silence > SILENCE + (document.hidden ? 5 * POLL : 0);
  const text = isLost ? `no answer for ${duration(silence / 1000)}` : state.answeredAt === null ? "connecting" : "live";
  if (pill.textContent !== text) pill.textContent = text;
  pill.className = isLost ? "pill lost" : state.answeredAt === null ? "pill" : "pill live";
  document.querySelector("main").classList.toggle("stale", isLost);
}

function chooseWindow(uptime) {
  const name = uptime < 1200 ? "minutes" : uptime < 2 * 86400 ? "day" : "week";
  $(`window-${name}`).checked = true;
  state.window = name;
}

for (const [name, text] of Object.entries(WINDOWS)) {
  const input = el("input", { type: "radio", name: "window", id: `window-${name}`, value: name });
  input.addEventListener("change", () => {
    state.window = name;
    ask(`data.json?window=${name}`).then((data) => state.window === name && showPopulation(data)).catch(() => {});
  });
  $("windows").append(el("label", {}, input, text));
}

// The population.

const tiles = Object.fromEntries(
  ["Connected", "Waiting", "Participating", "Rounds", "Drop-outs", "Traffic"].map((name) => {
    const value = el("div", { class: "value" }, "–");
    const note = el("div", { class: "note" });
    $("tiles").append(el("div", { class: "tile" }, el("div", { class: "name" }, name), value, note));
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

function showPopulation(data) {
  document.title = `${data.population} – federated learning server`;
  $("population").textContent = data.population;
  $("about").textContent =
    `Federated learning server, up ${duration(data.now - data.started_at)} · ` +
    (data.epoch ? `lease epoch ${data.epoch}` : "nobody leads") +
    (data.leaders > 1 ? ` · ${data.leaders} Coordinators so far` : "");
  showAlerts(data.alerts);

  const { step, end, name } = data.window;
  const series = data.series;
  const shown = WINDOWS[name];
  const seconds = series.committed.length * step;
  const dropped = sum(series.dropped_participating);
  const configured = sum(series.configured);
  tile("Connected", short(data.totals.connected), `${short(data.totals.sessions)} sessions so far`);
  tile("Waiting", short(data.totals.waiting), "to be selected");
  tile("Participating", short(data.totals.participating), "in the rounds that run");
  tile("Rounds", short(data.totals.committed), seconds ? `${short((sum(series.committed) / seconds) * 3600)} an hour (${shown})` : "committed since the start");
  tile("Drop-outs", configured ? `${short((100 * dropped) / configured)}\u202f%` : "–", `of participants (${shown})`);
  tile("Traffic", bytes(data.totals.bytes_sent), `down; ${bytes(data.totals.bytes_received)} up, so far`);

  const count = series.committed.length;
  const x = Array.from({ length: count }, (_, i) => end - (count - 1 - i) * step);
  const axis = { x, step, time: true, from: end - NUM_STEPS[name] * step, to: end };
  const line = (title, color, values) => ({ name: title, color, values });
  charts.devices.unit.textContent = `mean of ${PER[name].replace("per ", "")}`;
  charts.devices.show({
    ...axis, integers: true, fromZero: true,
    series: [
      line("participating", 0, series.participating),
      line("waiting", 1, series.waiting),
      line("connected", 5, series.connected),
    ],
  });
  charts.rounds.unit.textContent = PER[name];
  charts.rounds.show({
    ...axis, kind: "bars", integers: true,
    series: [line("committed", 2, series.committed), line("abandoned", 4, series.abandoned)],
  });
  charts.outcomes.unit.textContent = `devices ${PER[name]}`;
  charts.outcomes.show({
    ...axis, kind: "bars", integers: true,
    series: [
      line("report counted", 2, series.reports),
      line("report refused", 3, series.refused_reports),
      line("dropped out", 4, series.dropped_participating),
    ],
  });
  const rate = (values) => values.map((value) => value / step);
  charts.traffic.show({
    ...axis, format: bytes, fromZero: true,
    series: [line("down to devices", 0, rate(series.bytes_sent)), line("up from devices", 3, rate(series.bytes_received))],
  });
  showTasks(data);
  showSessions(data);
}

let lastAlerts = null;
function showAlerts(alerts) {
  const content = JSON.stringify(alerts);
  if (content === lastAlerts) return; // Screen readers hear what changes.
  lastAlerts = content;
  $("alerts").replaceChildren(
    ...alerts.map((alert) => el("p", { class: "alert" }, el("b", {}, alert.task || "Population"), el("span", {}, alert.text))),
    ...(alerts.length ? [] : [el("p", { class: "alert fine" }, "No alerts.")]),
  );
}

// Tasks.

const COLUMNS = ["Task", "State", "This round", "Rounds done", "Abandoned", "Median round", "Last commit", "ε so far"];
const STATES = { reporting: "busy", committing: "busy", "too few devices": "bad", over: "over" };
let rows = [];

function makeRows(tasks) {
  const body = el("tbody");
  rows = tasks.map((task, i) => {
    const button = el("button", { type: "button" });
    button.addEventListener("click", () => {
      state.task = i;
      rows.forEach((row, j) => row.line.classList.toggle("chosen", i === j));
      ask(`task.json?task=${i}`).then((details) => state.task === i && showTask(details, null)).catch(() => {});
      ask(`history.json?task=${i}`).then((answer) => state.task === i && showHistory(answer)).catch(() => {});
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
      epsilon: el("td", { class: "number", "data-label": "ε so far" }),
    };
    const line = el("tr", {}, ...Object.values(cells));
    body.append(line);
    return { line, button, bar, said, cells };
  });
  const head = el("tr", {}, ...COLUMNS.map((name, i) => el("th", { class: i > 2 ? "number" : false }, name)));
  $("tasks").replaceChildren(el("table", {}, el("thead", {}, head), body));
}

function showTasks(data) {
  if (rows.length !== data.tasks.length) makeRows(data.tasks);
  data.tasks.forEach((task, i) => {
    const { line, button, bar, said, cells } = rows[i];
    line.classList.toggle("chosen", i === state.task);
    button.textContent = task.name;
    cells.state.firstChild.textContent = task.phase;
    cells.state.firstChild.className = `state ${STATES[task.phase] ?? ""}`;
    const reports = task.attempt?.reports ?? 0;
    bar.max = task.goal;
    bar.value = Math.min(reports, task.goal);
    said.textContent = task.attempt
      ? `${short(reports)} of ${short(task.goal)} reports, ${short(task.attempt.devices)} devices`
      : `goal ${short(task.goal)} reports`;
    cells.done.textContent = task.rounds_done === null ? "–" : task.rounds_done.toLocaleString("en-GB") + (task.num_rounds === null ? "" : ` of ${task.num_rounds.toLocaleString("en-GB")}`);
    cells.abandoned.textContent = short(task.abandoned);
    cells.seconds.textContent = duration(task.round_seconds);
    cells.last.textContent = task.last_commit_at === null ? "–" : `${duration(Math.max(data.now - task.last_commit_at, 0))} ago`;
    cells.epsilon.textContent = task.epsilon === undefined ? "–" : task.epsilon === null ? "no guarantee" : upwards(task.epsilon);
  });
}

/** Costs in privacy are rounded up. */
function upwards(value) {
  if (typeof value !== "number") return "–";
  const scale = 10 ** Math.max(0, 3 - Math.ceil(Math.log10(Math.max(value, 1e-9))));
  return String(Math.ceil(value * scale - 1e-9) / scale);
}

// One task.

const privacyCard = el("div", { class: "card" });
const outcomeCard = el("div", { class: "card" });
const details = {
  perRound: new Chart("Devices of committed rounds", "per round"),
  rounds: new Durations("Round duration", 2),
  reports: new Durations("From the round’s start to a device’s report", 0),
};
$("task").append(privacyCard, details.perRound.card, outcomeCard, el("div", { class: "stack" }, details.rounds.card, details.reports.card));

function table(head, lines, numbers = [1]) {
  const cell = (tag, value, i) => el(tag, { class: numbers.includes(i) ? "number" : false }, value);
  return el(
    "table", {},
    el("thead", {}, el("tr", {}, ...head.map((value, i) => cell("th", value, i)))),
    el("tbody", {}, ...lines.map((line) => el("tr", {}, ...line.map((value, i) => cell("td", value, i))))),
  );
}

function showTask(task, listed) {
  if (state.taskName !== task.name) {
    state.version = undefined;
    $("task-title").textContent = `Task ${task.name}`;
  }
  if (listed) {
    $("task-note").textContent =
      (listed.model_of === null ? "" : `Evaluates the model of ${listed.model_of}. `) +
      `A round is complete with ${short(listed.goal)} reports, and needs ${short(listed.least)}.`;
  }
  details.rounds.show(task.round_seconds);
  details.reports.show(task.report_seconds);
  showPrivacy(task);
  const reports = sum(task.reports.map(([, count]) => count));
  outcomeCard.replaceChildren(
    el("h4", {}, "Since the server started"),
    table(
      ["Reports", "count", "share"],
      task.reports.length ? task.reports.map(([name, count]) => [name, short(count), `${short((100 * count) / reports)}\u202f%`]) : [["none yet", "", ""]],
      [1, 2],
    ),
    table(["Abandoned rounds, by reason", "count"], task.abandoned.length ? task.abandoned.map(([name, count]) => [name, short(count)]) : [["none", ""]]),
    table(["Traffic", ""], [["down to devices", bytes(task.bytes_sent)], ["up from devices", bytes(task.bytes_received)]]),
  );
}

function showPrivacy(task) {
  const privacy = task.privacy;
  const parts = [el("h4", {}, "Privacy so far")];
  if (task.privacy_error) parts.push(el("p", { class: "bad" }, task.privacy_error));
  if (privacy === null || typeof privacy !== "object") {
    parts.push(el("p", { class: "muted" }, "No figures: nothing was released yet, or the task is not private."));
  } else {
    const texts = (value) => (Array.isArray(value) ? value : value ? [value] : []).map((text) => el("li", {}, String(text)));
    if (privacy.epsilon === null || privacy.epsilon === undefined) {
      parts.push(el("p", { class: "big bad" }, "No guarantee"), el("ul", {}, ...texts(privacy.no_guarantee)));
    } else {
      parts.push(el("p", { class: "big" }, `ε = ${upwards(privacy.epsilon)}`));
      const said = [];
      if (privacy.delta !== undefined) said.push(`δ = ${short(privacy.delta)}`);
      if (typeof privacy.rho_zcdp === "number") said.push(`ρ = ${upwards(privacy.rho_zcdp)} (zCDP)`);
      if (privacy.unit_of_privacy) said.push(`for each ${privacy.unit_of_privacy}`);
      parts.push(el("p", { class: "muted" }, said.join(", ")));
    }
    if (typeof privacy.budget_epsilon === "number") {
      const used = privacy.epsilon ?? 0;
      const bar = el("progress", { max: privacy.budget_epsilon, value: Math.min(used, privacy.budget_epsilon) });
      if (used > 0.9 * privacy.budget_epsilon) bar.className = "full";
      parts.push(bar, el("p", { class: "muted" }, `${short((100 * used) / privacy.budget_epsilon)}\u202f% of the budget of ε = ${short(privacy.budget_epsilon)}`));
    }
    if (privacy.stopped) parts.push(el("p", {}, `No further round: ${privacy.stopped}.`));
    const observed = privacy.observed ?? privacy;
    const of = (schema, name) => (schema && schema[name] !== null && schema[name] !== undefined ? short(schema[name]) : "–");
    parts.push(
      table(
        ["Participation", "declared", "observed"],
        [
          ["rounds", of(privacy.declared, "num_rounds"), of(observed, "num_rounds")],
          ["least separation, rounds (MinS)", of(privacy.declared, "min_sep"), of(observed, "min_sep")],
          ["most times of a device (MaxP)", of(privacy.declared, "max_participations"), of(observed, "max_participations")],
        ],
        [1, 2],
      ),
    );
    const caveats = texts(privacy.headline_caveats);
    if (caveats.length) parts.push(el("ul", { class: "muted" }, ...caveats));
  }
  privacyCard.replaceChildren(...parts);
}

// Committed rounds.

const DEVICES = { "devices/reports": ["reports", 2], "devices/dropped": ["dropped out", 4], "devices/outstanding": ["not waited for", 1], "devices/late": ["late", 3], "devices/unusable": ["unusable", 5] };
let metricCharts = [];

function showHistory(answer) {
  state.taskName = answer.name;
  state.version = answer.version;
  const history = answer.history;
  $("metrics-note").textContent = answer.error
    ? `The committed rounds ${answer.error}.`
    : !history || !history.rounds
      ? "No round is committed yet."
      : `As committed, of ${short(history.rounds)} rounds${history.round.length < history.rounds ? " (means of neighbouring rounds)" : ""}. ` +
        "Figures without noise are not covered by the privacy statement: do not publish them.";
  const columns = Object.entries(history?.columns ?? {});
  // Rounds are counted from 1, as they are where they are counted.
  const x = (history?.round ?? []).map((round) => round + 1);
  const axis = { x, label: "round", from: Math.min(1, ...x), to: Math.max(2, ...x) };
  const lines = columns.filter(([name]) => DEVICES[name]).map(([name, values]) => ({ name: DEVICES[name][0], color: DEVICES[name][1], values }));
  details.perRound.show({ ...axis, series: lines, fromZero: true, integers: true });
  const metrics = columns.filter(([name]) => !name.startsWith("devices/") && name !== "privacy/delta").slice(0, MOST_METRICS);
  if (metricCharts.length !== metrics.length || metrics.some(([name], i) => metricCharts[i].title !== name)) {
    metricCharts = metrics.map(([name]) => new Chart(name, "", 150));
    $("metrics").replaceChildren(...metricCharts.map((chart) => chart.card));
  }
  metrics.forEach(([, values], i) => metricCharts[i].show({ ...axis, series: [{ name: "last", color: 0, values }] }));
}

// Sessions.

const LEGEND = "- check-in, v plan, [ training began, ] ended, + upload began, ^ done, # refused by the server, ! interrupted, * error, ? attestation failed";
const sessionCards = {
  shapes: el("div", { class: "card" }),
  reasons: el("div", { class: "card" }),
  versions: el("div", { class: "card" }),
};
const sessionSeconds = new Durations("Session duration, as devices told", 5);
$("sessions").append(sessionCards.shapes, sessionSeconds.card, sessionCards.reasons, sessionCards.versions);
let lastSessions = null;

function showSessions(data) {
  const content = JSON.stringify([data.session_shapes, data.refused_sessions, data.sent_away, data.versions]);
  if (content === lastSessions) return;
  lastSessions = content;
  const shapes = data.session_shapes.map(([shape, count, percent]) => {
    const bar = el("span", { class: "share" });
    bar.style.width = `${Math.max(percent, 0.5)}px`;
    return [el("code", {}, shape), count.toLocaleString("en-GB"), `${percent.toFixed(1)}\u202f%`, bar];
  });
  sessionCards.shapes.replaceChildren(
    el("h4", {}, "Session shapes"),
    el("div", { class: "scrolls tall" }, table(["Shape", "count", "percent", ""], shapes.length ? shapes : [["none told yet", "", "", ""]], [1, 2])),
    el("p", { class: "muted" }, LEGEND),
  );
  const counted = (pairs) => (pairs.length ? pairs.map(([name, count]) => [name, count.toLocaleString("en-GB")]) : [["none", ""]]);
  sessionCards.reasons.replaceChildren(
    el("h4", {}, "Turned away"),
    el("div", { class: "scrolls tall" },
      table(["Sessions ended with an error, by reason", "count"], counted(data.refused_sessions)),
      table(["Devices told to come back, by reason", "count"], counted(data.sent_away)),
    ),
  );
  const versions = Object.entries(data.versions).flatMap(([name, pairs]) => pairs.map(([version, count]) => [`${name} ${version}`, count.toLocaleString("en-GB")]));
  sessionCards.versions.replaceChildren(
    el("h4", {}, "Versions, as devices told"),
    el("div", { class: "scrolls tall" }, table(["Version", "sessions"], versions.length ? versions : [["none told yet", ""]])),
  );
  sessionSeconds.show(data.session_seconds);
}

setInterval(showContact, 500);
document.addEventListener("visibilitychange", showContact);
poll();
