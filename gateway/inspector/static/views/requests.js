// Requests: what ended, as it ends, and what runs; filters; pause.

import { get } from "/static/api.js";
import { fill, h, keyed } from "/static/dom.js";
import { clock, count, percent, plural, seconds } from "/static/format.js";

const SHOWN = 200;
const FIELDS = ["error", "worker", "model", "stage", "slower_than", "trace_id"];

export function outcomeChip(row) {
  if (row.outcome === "running") return h("span", { class: "chip plain" }, "running");
  const kind = row.outcome === "failed" || row.status >= 500 ? "bad" : row.error || row.outcome === "client_gone" ? "warn" : "good";
  return h("span", { class: `chip ${kind}`, title: row.outcome.replaceAll("_", " ") }, row.outcome === "client_gone" ? "client left" : String(row.status ?? "none"));
}

export function show(root, context, { parameters }) {
  const values = Object.fromEntries(FIELDS.map((name) => [name, parameters.get(name) ?? ""]));
  const slow = context.config?.slow ?? 2;
  let rows = [];
  let running = [];
  let paused = false;
  let waiting = [];
  let timer = null;
  let gone = false;
  let drawing = null;
  let held = false;

  const input = (name, label, more = {}) => h("label", {}, label, h("input", { name, value: values[name], size: 14, ...more, on: { change } }));
  const select = (name, label, options) =>
    h("label", {}, label, h("select", { name, on: { change } }, options.map(([value, text]) => h("option", { value, selected: values[name] === value }, text))));
  const fleets = context.live.fleet?.fleets ?? [];
  const named = (list) => [["", "all"], ...list.map((one) => [one, one])];
  const known = (list, value) => (value && !list.includes(value) ? [...list, value] : list);
  const pause = h("button", { on: { click: toggle }, title: "p" }, "pause");
  const note = h("span", { class: "dim", role: "status" });
  // What is pointed at must not move away: as long as the pointer is over the list, nothing is added to it.
  const hold = (now) => () => {
    held = now;
    release();
  };
  const rowsTable = keyed(columns(slow), (row) => row.id, attributes);
  const list = h("div", { class: "requests", on: { pointerenter: hold(true), pointerleave: hold(false) } });
  fill(
    root,
    h(
      "form",
      { class: "filters", on: { submit: (event) => event.preventDefault() } },
      select("error", "outcome", [["", "all"], ["true", "errors"], ["false", "no error"], ...(["", "true", "false"].includes(values.error) ? [] : [[values.error, values.error]])]),
      input("slower_than", "slower than (s)", { type: "number", min: 0, step: "any", placeholder: slow, size: 6 }),
      select("model", "model", named(known(fleets.map((fleet) => fleet.model), values.model))),
      select("worker", "worker", named(known(fleets.flatMap((fleet) => fleet.workers.map((worker) => worker.id)), values.worker))),
      input("stage", "stage", { size: 8 }),
      input("trace_id", "trace or request id", { size: 22, spellcheck: "false" }),
      pause,
      note,
    ),
    list,
  );

  function query() {
    const chosen = new URLSearchParams(FIELDS.filter((name) => values[name]).map((name) => [name, values[name]]));
    return chosen.toString();
  }

  function change(event) {
    const value = event.target.value.trim();
    if (event.target.name === "trace_id" && value && !/^[0-9a-f]{32}$/.test(value)) {
      location.hash = `#/requests/${encodeURIComponent(value)}`;
      return;
    }
    values[event.target.name] = value;
    history.replaceState(null, "", `#/requests${query() ? `?${query()}` : ""}`);
    load();
  }

  function toggle() {
    paused = !paused;
    pause.textContent = paused ? "go on" : "pause";
    release();
    if (!paused) load();
  }

  function release() {
    if (!paused && !held) {
      rows = [...waiting.reverse(), ...rows].slice(0, SHOWN);
      waiting = [];
    }
    draw();
  }

  function fits(row) {
    if (values.error === "true" ? !row.error : values.error === "false" ? row.error : values.error && row.error !== values.error) return false;
    for (const name of ["model", "stage", "trace_id"]) if (values[name] && row[name] !== values[name]) return false;
    // Only the last attempt's worker is in the line; an earlier one's shows with the next load.
    if (values.worker && row.worker !== values.worker) return false;
    return !values.slower_than || (row.ttft ?? row.total) > Number(values.slower_than);
  }

  async function load() {
    clearTimeout(timer);
    try {
      const found = await get(`/api/requests?limit=${SHOWN}&running=true&${query()}`);
      if (gone) return;
      rows = found.requests;
      waiting = [];
      running = query() ? [] : found.running;
      draw();
    } catch (error) {
      if (!gone) fill(list, h("p", { class: "empty bad" }, `${error.message}.`));
    }
    if (!gone) timer = setTimeout(() => (paused ? undefined : refresh()), 2000);
  }

  async function refresh() {
    clearTimeout(timer);
    const found = await get("/api/requests?limit=1&running=true").catch(() => null);
    if (gone) return;
    if (found && !query() && !held) running = found.running;
    draw();
    timer = setTimeout(() => (paused ? undefined : refresh()), 2000);
  }

  function draw() {
    drawing ??= requestAnimationFrame(() => {
      drawing = null;
      note.textContent = waiting.length ? `${plural(waiting.length, "request")} ended meanwhile` : paused ? "paused" : "";
      const all = [...running, ...rows];
      rowsTable.set(all);
      if (!all.length) fill(list, h("p", { class: "empty" }, query() ? "No request of this kind is kept." : "No request yet. Send one, and it shows here."));
      else if (rowsTable.element.parentNode !== list) fill(list, rowsTable.element);
    });
  }

  const listener = (kind, data) => {
    if (kind !== "requests") return;
    const fresh = data.requests.filter(fits);
    waiting = [...waiting, ...fresh].slice(-SHOWN);
    if (!paused && !held) {
      const ended = new Set(data.requests.map((row) => row.id));
      running = running.filter((row) => !ended.has(row.id));
    }
    release();
  };
  context.live.listeners.add(listener);
  load();
  return {
    key: (key) => key === "p" && (toggle(), true),
    leave: () => {
      gone = true;
      clearTimeout(timer);
      cancelAnimationFrame(drawing);
      context.live.listeners.delete(listener);
    },
  };
}

function attributes(row) {
  return { data: { open: `#/requests/${encodeURIComponent(row.id)}` }, class: row.outcome === "failed" ? "failed" : undefined };
}

function columns(slow) {
  return [
    { head: "ended", class: "time", cell: (r) => clock(r.time + (r.total ?? 0)) },
    { head: "status", cell: (r) => [outcomeChip(r), r.error && h("small", { class: "bad" }, ` ${r.error}`)] },
    { head: "request", class: "name id", cell: (r) => h("a", { href: `#/requests/${encodeURIComponent(r.id)}`, title: r.id }, r.id.length > 14 ? `…${r.id.slice(-10)}` : r.id) },
    { head: "model", class: "text", cell: (r) => r.model ?? h("span", { class: "dim" }, "unknown") },
    { head: "worker", class: "text", cell: (r) => [r.worker ?? "–", r.attempts > 1 && h("small", { class: "warn" }, ` attempt ${r.attempts}`)] },
    { head: "first byte", class: "number", cell: (r) => h("span", { class: (r.ttft ?? 0) > slow ? "warn" : undefined }, seconds(r.ttft)) },
    { head: "total", class: "span", cell: (r) => [span(r), seconds(r.total)] },
    { head: "prompt", class: "number", cell: (r) => count(r.prompt_tokens) },
    { head: "cached", class: "number", cell: (r) => (r.cached_tokens === null ? "–" : percent(r.cached_tokens, r.prompt_tokens)) },
    { head: "output", class: "number", cell: (r) => count(r.output_tokens) },
    { head: "path", class: "text dim", cell: (r) => `${r.path.replace("/v1/", "")}${r.stream ? ", stream" : ""}` },
  ];
}

function span(row) {
  // From 1 ms to 100 s: wide enough apart to see, and the same for every row whatever comes next.
  const scale = (value) => `${(20 * Math.max(0, Math.min(5, Math.log10(Math.max(value, 1e-9)) + 3))).toFixed(1)}%`;
  const title = `until the first byte ${seconds(row.ttft)}, in all ${seconds(row.total)}; each tenfold is a fifth of the width`;
  return h("span", { class: "spanbar", title }, h("i", { class: "stream", style: { width: scale(row.total ?? 0) } }), h("i", { class: "wait", style: { width: scale(Math.min(row.ttft ?? row.total ?? 0, row.total ?? 0)) } }));
}
