// Numbers, sizes and times, as people read them.

/** Whether it is a number that can be drawn. */
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** A number as people read it. */
export function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return value.toExponential(1).replace(".0e", "e");
  for (const [unit, letter] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
    if (size >= unit) {
      const scale = letter === "k" ? 1e3 : unit;
      return `${Number((value / scale).toPrecision(3))}\u202f${letter}`;
    }
  }
  return String(Number(value.toPrecision(size >= 1000 ? 4 : 3)));
}

/** A size in bytes. */
export function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  const place = Math.min(Math.floor(Math.log10(Math.max(value, 1)) / 3), units.length - 1);
  return `${Number((value / 1000 ** place).toPrecision(3))}\u202f${units[place]}`;
}

/** Seconds, in a unit that suits them. */
export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  for (const [unit, size] of [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
  ]) {
    if (seconds >= 2 * size)
      return `${Number((seconds / size).toPrecision(seconds >= 100 * size ? 3 : 2))}\u202f${unit}`;
  }
  return `${Number(seconds.toPrecision(2))}\u202fs`;
}

const two = (number) => String(number).padStart(2, "0");
export const DAYS = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];

/** A time of day, here where the page is looked at. */
export function clock(seconds, withDay) {
  const date = new Date(seconds * 1000);
  const time = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return withDay ? `${DAYS[date.getDay()]} ${date.getDate()}, ${time}` : time;
}

/** Numbers of an axis, with as many places as tell them apart. */
export function marked(value, step) {
  const size = Math.abs(value);
  if (size >= 1e4 || (size > 0 && size < 1e-4)) return short(value);
  return value.toFixed(Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9))));
}

/** Costs in privacy are rounded up. */
export function upwards(value) {
  if (typeof value !== "number") return "–";
  const scale = 10 ** Math.max(0, 3 - Math.ceil(Math.log10(Math.max(value, 1e-9))));
  return String(Math.ceil(value * scale - 1e-9) / scale);
}
