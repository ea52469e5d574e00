// One request: where the time went, why it went there, what was predicted and what came.

import { get, requestPath } from "/static/api.js";
import { bar, copy, fill, h, table } from "/static/dom.js";
import { bytes, clock, count, number, percent, seconds, whole } from "/static/format.js";
import { outcomeChip } from "/static/views/requests.js";
import { hintColumns } from "/static/views/residency.js";

export function show(root, context, { id }) {
  const body = h("div", {}, h("p", { class: "empty" }, "Asking."));
  fill(root, h("p", { class: "crumbs" }, h("a", { href: "#/requests" }, "Requests"), " / ", h("code", {}, id)), body);
  let timer = null;
  let gone = false;
  const load = async () => {
    try {
      const record = await get(requestPath(id));
      if (gone) return;
      fill(body, page(record, context.config));
      if (record.outcome === "running") timer = setTimeout(load, 1000);
    } catch (error) {
      if (!gone) fill(body, h("p", { class: "empty bad" }, `${error.message}.`));
    }
  };
  load();
  return { leave: () => ((gone = true), clearTimeout(timer)) };
}

function page(record, config) {
  const phases = waterfall(record);
  return [
    h(
      "header",
      { class: "title" },
      h("h1", {}, record.model ?? "unknown model"),
      outcomeChip(record),
      h("span", { class: "dim" }, `${record.path} · ${record.stream ? "stream" : "whole answer"} · ${clock(record.time, 3)}`, record.stage && ` · stage ${record.stage}`, record.tenant && ` · tenant ${record.tenant}`),
      h("span", { class: "grow" }),
      actions(record, config),
    ),
    record.error && h("p", { class: "note bad" }, h("b", {}, record.error.type), record.error.message && `: ${record.error.message}`),
    h("p", { class: "lead" }, headline(phases, record)),
    record.reason && h("p", { class: "lead" }, record.reason, " ", overlooked(record)),
    (record.earlier ?? []).map((one) => h("p", { class: "note warn" }, `Before: ${one.reason}`)),
    h("h2", {}, "Where the time went"),
    drawn(phases, record.timings.total),
    h("div", { class: "columns" }, predicted(record), facts(record)),
    h("h2", {}, "Candidates", h("small", {}, ` as they were then, by policy ${record.policy ?? "–"}`)),
    record.candidates.length ? candidateTable(record.candidates, record.prompt.tokens) : h("p", { class: "empty" }, "No worker was looked for."),
    record.hints.length > 0 && [h("h2", {}, "Hints", h("small", {}, " what its workers were told about their caches")), hintTable(record)],
    h("details", {}, h("summary", {}, "everything, as JSON"), h("pre", {}, JSON.stringify(record, null, 2))),
  ];
}

function hintTable(record) {
  const said = { inside: "inside the request", beside: "beside it", nobody: "not at all" };
  return table(
    [
      { head: "after", class: "number", cell: (hint) => seconds(Math.max(0, hint.at)) },
      ...hintColumns(),
      { head: "said", class: "text", cell: (hint) => `${said[hint.way] ?? hint.way}${hint.driver ? ` by ${hint.driver}` : ""}` },
    ],
    record.hints,
  );
}

function actions(record, config) {
  const button = (text, make, title) => h("button", { title, on: { click: (event) => copy(make(), event.target) } }, text);
  const links = record.trace_id
    ? Object.entries(config?.links ?? {}).map(([name, url]) => [name, url.replaceAll("{trace_id}", record.trace_id).replaceAll("{span_id}", record.span_id)])
    : [];
  return h(
    "span",
    { class: "actions" },
    links.filter(([, url]) => /^https?:\/\//.test(url)).map(([name, url]) => h("a", { class: "button", href: url, target: "_blank", rel: "noopener noreferrer", title: record.sampled ? url : "its spans were not sampled: the viewer may not have it" }, name)),
    record.trace_id && button("traceparent", () => traceparent(record), "copy the W3C trace context of its span"),
    button("curl", () => curl(record, config), "copy a command that sends such a request, without keys"),
    h("a", { class: "button", href: `${requestPath(record.id)}/otlp`, download: "" }, "OTLP"),
  );
}

function traceparent(record) {
  return `00-${record.trace_id}-${record.span_id}-${record.sampled ? "01" : "00"}`;
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function curl(record, config) {
  const host = ["0.0.0.0", "::", "127.0.0.1"].includes(config?.listen.host) ? location.hostname : config?.listen.host;
  const captured = record.capture?.request;
  const text = captured ? (typeof captured === "string" ? captured : JSON.stringify(captured.body ?? captured)) : null;
  const body = text ?? JSON.stringify({ model: record.model, stream: record.stream, messages: [{ role: "user", content: "..." }] });
  const lines = [`curl -N ${quoted(`http://${host ?? location.hostname}:${config?.listen.port ?? 8080}${record.path}`)}`, "-H 'content-type: application/json'"];
  if (record.trace_id) lines.push(`-H ${quoted(`traceparent: ${traceparent(record)}`)}`);
  return [...lines, `-d ${quoted(body)}`].join(" \\\n  ");
}

// Where the time went.

function waterfall(record) {
  const { timings, attempts } = record;
  const phases = [];
  let at = 0;
  const add = (name, kind, from, length, note) => length !== null && length !== undefined && phases.push({ name, kind, from, length: Math.max(0, length), note });
  for (const [name, note] of [
    ["read", "the request's body comes from the client"],
    ["tokenize", `${whole(record.prompt.tokens)} tokens, ${record.prompt.how}${record.prompt.where ? `, in the ${record.prompt.where === "loop" ? "event loop" : "thread"}` : ""}`],
    ["queue", "waiting in the gateway for its turn"],
    ["decide", "filters, scorers, picker"],
  ]) {
    const length = timings[name];
    if (length === null) continue;
    add(name, "own", at, length, note);
    at += length;
  }
  attempts.forEach((attempt, index) => {
    const many = attempts.length > 1 ? ` (${index + 1})` : "";
    const end = attempt.seconds ?? Math.max(0, timings.total - attempt.at);
    if (attempt.connect) add(`connect${many}`, "own", attempt.at, attempt.connect, `to ${attempt.worker}`);
    const waited = (attempt.first_byte ?? end) - attempt.connect;
    const failed = attempt.error ? `, ${attempt.error}${attempt.status ? ` ${attempt.status}` : ""}` : "";
    const waiting = attempt.first_byte === null ? (attempt.error ? "no answer" : "waiting") : record.stream ? "prefill" : "answer";
    const what = record.stream ? "its queue, then the prompt" : "its queue, the prompt and the output";
    add(`${waiting}${many}`, attempt.error && attempt.first_byte === null ? "fault" : "wait", attempt.at + attempt.connect, waited, `${attempt.worker}: ${what}${failed}`);
    if (attempt.first_byte !== null) add(`${record.stream ? "decode" : "rest"}${many}`, attempt.error ? "fault" : "stream", attempt.at + attempt.first_byte, end - attempt.first_byte, `${attempt.worker} to the end${failed}`);
  });
  return phases;
}

function headline(phases, record) {
  const total = record.timings.total;
  if (!phases.length) return `It took ${seconds(total)}.`;
  const most = phases.reduce((one, other) => (other.length > one.length ? other : one));
  const own = phases.filter((phase) => phase.kind === "own").reduce((sum, phase) => sum + phase.length, 0);
  const running = record.outcome === "running" ? "so far " : "";
  return [
    `It took ${running}`,
    h("b", {}, seconds(total)),
    `: ${percent(most.length, total)} of it is `,
    h("b", {}, `${most.name.replace(/ \(.*/, "")} (${seconds(most.length)})`),
    `, the gateway's own part ${seconds(own)}. `,
    expectation(record),
  ];
}

function expectation(record) {
  const [then, now] = [record.predicted.ttft, record.actual.ttft];
  if (then === null || now === null) return "";
  if (!record.stream) return `The answer came whole, so its first byte waited for all of the output; ${seconds(then)} were predicted for the prompt.`;
  const ratio = now / Math.max(then, 1e-6);
  if (ratio > 1.5 && now - then > 0.02) return `The first byte came ${ratio.toFixed(1)} times as late as predicted.`;
  if (ratio < 0.67) return "The first byte came sooner than predicted.";
  return "The first byte came about when it was predicted.";
}

function drawn(phases, total) {
  const place = (value) => `${(100 * Math.max(0, value)) / Math.max(total, 1e-9)}%`;
  return h(
    "div",
    { class: "waterfall" },
    phases.map((phase) =>
      h(
        "div",
        { class: "phase", title: phase.note },
        h("span", { class: "what" }, phase.name),
        h("span", { class: "track" }, h("i", { class: phase.kind, style: { left: place(phase.from), width: place(phase.length) } })),
        h("span", { class: "number" }, seconds(phase.length)),
        h("span", { class: "dim why" }, phase.note),
      ),
    ),
    h("div", { class: "legend dim" }, h("i", { class: "own" }), "gateway", h("i", { class: "wait" }), "worker, before its first byte", h("i", { class: "stream" }), "worker, answering", h("i", { class: "fault" }), "failed"),
  );
}

// What was predicted and what came.

function predicted(record) {
  const { predicted: then, actual: now } = record;
  const pair = (name, before, after, format) => {
    const most = Math.max(before ?? 0, after ?? 0, 1e-9);
    return [
      h("dt", {}, name),
      h("dd", {}, h("span", { class: "pair" }, bar([[(before ?? 0) / most, "plainfill"]], `predicted ${format(before)}`), format(before), h("small", {}, "predicted")), h("span", { class: "pair" }, bar([[(after ?? 0) / most, "fill"]], `actual ${format(after)}`), format(after), h("small", {}, "actual"))),
    ];
  };
  return h("section", { class: "card" }, h("h2", {}, "Predicted and actual"), h("dl", {}, pair("first byte", then.ttft, now.ttft, seconds), pair("cached tokens", then.cached_tokens, now.cached_tokens, whole), pair("prompt tokens", record.prompt.tokens, now.prompt_tokens, whole)));
}

function facts(record) {
  const gaps = record.gaps;
  const rows = [
    ["request id", h("code", {}, record.id)],
    ["trace id", record.trace_id ? h("code", {}, record.trace_id, !record.sampled && h("small", {}, " not sampled")) : "–"],
    ["prompt", `${record.prompt.how}${record.prompt.why ? `: ${record.prompt.why}` : ""}`],
    ["output", `${whole(record.actual.output_tokens)} tokens`],
    ["between reads", gaps ? `median ${seconds(gaps.p50)}, 95th ${seconds(gaps.p95)}, longest ${seconds(gaps.max)}` : "–"],
    ["body, answer", `${bytes(record.bytes_in)}, ${bytes(record.bytes_out)}`],
    ["attempts", record.attempts.map((one) => `${one.worker} ${one.error ?? one.status ?? ""}`).join(", ") || "none"],
  ];
  return h("section", { class: "card" }, h("h2", {}, "Facts"), h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

// Why it went there.

/** Terms that are seconds; a policy that has only such ones costs seconds. */
const TIMES = new Set(["wait", "slot", "load", "prefill", "congestion", "hold_back"]);

function unit(candidates) {
  const names = candidates.flatMap((one) => Object.keys(one.terms));
  return names.length && names.every((name) => TIMES.has(name)) ? seconds : number;
}

const held = (one) => one.match.device + one.match.l1 + one.match.l2;

/** A sentence about the candidate that held more than the one that was chosen. */
export function overlooked({ candidates }) {
  const chosen = candidates.find((one) => one.chosen);
  if (!chosen) return "";
  const most = candidates.reduce((one, other) => (held(other) > held(one) ? other : one), chosen);
  if (most === chosen || held(most) <= held(chosen)) return "";
  const more = `${most.worker} held ${whole(held(most) - held(chosen))} tokens more`;
  if (most.rejected_by) return `${more}, but the filter ${most.rejected_by} left it out.`;
  const gap = (name) => (most.terms[name] ?? 0) - (chosen.terms[name] ?? 0);
  const against = Object.keys(most.terms).filter((name) => gap(name) > 0).sort((a, b) => gap(b) - gap(a));
  if (!against.length) return `${more}.`;
  const format = unit(candidates);
  return `${more}, but ${against.slice(0, 2).map((name) => `its ${name.replaceAll("_", " ")} was ${format(gap(name))} higher`).join(" and ")}.`;
}

export function candidateTable(candidates, tokens, { compact = false } = {}) {
  const order = [...candidates].sort((a, b) => b.chosen - a.chosen || (a.cost === null) - (b.cost === null) || (a.cost ?? 0) - (b.cost ?? 0));
  const best = candidates.find((one) => one.chosen)?.cost ?? null;
  const names = [...new Set(candidates.flatMap((one) => Object.keys(one.terms)))];
  const shown = names.filter((name) => candidates.some((one) => one.terms[name]));
  const format = unit(candidates);
  const most = Math.max(tokens ?? 0, ...candidates.map(held), 1);
  return table(
    [
      { head: "worker", class: "name", cell: (c) => [c.chosen && h("b", { class: "mark", title: "chosen" }, "▸ "), h("a", { href: `#/workers/${encodeURIComponent(c.worker)}` }, c.worker)] },
      { head: "holds", title: "tokens of this prompt, by tier: device, l1, l2", cell: (c) => holds(c, most) },
      !compact && { head: "known", class: "text", title: "by its events, expected since we have just sent it there, or remembered", cell: (c) => c.match.source ?? "–" },
      { head: "in flight", class: "number", cell: (c) => (c.load.slots === null ? c.load.in_flight : `${c.load.in_flight}/${c.load.slots}`) },
      { head: "pending", class: "number", title: "requests before their first byte, and tokens to compute for them", cell: (c) => (c.load.pending ? `${c.load.pending} · ${count(c.load.pending_tokens)}` : "–") },
      ...(shown.length > 1 ? shown.map((name) => ({ head: name.replaceAll("_", " "), class: "number", cell: (c) => format(c.terms[name]) })) : []),
      { head: "cost", class: "number", cell: (c) => h("b", {}, format(c.cost)) },
      { head: "verdict", class: "text verdict", cell: (c) => verdict(c, best, format) },
    ].filter(Boolean),
    order,
    (c) => ({ class: c.chosen ? "chosen" : c.rejected_by ? "rejected" : undefined }),
  );
}

function holds(candidate, most) {
  const { device, l1, l2 } = candidate.match;
  const title = `device ${device}, l1 ${l1}, l2 ${l2} of ${most} tokens`;
  return h("span", { class: "gauge" }, bar([[device / most, "fill"], [l1 / most, "l1"], [l2 / most, "l2"]], title), count(device + l1 + l2));
}

function verdict(candidate, best, format) {
  if (candidate.chosen) return h("b", { class: "good" }, "chosen");
  if (candidate.rejected_by) return h("span", { class: "bad" }, `left out by ${candidate.rejected_by}`);
  if (candidate.cost === null || best === null) return "–";
  const gap = candidate.cost - best;
  if (gap === 0) return "as good";
  return gap < 0 ? `${format(-gap)} less: the draw` : `${format(gap)} more`;
}
