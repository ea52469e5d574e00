// One worker: is its event feed well, what can it do and how do we know, what was learned.

import { get, post, workerPath } from "/static/api.js";
import { fill, h, table } from "/static/dom.js";
import { bytes, count, percent, plural, seconds, whole } from "/static/format.js";
import { feedChip, stateChip, truth } from "/static/views/fleet.js";

const MEANING = {
  events: "The worker's own KV events tell what it holds.",
  history: "It sends no KV events: what it holds is guessed from what it was sent.",
  connecting: "There is no connection to its KV events.",
  gap: "KV events were missed: what it holds is known in part.",
  none: "It keeps no prefixes.",
};
const ORIGINS = { configured: "good", profile: "plain", discovered: "good", assumed: "warn" };

export function show(root, _context, { id }) {
  const body = h("div", {}, h("p", { class: "empty" }, "Asking."));
  fill(root, h("p", { class: "crumbs" }, h("a", { href: "#/fleet" }, "Fleet"), " / ", id), body);
  let timer = null;
  let paused = false;
  const load = async () => {
    try {
      fill(body, page(await get(workerPath(id)), load));
    } catch (error) {
      fill(body, h("p", { class: "empty bad" }, `${error.message}.`));
    }
    timer = setTimeout(() => (paused ? undefined : load()), 2000);
  };
  const first = () => {
    clearTimeout(timer);
    load();
  };
  first();
  return {
    leave: () => {
      clearTimeout(timer);
      paused = true;
    },
  };
}

function page(worker, reload) {
  const draining = worker.state === "draining";
  const move = async (event) => {
    event.target.disabled = true;
    await post(`${workerPath(worker.id)}/${draining ? "undrain" : "drain"}`).catch((error) => alert(error.message));
    reload();
  };
  return [
    h(
      "header",
      { class: "title" },
      h("h1", {}, worker.id),
      stateChip(worker),
      h("span", { class: "dim" }, `${worker.url} · ${worker.driver} · ${worker.fleet}`),
      h("span", { class: "grow" }),
      h("a", { class: "button", href: `#/requests?worker=${encodeURIComponent(worker.id)}` }, "its requests"),
      h("button", { on: { click: move }, title: draining ? "give it requests again" : "let it finish what it has, and give it nothing new" }, draining ? "undrain" : "drain"),
    ),
    worker.last_error && h("p", { class: "note warn" }, `Last error: ${worker.last_error}.`),
    worker.ejected_for > 0 && h("p", { class: "note bad" }, `Left out for ${seconds(worker.ejected_for)} more.`),
    worker.doubts.map((text) => h("p", { class: "note warn" }, text)),
    h(
      "div",
      { class: "columns" },
      facts("KV event feed", feed(worker.feed), worker.feed && h("p", {}, feedChip(worker.feed), " ", MEANING[worker.feed.status] ?? "", worker.feed.reason && ` ${worker.feed.reason}.`)),
      facts("Predictions", predictions(worker)),
      facts("Load", [
        ["state", `${worker.state} for ${seconds(worker.since)}`],
        ["in flight", worker.slots === null ? whole(worker.in_flight) : `${worker.in_flight} of ${plural(worker.slots, "slot")}`],
        ["waiting for a first token", `${worker.pending}, ${count(worker.pending_tokens)} tokens to compute`],
        ["prefill backlog", seconds(worker.backlog)],
        ["share of a full load", `${Math.round(worker.weight * 100)} %`],
        ["ejections, errors", `${worker.ejections}, ${worker.errors}`],
      ]),
      facts("Learned speed", [
        ["prefill", `${count(Math.round(worker.learned.rate))} tokens/s, from ${count(Math.round(worker.learned.start.rate))}`],
        ["overhead of a prefill", `${seconds(worker.learned.overhead)}, from ${seconds(worker.learned.start.overhead)}`],
        ["a request holds a slot", worker.learned.hold ? `${seconds(worker.learned.hold)} on average` : "–"],
        ["prefills seen", whole(worker.learned.samples)],
        ["mean time to first token", seconds(worker.ttft)],
      ]),
    ),
    h("h2", {}, "Capabilities", h("small", {}, " and where each is known from")),
    h("div", { class: "narrow" }, table(
      [
        { head: "name", class: "name", cell: ([name]) => name.replaceAll("_", " ") },
        { head: "value", class: "number", cell: ([name, one]) => capability(name, one.value) },
        { head: "from", cell: ([, one]) => h("span", { class: `chip ${ORIGINS[one.origin] ?? "plain"}` }, one.origin) },
      ],
      Object.entries(worker.capabilities),
    )),
  ];
}

function facts(title, rows, ...more) {
  return h("section", { class: "card" }, h("h2", {}, title), more, h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

function feed(one) {
  if (!one) return [["followed", "no: the fleet's policy does not read what workers hold"]];
  const problems = Object.entries(one.problems ?? {}).filter(([, value]) => value);
  const counters = one.counters ?? {};
  return [
    ["in this state", seconds(one.since)],
    ["endpoints", one.endpoints.length ? one.endpoints.join(", ") : "none"],
    ["can repeat what was missed", one.endpoints.length ? (one.replay ? "yes" : h("span", { class: "warn" }, "no")) : "–"],
    ["events a second", one.events_per_second.toFixed(1)],
    ["behind the worker's clock", seconds(one.lag)],
    ["last batch", one.last_seq === null ? "–" : `number ${whole(one.last_seq)}`],
    ["gaps", one.gaps ? h("span", { class: "warn" }, whole(one.gaps)) : "none"],
    ["events of no use", problems.length ? h("span", { class: "warn" }, problems.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ")) : "none"],
    ["blocks held", Object.entries(one.blocks).map(([tier, value]) => `${tier} ${count(value)}`).join(", ") || "–"],
    ["tokens a block", one.block_size ? `${one.block_size} (${one.block_size_origin})` : "–"],
    ...Object.entries(counters)
      .filter(([name, value]) => value && name !== "gaps")
      .map(([name, value]) => [name.replaceAll("_", " "), whole(value)]),
  ];
}

function predictions(worker) {
  const rows = [
    ["prompt tokens from cache", `${percent(worker.tokens.cached, worker.tokens.prompt)} of ${count(worker.tokens.prompt)}`],
    ["predictions of cached tokens", truth(worker.truth)],
  ];
  const one = worker.truth;
  if (one) {
    rows.push(
      ["answers compared", whole(one.answers)],
      ["predicted, cached", `${count(one.predicted)}, ${count(one.cached)} tokens`],
      ["too many, too few", `${count(one.over)}, ${count(one.under)} tokens`],
      ["followed anew because of that", whole(one.resyncs)],
    );
  }
  if (worker.parity) {
    const good = worker.parity.standing === "exact";
    rows.push(
      ["tokens as the worker's", h("span", { class: good ? "good" : worker.parity.standing === "mismatch" ? "bad" : undefined }, worker.parity.standing)],
      ["prompt lengths compared", `${whole(worker.parity.observed)}, ${worker.parity.wrong} wrong`],
    );
    if (worker.parity.detail) rows.push(["detail", worker.parity.detail]);
  }
  return rows;
}

function capability(name, value) {
  if (value === null || (Array.isArray(value) && !value.length)) return "–";
  if (Array.isArray(value)) return value.join(", ");
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (name.endsWith("bandwidth")) return `${bytes(value)}/s`;
  if (name.endsWith("latency") || name === "overhead") return seconds(value);
  return name === "kv_bytes_per_token" ? bytes(value) : whole(value);
}
