// What the operator should look at.

import { $, el } from "./drawing.js";

let lastAlerts = null;

/** Shows the alerts of the moment. */
export function showAlerts(alerts) {
  const content = JSON.stringify(alerts);
  if (content === lastAlerts) return; // Screen readers hear what changes.
  lastAlerts = content;
  $("alerts").replaceChildren(
    ...alerts.map((alert) =>
      el(
        "p",
        { class: "alert" },
        el("b", {}, alert.task || "Population"),
        el("span", {}, alert.text),
      ),
    ),
    ...(alerts.length ? [] : [el("p", { class: "alert fine" }, "No alerts.")]),
  );
}
