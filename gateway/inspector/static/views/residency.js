// Residency: what workers were told about what to keep and fetch, by which rule, and what came of it.

import { get } from "/static/api.js";
import { bar, fill, h, table } from "/static/dom.js";
import { bytes, plural, seconds, whole } from "/static/format.js";

const KINDS = { useful: "good", confirmed: "good", accepted: "good", sent: "", offered: "", skipped: "", refused: "warn", failed: "bad", wasted: "warn" };
const SHOWN = 60;

export function show(root) {
  const body = h("div", {}, h("p", { class: "empty" }, "Asking."));
  fill(root, body);
  let timer = null;
  let paused = false;
  const load = async () => {
    try {
      fill(body, page(await get("/api/residency")));
    } catch (error) {
      fill(body, h("p", { class: "empty bad" }, `${error.message}.`));
    }
    if (!paused) timer = setTimeout(load, 2000);
  };
  load();
  return {
    key: (key) => {
      if (key !== "p") return false;
      paused = !paused;
      clearTimeout(timer);
      if (!paused) load();
      return true;
    },
    leave: () => ((paused = true), clearTimeout(timer)),
  };
}

function page(document) {
  if (!document.enabled) {
    return h("p", { class: "empty" }, "Workers are told nothing about their caches: the configuration has no section `residency`.");
  }
  return [
    document.left_alone.length > 0 && h("p", { class: "note warn" }, `Left alone for a while after failures: ${document.left_alone.join(", ")}.`),
    document.fleets.map((fleet) => section(fleet, document.now)),
  ];
}

function section(fleet, now) {
  const rules = Object.entries(fleet.rules);
  return h(
    "section",
    {},
    h("h2", {}, fleet.model, h("small", {}, ` ${plural(fleet.sessions.count, "conversation")} known in ${bytes(fleet.sessions.bytes)}${fleet.sessions.median_gap_seconds === null ? "" : `, ${seconds(fleet.sessions.median_gap_seconds)} between two turns`} · ${plural(fleet.open, "hint")} open`)),
    fleet.silent && h("p", { class: "note warn" }, "None of its workers understands hints (see below), so nothing is wished."),
    fleet.degraded.map((text) => h("p", { class: "note warn" }, `${text}.`)),
    table(
      [
        { head: "rule", class: "name", cell: ([name]) => name },
        { head: "state", class: "text", cell: ([, row]) => (row.throttled ? h("span", { class: "chip warn", title: `${whole(row.held_back)} hints were not said` }, "held back") : h("span", { class: "chip good" }, "on")) },
        ...["offered", "skipped", "refused", "failed", "accepted", "confirmed", "useful", "wasted"].map((fate) => ({ head: fate, class: "number", cell: ([, row]) => whole(row[fate] ?? 0) })),
        { head: "of use", title: "of the latest that ended", cell: ([, row]) => usefulness(row) },
      ],
      rules,
    ),
    h("h3", {}, "Latest hints"),
    fleet.hints.length ? latest(fleet.hints.slice(0, SHOWN), now) : h("p", { class: "empty" }, "None yet."),
    h("h3", {}, "What workers understand"),
    table(
      [
        { head: "worker", class: "name", cell: (row) => h("a", { href: `#/workers/${encodeURIComponent(row.worker)}` }, row.worker) },
        { head: "configured", class: "text", cell: (row) => row.configured.join(", ") || "none" },
        { head: "drivers", class: "text", cell: (row) => (row.drivers.length ? row.drivers.map(driver) : "none: it is told nothing") },
        { head: "pinned", class: "text", cell: (row) => pinned(fleet.budget, row.worker) },
        { head: "moved", class: "number", title: "bytes that hints made it move", cell: (row) => bytes(fleet.budget.workers[row.worker]?.moved_bytes ?? 0) },
      ],
      fleet.workers,
    ),
  );
}

function usefulness(row) {
  if (row.useful_share === null || row.useful_share === undefined) return "–";
  const percent = `${Math.round(row.useful_share * 100)} %`;
  return h("span", { class: "gauge" }, bar([[row.useful_share, "fill"]], percent), percent);
}

function driver(one) {
  return h("span", { class: `chip ${one.speaks ? "good" : ""}`, title: `${one.how}${one.url ? ` at ${one.url}` : ""}` }, one.driver);
}

function pinned(budget, worker) {
  const own = budget.pinned.filter((one) => one.worker === worker);
  return own.map((one) => `${one.tier} ${whole(one.tokens)}`).join(", ") || "–";
}

function latest(hints, now) {
  return table(
    [
      { head: "ago", class: "number", cell: (hint) => seconds(Math.max(0, now - hint.created)) },
      ...hintColumns(),
    ],
    hints,
  );
}

/** What a hint's row shows, wherever it stands. */
export function hintColumns() {
  return [
    { head: "rule", class: "name", cell: (hint) => hint.rule },
    { head: "wish", class: "text", cell: (hint) => `${hint.action} ${way(hint)}` },
    { head: "worker", class: "name", cell: (hint) => h("a", { href: `#/workers/${encodeURIComponent(hint.worker)}` }, hint.worker) },
    { head: "tokens", class: "number", cell: (hint) => (hint.start ? `${whole(hint.start)}–${whole(hint.stop)}` : whole(hint.stop)) },
    { head: "priority, for", class: "number", cell: (hint) => `${hint.priority}${hint.ttl ? `, ${seconds(hint.ttl)}` : ""}` },
    { head: "fate", class: "text", cell: (hint) => h("span", { class: `chip ${KINDS[hint.fate] ?? ""}`, title: hint.detail }, hint.fate) },
    { head: "why", class: "text", cell: (hint) => [hint.reason, hint.detail && h("small", { class: "dim" }, ` ${hint.detail}`)] },
  ];
}

function way(hint) {
  if (hint.action !== "prefetch") return hint.target === "device" ? "" : `in ${hint.target}`;
  return `${hint.peer ? `from ${hint.peer}` : (hint.source ?? "anywhere")} → ${hint.target}`;
}
