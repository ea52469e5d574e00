// Prefixes: what is asked for again and again, who holds it, what that saves.

import { get } from "/static/api.js";
import { bar, fill, h, table } from "/static/dom.js";
import { count, plural, seconds, whole } from "/static/format.js";

export function show(root) {
  const body = h("div", {}, h("p", { class: "empty" }, "Asking."));
  fill(root, body);
  let timer = null;
  let paused = false;
  const load = async () => {
    try {
      fill(body, page(await get("/api/prefixes?limit=50")));
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
  if (!document.prefixes.length) {
    return h("p", { class: "empty" }, "No request has met a worker that already held the beginning of its prompt. Either all is new, or no fleet's policy reads what workers hold.");
  }
  const most = Math.max(...document.prefixes.map((one) => one.saved_tokens));
  return [
    h("p", { class: "lead" }, h("b", {}, plural(document.hits, "request")), " met a prefix that the worker already held; ", h("b", {}, `${count(document.saved_tokens)} tokens`), " need not be computed again. ", h("span", { class: "dim" }, `${whole(document.counted)} prefixes are counted; those that saved most of late come first.`)),
    table(
      [
        { head: "prefix", class: "name", title: "hash of its last block; its text is not kept", cell: (p) => h("code", {}, p.id) },
        { head: "model", class: "text", cell: (p) => p.model },
        { head: "length", class: "number", cell: (p) => `${whole(p.tokens)} tokens` },
        { head: "hits", class: "number", cell: (p) => whole(p.hits) },
        { head: "tokens saved", cell: (p) => h("span", { class: "gauge" }, bar([[p.saved_tokens / most, "fill"]], `${p.saved_tokens} tokens`), count(p.saved_tokens)) },
        { head: "held by", class: "holders", cell: (p) => holders(p) },
        { head: "last hit", class: "number", cell: (p) => `${seconds(p.last)} ago` },
      ],
      document.prefixes,
    ),
    h("p", { class: "legend dim" }, h("span", { class: "chip held" }, "device"), h("span", { class: "chip l1" }, "l1"), h("span", { class: "chip l2" }, "l2"), h("span", { class: "chip expected" }, "expected: sent there a moment ago")),
  ];
}

function holders(prefix) {
  if (!prefix.held_by) return h("span", { class: "warn" }, "nobody any more");
  const shown = prefix.holders.slice(0, 8).map((one) => {
    const kind = one.source === "expected" ? "expected" : one.tier === "device" ? "held" : one.tier;
    return h("a", { class: `chip ${kind}`, href: `#/workers/${encodeURIComponent(one.worker)}`, title: `${one.tier}, known by ${one.source}` }, one.worker);
  });
  return [shown, prefix.held_by > 8 && h("small", {}, ` and ${prefix.held_by - 8} more`)];
}
