// Fleet: how much, how fast, how warm; then every worker.

import { chart } from "/static/charts.js";
import { bar, fill, h, table } from "/static/dom.js";
import { bytes, count, percent, plural, seconds } from "/static/format.js";

export const FEEDS = {
  events: ["good", "events"],
  history: ["plain", "guessed"],
  connecting: ["bad", "no connection"],
  gap: ["warn", "gap"],
  none: ["plain", "no cache"],
};
const STATES = { ready: "good", warming: "warn", draining: "warn", ejected: "bad", gone: "plain" };

export function chip(kind, text, title) {
  return h("span", { class: `chip ${kind}`, title }, text);
}

export function stateChip(worker) {
  return chip(STATES[worker.state] ?? "plain", worker.state, worker.last_error ?? undefined);
}

export function feedChip(feed) {
  if (!feed) return chip("plain", "not followed", "no policy of this fleet reads what its workers hold");
  if (feed.silent) return chip("warn", "silent", "prompts were sent there and events must have come, but did not");
  const [kind, text] = FEEDS[feed.status] ?? ["plain", feed.status];
  return chip(kind, text, feed.reason ?? undefined);
}

function tile(label) {
  const value = h("b", {});
  const note = h("small", {});
  const element = h("div", { class: "tile" }, h("span", {}, label), value, note);
  return { element, set: (text, more = "") => ((value.textContent = text), (note.textContent = more)) };
}

export function show(root, context) {
  const tiles = Object.fromEntries(
    ["requests", "in flight", "failed", "first token", "from cache", "output"].map((name) => [name, tile(name)]),
  );
  const holders = [
    ["requests a second", "--accent", (v) => count(Math.round(v * 10) / 10)],
    ["time to first token", "--accent", seconds],
    ["prompt tokens from cache", "--good", (v) => `${Math.round(v * 100)} %`],
  ].map(([title, colour, format]) => ({ title, colour, format, holder: h("div", { class: "plot" }) }));
  const fleets = h("div", {});
  const foot = h("p", { class: "dim foot" });
  fill(
    root,
    h("div", { class: "tiles" }, Object.values(tiles).map((one) => one.element)),
    h(
      "div",
      { class: "plots" },
      holders.map((one, index) =>
        h("figure", {}, h("figcaption", {}, one.title, index === 1 && h("span", { class: "key" }, h("i", {}, " median, "), "95th percentile"), index === 0 && h("span", { class: "key" }, " all, ", h("em", {}, "failed"))), one.holder),
      ),
    ),
    fleets,
    foot,
  );
  const charts = [
    chart(holders[0].holder, [{ label: "all", colour: "--accent", fill: "--accent-soft" }, { label: "failed", colour: "--bad" }], holders[0].format),
    chart(holders[1].holder, [{ label: "median", colour: "--stream" }, { label: "95th", colour: "--accent" }], holders[1].format),
    chart(holders[2].holder, [{ label: "cached", colour: "--good", fill: "--good-soft" }], holders[2].format),
  ];

  const update = (document) => {
    const past = context.history;
    const rate = past.mean((point) => point.rate);
    const totals = document.totals;
    const waits = past.points.slice(-60).map((point) => point.p50).filter((value) => value !== null).sort((a, b) => a - b);
    const tails = past.points.slice(-60).map((point) => point.p95).filter((value) => value !== null).sort((a, b) => a - b);
    const prompt = past.sum((point) => point.prompt);
    const queued = document.fleets.reduce((sum, fleet) => sum + fleet.queue.requests, 0);
    tiles.requests.set(rate === null ? "–" : `${rate.toFixed(1)}/s`, `${count(totals.accepted)} since start`);
    tiles["in flight"].set(count(totals.in_flight), queued ? `${queued} wait for a slot` : "none waits here");
    tiles.failed.set(count(totals.failed), `${count(totals.retries)} retries, ${count(totals.client_gone)} clients left`);
    tiles["first token"].set(waits.length ? seconds(waits[waits.length >> 1]) : "–", tails.length ? `slowest second ${seconds(tails.at(-1))}` : "last minute");
    tiles["from cache"].set(
      prompt ? percent(past.sum((point) => point.cached), prompt) : percent(totals.cached_tokens, totals.prompt_tokens),
      prompt ? "of prompt tokens, last minute" : "of prompt tokens, since start",
    );
    tiles.output.set(`${count(Math.round(past.mean((point) => point.output) ?? 0))}/s`, "tokens");
    const times = past.column((point) => point.time);
    charts[0].set([times, past.column((point) => point.rate), past.column((point) => point.failed)]);
    charts[1].set([times, past.column((point) => point.p50), past.column((point) => point.p95)]);
    charts[2].set([times, past.column((point) => (point.prompt ? point.cached / point.prompt : null))]);
    const selected = root.querySelector("tr[aria-selected]")?.dataset.open;
    fill(fleets, document.fleets.map(section));
    if (selected) [...root.querySelectorAll("tr[data-open]")].find((row) => row.dataset.open === selected)?.setAttribute("aria-selected", "true");
    const { process, prefix } = document;
    fill(
      foot,
      `warmroute ${document.version} · event loop ${seconds(process.lag_worst)} late at worst in a minute · ${bytes(process.memory)} of memory · ${plural(process.connections, "client connection")}`,
      prefix.map((map) => ` · prefix map of ${map.block_size}-token blocks: ${count(map.blocks)} blocks, ${bytes(map.bytes)} of ${bytes(map.budget)}`),
    );
  };
  let timer = null;
  let latest = context.live.fleet;
  const listener = (kind, data) => {
    if (kind !== "fleet") return;
    latest = data;
    timer ??= requestAnimationFrame(() => {
      timer = null;
      // A button that is pressed must still be there when it is let go.
      if (!document.documentElement.matches(":active")) update(latest);
    });
  };
  if (latest) update(latest);
  else fill(fleets, h("p", { class: "empty" }, "Waiting for the gateway."));
  context.live.listeners.add(listener);
  return {
    leave: () => {
      context.live.listeners.delete(listener);
      cancelAnimationFrame(timer);
      charts.forEach((one) => one.destroy());
    },
  };
}

function section(fleet) {
  return h(
    "section",
    {},
    h(
      "h2",
      {},
      fleet.model,
      h("small", {}, ` ${fleet.ready} of ${plural(fleet.total, "worker")} ready · policy ${fleet.policy}`, fleet.aliases.length > 0 && ` · also ${fleet.aliases.join(", ")}`),
    ),
    fleet.degraded.map((text) => h("p", { class: "note warn" }, text)),
    table(columns(fleet), fleet.workers, (worker) => ({ data: { open: `#/workers/${encodeURIComponent(worker.id)}` } })),
  );
}

function columns() {
  return [
    { head: "worker", class: "name", cell: (w) => h("a", { href: `#/workers/${encodeURIComponent(w.id)}` }, w.id) },
    { head: "state", cell: (w) => [stateChip(w), w.state === "ready" && w.weight < 0.995 && h("small", { title: "slow start: its share of a full load" }, ` ${Math.round(w.weight * 100)} %`)] },
    { head: "slots", title: "requests that it has, of those that run at once", cell: (w) => slots(w) },
    { head: "queue", class: "number", title: "requests whose answer has not begun, and how long their prefills take", cell: (w) => (w.pending ? `${w.pending}${w.backlog ? ` · ${seconds(w.backlog)}` : ""}` : "–") },
    { head: "KV cache", title: "tokens known to be held on the device, of its capacity; then in CPU memory (l1) and shared memory (l2)", cell: (w) => kv(w.kv) },
    { head: "hits", class: "number", title: "prompt tokens that came from its cache, as it says itself", cell: (w) => percent(w.tokens.cached, w.tokens.prompt) },
    { head: "predicted", title: "cached tokens: predicted, against what the worker says", cell: (w) => truth(w.truth) },
    { head: "first token", class: "number", title: "mean time from an attempt to its first byte", cell: (w) => seconds(w.ttft) },
    { head: "prefill", class: "number", title: "learned: padded prompt tokens a second", cell: (w) => (w.learned.samples ? `${count(Math.round(w.learned.rate))}/s` : h("span", { class: "dim", title: "not learned yet: where learning starts" }, `${count(Math.round(w.learned.rate))}/s`)) },
    { head: "KV events", cell: (w) => [feedChip(w.feed), w.feed?.status === "events" && h("small", {}, ` ${count(w.feed.events_per_second)}/s`)] },
    { head: "errors", class: "number", cell: (w) => (w.errors ? h("span", { class: "bad" }, count(w.errors)) : "0") },
  ];
}

function slots(worker) {
  if (worker.slots === null) return String(worker.in_flight);
  const share = worker.in_flight / worker.slots;
  return h("span", { class: "gauge" }, bar([[share, share >= 1 ? "full" : "fill"]], `${worker.in_flight} of ${worker.slots} slots`), `${worker.in_flight}/${worker.slots}`);
}

function kv(held) {
  if (held.device === null) return "–";
  const more = [held.l1 && `l1 ${count(held.l1)}`, held.l2 && `l2 ${count(held.l2)}`].filter(Boolean).join(", ");
  return h(
    "span",
    { class: "gauge" },
    held.capacity && bar([[held.device / held.capacity, "fill"]], `${held.device} of ${held.capacity} tokens`),
    held.capacity ? `${count(held.device)}/${count(held.capacity)}` : count(held.device),
    more && h("small", {}, ` ${more}`),
  );
}

export function truth(value) {
  if (!value) return h("span", { class: "dim" }, "–");
  const wrong = value.over + value.under;
  const share = value.prompt ? wrong / value.prompt : 0;
  const title = `of ${value.prompt} prompt tokens ${value.predicted} were predicted to be cached, ${value.cached} were; ${value.over} too many, ${value.under} too few`;
  return h("span", { class: share > 0.1 ? "warn" : undefined, title }, share < 0.0005 ? "exact" : `${(100 * share).toFixed(1)} % off`);
}
