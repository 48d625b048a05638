// What devices told of their sessions, and who was turned away.

import { $, el, table } from "./drawing.js";
import { Durations } from "./durations.js";

const LEGEND =
  "- check-in, v plan, [ training began, ] ended, + upload began, ^ done, " +
  "# refused by the server, ! interrupted, * error, ? attestation failed. " +
  "Of the last two to four weeks, as devices told: nobody has verified it.";
const sessionCards = {
  shapes: el("div", { class: "card" }),
  reasons: el("div", { class: "card" }),
  versions: el("div", { class: "card" }),
};
const sessionSeconds = new Durations("Duration of sessions with a plan, as devices told", 5);
$("sessions").append(
  sessionCards.shapes,
  sessionSeconds.card,
  sessionCards.reasons,
  sessionCards.versions,
);
let lastSessions = null;

/** Shows tables and the distribution. */
export function showSessions(data) {
  const content = JSON.stringify([
    data.session_shapes,
    data.refused_sessions,
    data.sent_away,
    data.versions,
  ]);
  if (content === lastSessions) return;
  lastSessions = content;
  const shapes = data.session_shapes.map(([shape, count, percent]) => {
    const bar = el("span", { class: "share" });
    bar.style.width = percent === null ? "0" : `${Math.max(percent, 0.5)}px`;
    return [
      el("code", {}, shape),
      count.toLocaleString("en-GB"),
      percent === null ? "" : `${percent.toFixed(1)}\u202f%`,
      bar,
    ];
  });
  sessionCards.shapes.replaceChildren(
    el("h4", {}, "Session shapes"),
    el(
      "div",
      { class: "scrolls tall" },
      table(
        ["Shape", "count", "of those with a plan", ""],
        shapes.length ? shapes : [["none told yet", "", "", ""]],
        [1, 2],
      ),
    ),
    el("p", { class: "muted" }, LEGEND),
  );
  const counted = (pairs) =>
    pairs.length
      ? pairs.map(([name, count]) => [name, count.toLocaleString("en-GB")])
      : [["none", ""]];
  sessionCards.reasons.replaceChildren(
    el("h4", {}, "Turned away"),
    el(
      "div",
      { class: "scrolls tall" },
      table(["Sessions ended with an error, by reason", "count"], counted(data.refused_sessions)),
      table(["Devices told to come back, by reason", "count"], counted(data.sent_away)),
    ),
  );
  const versions = Object.entries(data.versions).flatMap(([name, pairs]) =>
    pairs.map(([version, count]) => [`${name} ${version}`, count.toLocaleString("en-GB")]),
  );
  sessionCards.versions.replaceChildren(
    el("h4", {}, "Versions, as devices told"),
    el(
      "div",
      { class: "scrolls tall" },
      table(["Version", "sessions"], versions.length ? versions : [["none told yet", ""]]),
    ),
  );
  sessionSeconds.show(data.session_seconds);
}
