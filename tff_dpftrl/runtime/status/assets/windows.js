// The times that can be shown: ten minutes, a day or a week.

export const WINDOWS = {
  minutes: { shown: "10 minutes", per: "per 5 s", numSteps: 120 },
  day: { shown: "24 hours", per: "per 5 min", numSteps: 288 },
  week: { shown: "7 days", per: "per hour", numSteps: 168 },
};

/** The one that fits a server that is up for so many seconds. */
export function suitable(uptime) {
  return uptime < 1200 ? "minutes" : uptime < 2 * 86400 ? "day" : "week";
}
