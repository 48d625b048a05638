// Details of the chosen task.

import { $, el, table } from "./drawing.js";
import { Durations } from "./durations.js";
import { bytes, clock, isNumber, short, upwards } from "./format.js";
import { perRound } from "./history.js";

const privacyCard = el("div", { class: "card" });
const outcomeCard = el("div", { class: "card" });
const details = {
  rounds: new Durations("Round duration", 2),
  reports: new Durations("From the round’s start to a device’s report", 0),
};
$("task").append(
  privacyCard,
  perRound.card,
  outcomeCard,
  el("div", { class: "stack" }, details.rounds.card, details.reports.card),
);

/** Shows a task: its details, and what the list of all tasks says of it. */
export function showTask(task, listed, index) {
  $("task-title").textContent = `Task ${task.name}`;
  $("task-note").textContent =
    (listed.model_of === null ? "" : `Evaluates the model of ${listed.model_of}. `) +
    `A round is complete with ${short(listed.goal)} reports, and needs ${short(listed.least)}.`;
  showOutlook(listed.outlook);
  showReport(task.report, index);
  details.rounds.show(task.round_seconds);
  details.reports.show(task.report_seconds);
  showPrivacy(task);
  const reports = task.reports.reduce((total, [, count]) => total + count, 0);
  outcomeCard.replaceChildren(
    el("h4", {}, "Since the server started"),
    table(
      ["Reports", "count", "share"],
      task.reports.length
        ? task.reports.map(([name, count]) => [
            name,
            short(count),
            `${short((100 * count) / reports)}\u202f%`,
          ])
        : [["none yet", "", ""]],
      [1, 2],
    ),
    table(
      ["Abandoned rounds, by reason", "count"],
      task.abandoned.length
        ? task.abandoned.map(([name, count]) => [name, short(count)])
        : [["none", ""]],
    ),
    table(
      ["Traffic", ""],
      [
        ["down to devices", bytes(task.bytes_sent)],
        ["up from devices", bytes(task.bytes_received)],
      ],
    ),
  );
}

let lastOutlook = null;

/** Shows where the next round stands, and why it does not begin. */
function showOutlook(sentences) {
  const content = JSON.stringify(sentences);
  if (content === lastOutlook) return; // Screen readers hear what changes.
  lastOutlook = content;
  $("outlook").replaceChildren(...sentences.map((text) => el("p", {}, text)));
}

/** Shows links to the files of the task's report. */
function showReport(files, index) {
  const content = JSON.stringify([files, index]);
  if ($("report").dataset.content === content) return; // A link keeps the focus.
  $("report").dataset.content = content;
  const links = files.flatMap(([name, writtenAt]) => [
    el("a", { href: `report/${index}/${name}`, target: "_blank", rel: "noopener" }, name),
    ` (${clock(writtenAt, true)}) `,
  ]);
  $("report").replaceChildren(
    ...(links.length
      ? ["Report, as it was last written: ", ...links]
      : ["No report is written yet: tff-dpftrl task report writes one into the task’s folder."]),
  );
}

/** What the statement would charge, and what the committed rounds and the next one do. */
function spentSoFar(privacy) {
  const said = [];
  const rounds = privacy.num_rounds ?? privacy.observed?.num_rounds;
  if (isNumber(rounds)) {
    const skipped = privacy.skipped_rounds ? `, ${short(privacy.skipped_rounds)} of them skipped` : "";
    said.push(`Charged: ${short(rounds)} committed rounds${skipped}.`);
  }
  if (isNumber(privacy.next_epsilon) && !privacy.stopped)
    said.push(
      `With one more round, such as one that runs: ε = ${upwards(privacy.next_epsilon)}. ` +
        "A round whose devices took part is charged even if it fails.",
    );
  const most = [privacy.declared_epsilon, privacy.budget_epsilon].filter(isNumber);
  if (most.length && !privacy.stopped)
    said.push(
      `All rounds that there may be: ε = ${upwards(Math.min(...most))}. ` +
        "Quote this one until the task is over, as the privacy statement does.",
    );
  return said.map((text) => el("p", { class: "muted" }, text));
}

function showPrivacy(task) {
  const privacy = task.privacy;
  const parts = [el("h4", {}, "Privacy so far")];
  if (task.privacy_error) parts.push(el("p", { class: "bad" }, task.privacy_error));
  if (privacy === null || typeof privacy !== "object") {
    parts.push(
      el(
        "p",
        { class: "muted" },
        "No figures: nothing was released yet, or the task is not private.",
      ),
    );
  } else {
    const texts = (value) =>
      (Array.isArray(value) ? value : value ? [value] : []).map((text) =>
        el("li", {}, String(text)),
      );
    if (privacy.epsilon === null || privacy.epsilon === undefined) {
      parts.push(
        el("p", { class: "big bad" }, "No guarantee"),
        el("ul", {}, ...texts(privacy.no_guarantee)),
      );
    } else {
      parts.push(el("p", { class: "big" }, `ε = ${upwards(privacy.epsilon)}`));
      const said = [];
      if (privacy.delta !== undefined) said.push(`δ = ${upwards(privacy.delta)}`);
      if (typeof privacy.rho_zcdp === "number")
        said.push(`ρ = ${upwards(privacy.rho_zcdp)} (zCDP)`);
      if (privacy.unit_of_privacy) said.push(`for each ${privacy.unit_of_privacy}`);
      parts.push(el("p", { class: "muted" }, said.join(", ")), ...spentSoFar(privacy));
    }
    if (typeof privacy.budget_epsilon === "number") {
      const used = privacy.epsilon ?? 0;
      const bar = el("progress", {
        max: privacy.budget_epsilon,
        value: Math.min(used, privacy.budget_epsilon),
      });
      if (used > 0.9 * privacy.budget_epsilon) bar.className = "full";
      parts.push(
        bar,
        el(
          "p",
          { class: "muted" },
          `${upwards((100 * used) / privacy.budget_epsilon)}\u202f% of the budget of ` +
            `ε = ${upwards(privacy.budget_epsilon)}`,
        ),
      );
    }
    if (privacy.stopped) parts.push(el("p", {}, `No further round: ${privacy.stopped}.`));
    const observed = privacy.observed ?? privacy;
    const of = (schema, name) =>
      schema && schema[name] !== null && schema[name] !== undefined ? short(schema[name]) : "–";
    parts.push(
      table(
        ["Participation", "declared", "reported by devices"],
        [
          ["rounds", of(privacy.declared, "num_rounds"), of(observed, "num_rounds")],
          [
            "least separation, rounds (MinS)",
            of(privacy.declared, "min_sep"),
            of(observed, "min_sep"),
          ],
          [
            "most times of a device (MaxP)",
            of(privacy.declared, "max_participations"),
            of(observed, "max_participations"),
          ],
        ],
        [1, 2],
      ),
    );
    const caveats = texts(privacy.headline_caveats);
    if (caveats.length) parts.push(el("ul", { class: "muted" }, ...caveats));
  }
  privacyCard.replaceChildren(...parts);
}
