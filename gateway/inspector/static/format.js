// Numbers for eyes: short, with their unit, never more digits than help.

const NONE = "–";

/** Seconds as 430 µs, 12.3 ms, 1.24 s, 3 min 20 s, 5 h 3 min. */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.000995) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 0.00995) return `${(value * 1e3).toFixed(2)} ms`;
  if (size < 0.0995) return `${(value * 1e3).toFixed(1)} ms`;
  if (size < 0.9995) return `${(value * 1e3).toFixed(0)} ms`;
  if (size < 99.5) return `${value.toFixed(2)} s`;
  if (size < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

/** Counts as 950, 12.4k, 3.1M. */
export function count(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size < 10000) return Number.isInteger(value) ? value.toLocaleString("en") : value.toPrecision(3);
  if (size < 999500) return `${(value / 1e3).toPrecision(3)}k`;
  if (size < 999500000) return `${(value / 1e6).toPrecision(3)}M`;
  return `${(value / 1e9).toPrecision(3)}G`;
}

/** Whole numbers with all digits. */
export function whole(value) {
  return value === null || value === undefined ? NONE : value.toLocaleString("en");
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1024) return `${value} B`;
  const units = ["KiB", "MiB", "GiB"];
  let size = value / 1024;
  let unit = 0;
  while (size >= 999.5 && unit < 2) [size, unit] = [size / 1024, unit + 1];
  return `${size < 9.95 ? size.toFixed(1) : size.toFixed(0)} ${units[unit]}`;
}

export function percent(part, all) {
  return all ? `${Math.round((100 * part) / all)} %` : NONE;
}

/** A cost, whose unit depends on the policy. */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10000) return count(value);
  return size >= 100 ? value.toFixed(0) : size >= 0.001 ? Number(value.toPrecision(4)).toString() : value.toExponential(2);
}

/** Unix seconds as a time of day, with a date when it is not today. */
export function clock(value, digits = 0) {
  const when = new Date(value * 1000);
  const time = when.toLocaleTimeString("en-GB", { hour12: false }) + (digits ? `.${String(when.getMilliseconds()).padStart(3, "0")}` : "");
  return when.toDateString() === new Date().toDateString() ? time : `${when.toLocaleDateString("en-CA")} ${time}`;
}

export function plural(number, noun) {
  return `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
}
