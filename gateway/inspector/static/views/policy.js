// Policy: the configuration in use, and the decision that a request would get now, by several policies side by side.

import { get, post } from "/static/api.js";
import { copy, fill, h } from "/static/dom.js";
import { count, seconds } from "/static/format.js";
import { candidateTable, overlooked } from "/static/views/request.js";

const PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"];
const USUAL = ["ttft", "kvaware", "leastload"];
let text = "";
let answer = null;

export function show(root, context) {
  const config = context.config;
  const models = config?.models ?? [];
  text ||= JSON.stringify({ model: models[0]?.model ?? "", messages: [{ role: "user", content: "Hello" }] }, null, 2);
  const body = h("textarea", { rows: 9, spellcheck: "false", "aria-label": "request body", value: text, on: { input: () => (text = body.value), keydown: quick } });
  const path = h("select", { "aria-label": "path" }, PATHS.map((one) => h("option", { value: one }, one)));
  const names = [...new Set([...(config?.policies ?? []), ...(config?.presets ?? [])])];
  const active = new Set(models.map((one) => one.policy));
  const boxes = names.map((name) => {
    const box = h("input", { type: "checkbox", value: name });
    box.checked = active.has(name) || USUAL.includes(name);
    return { box, label: h("label", { class: "check" }, box, name, active.has(name) && h("small", {}, " in use")) };
  });
  const message = h("p", { class: "bad", role: "alert" });
  const result = h("div", { class: "explained" });
  const button = h("button", { class: "strong", title: "ctrl + enter", on: { click: ask } }, "explain");
  const yaml = h("pre", { class: "yaml" }, config?.yaml ?? "");
  fill(
    root,
    h("h2", {}, "Explain", h("small", {}, " where this request would go now; nothing is sent")),
    h(
      "div",
      { class: "ask" },
      body,
      h("div", { class: "side" }, h("label", {}, "path ", path), h("fieldset", {}, h("legend", {}, "policies"), boxes.map((one) => one.label)), h("div", { class: "row" }, button, h("button", { on: { click: explainAll } }, "by all"))),
    ),
    message,
    result,
    h("h2", {}, "Policies in use"),
    h("ul", { class: "plain" }, models.map((one) => h("li", {}, h("b", {}, one.model), " is routed by ", h("b", {}, one.policy), config.policies.includes(one.policy) ? " as configured below" : ", built in"))),
    h("h2", {}, "Configuration", h("small", {}, " in use, every default written out, secrets left out "), h("button", { class: "quiet", on: { click: (event) => copy(yaml.textContent, event.target) } }, "copy")),
    yaml,
  );
  if (answer) draw();
  get("/api/config").then((fresh) => (context.config = fresh) && (yaml.textContent = fresh.yaml), () => {});

  function quick(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
  }

  function explainAll() {
    for (const one of boxes) one.box.checked = true;
    ask();
  }

  async function ask() {
    message.textContent = "";
    let parsed;
    try {
      parsed = JSON.parse(body.value);
    } catch (error) {
      message.textContent = `This is no JSON: ${error.message}.`;
      return;
    }
    button.disabled = true;
    try {
      answer = await post("/api/explain", { path: path.value, body: parsed, policies: boxes.filter((one) => one.box.checked).map((one) => one.box.value) });
      draw();
    } catch (error) {
      message.textContent = `${error.message}.`;
    }
    button.disabled = false;
  }

  function draw() {
    const { prompt } = answer;
    fill(
      result,
      h("p", { class: "lead" }, h("b", {}, answer.model), prompt.tokens === null ? ": its prompt was not looked at." : [`: a prompt of `, h("b", {}, `${count(prompt.tokens)} tokens`), ` (${prompt.how}${prompt.why ? `: ${prompt.why}` : ""}), looked up in ${seconds(prompt.seconds)}.`]),
      h("div", { class: "policies" }, answer.policies.map((one) => decision(one, prompt.tokens))),
    );
  }
}

function decision(one, tokens) {
  return h(
    "section",
    { class: one.active ? "card active" : "card" },
    h("h3", {}, one.policy, one.active && h("small", {}, " in use"), h("span", { class: "grow" }), h("b", { class: "good" }, one.chosen ?? "nobody")),
    h("p", {}, one.reason, " ", overlooked(one)),
    one.notes.map((note) => h("p", { class: "note plain" }, `Note: ${note}.`)),
    one.candidates.length > 0 && candidateTable(one.candidates, tokens, { compact: true }),
    one.left_out > 0 && h("p", { class: "dim" }, `${one.left_out} more are not shown.`),
  );
}
