// The frame: routes, keys, colours, the live stream; each view is a module of its own.

import { Live, get, hooks, post } from "/static/api.js";
import { fill, h } from "/static/dom.js";
import { History } from "/static/history.js";
import * as fleet from "/static/views/fleet.js";
import * as policy from "/static/views/policy.js";
import * as prefixes from "/static/views/prefixes.js";
import * as request from "/static/views/request.js";
import * as residency from "/static/views/residency.js";
import * as requests from "/static/views/requests.js";
import * as worker from "/static/views/worker.js";

const TABS = [
  ["fleet", "Fleet", "1"],
  ["requests", "Requests", "2"],
  ["prefixes", "Prefixes", "3"],
  ["policy", "Policy", "4"],
  ["residency", "Residency", "5"],
];
const KEYS = [
  ["1 2 3 4 5", "fleet, requests, prefixes, policy, residency"],
  ["j k", "next, previous row"],
  ["enter", "open the row"],
  ["esc", "back; leave a field"],
  ["/", "go to the filters"],
  ["p", "pause, go on"],
  ["t", "light, dark, as the system"],
  ["?", "these keys"],
];

const main = h("main", { tabindex: "-1" });
const status = h("span", { class: "live", role: "status" }, "connecting");
const theme = h("button", { class: "quiet", title: "Colours (t)", on: { click: nextTheme } });
const tabs = TABS.map(([name, text]) => h("a", { href: `#/${name}` }, text));
const logout = h("button", { class: "quiet", hidden: true, on: { click: leave } }, "log out");
const help = h(
  "dialog",
  { class: "help" },
  h("h2", {}, "Keys"),
  h("dl", {}, KEYS.map(([keys, text]) => [h("dt", {}, keys.split(" ").map((key) => h("kbd", {}, key))), h("dd", {}, text)])),
  h("form", { method: "dialog" }, h("button", {}, "close")),
);

export const context = {
  live: new Live((state) => {
    status.className = `live ${state}`;
    status.textContent = state === "live" ? "live" : "no connection";
  }),
  history: new History(),
  config: null,
};

let view = null;

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map(decodeURIComponent);
  const parameters = new URLSearchParams(query ?? "");
  view?.leave?.();
  fill(main);
  main.scrollTop = 0;
  const current = name === "workers" ? "fleet" : name || "fleet";
  tabs.forEach((tab, index) => tab.toggleAttribute("aria-current", TABS[index][0] === current));
  const id = rest.join("/");
  const modules = { fleet, prefixes, policy, residency, requests: id ? request : requests, workers: worker };
  const chosen = modules[name || "fleet"];
  if (chosen === undefined) {
    fill(main, h("p", { class: "empty" }, "There is no such page."));
    view = null;
    return;
  }
  document.title = `${id || (TABS.find(([one]) => one === current)?.[1] ?? "")} · warmroute`;
  view = chosen.show(main, context, { id, parameters });
}

// Colours.

function nextTheme() {
  const order = ["auto", "light", "dark"];
  setTheme(order[(order.indexOf(localStorage.getItem("theme") ?? "auto") + 1) % 3]);
  route();
}

function setTheme(name) {
  if (name === "auto") localStorage.removeItem("theme");
  else localStorage.setItem("theme", name);
  document.documentElement.dataset.theme = name;
  theme.textContent = { auto: "◐", light: "☀", dark: "☾" }[name];
  theme.setAttribute("aria-label", `colours: ${name}`);
}

// Logging in, where a token is asked for.

function login() {
  if (main.querySelector("form.login")) return;
  view?.leave?.();
  view = null;
  context.live.close();
  const field = h("input", { type: "password", name: "token", autocomplete: "current-password", required: true, "aria-label": "token" });
  const message = h("p", { class: "bad", role: "alert" });
  const submit = async (event) => {
    event.preventDefault();
    try {
      await post("/api/login", { token: field.value });
      await start();
    } catch (error) {
      message.textContent = error.message;
      field.select();
    }
  };
  fill(
    main,
    h(
      "form",
      { class: "login", on: { submit } },
      h("h1", {}, "This gateway asks for its admin token"),
      h("p", { class: "dim" }, "It is admin.token in the configuration."),
      h("div", { class: "row" }, field, h("button", { class: "strong" }, "log in")),
      message,
    ),
  );
  field.focus();
}

async function leave() {
  await post("/api/logout").catch(() => {});
  login();
}

// Keys.

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches?.("input, textarea, select");
  if (event.key === "Escape") {
    if (help.open) return;
    if (typing) event.target.blur();
    else if (/^#\/(requests|workers)\/./.test(location.hash)) history.back();
    return;
  }
  if (typing) return;
  const tab = TABS.find(([, , key]) => key === event.key);
  if (tab) location.hash = `#/${tab[0]}`;
  else if (event.key === "?") help.showModal();
  else if (event.key === "t") nextTheme();
  else if (event.key === "/") main.querySelector("input, textarea")?.focus();
  else if (event.key === "j" || event.key === "k") moveRow(event.key === "j" ? 1 : -1);
  else if (event.key === "Enter" && !event.target.matches?.("a, button")) main.querySelector("tr[aria-selected]")?.click();
  else if (!view?.key?.(event.key)) return;
  event.preventDefault();
}

function moveRow(step) {
  const rows = [...main.querySelectorAll("tbody tr[data-open]")];
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.hasAttribute("aria-selected"));
  rows[at]?.removeAttribute("aria-selected");
  const next = rows[Math.max(0, Math.min(rows.length - 1, at + step))];
  next.setAttribute("aria-selected", "true");
  next.scrollIntoView({ block: "nearest" });
}

document.addEventListener("click", (event) => {
  if (event.target.closest("a, button, input, select")) return;
  const row = event.target.closest("tr[data-open]");
  if (row && !String(getSelection())) location.hash = row.dataset.open;
});

// Start.

async function start() {
  try {
    context.config = await get("/api/config");
  } catch (error) {
    if (error.status !== 401) fill(main, h("p", { class: "empty bad" }, `${error.message}.`));
    return;
  }
  logout.hidden = !context.config.login;
  context.live.open();
  route();
}

context.live.listeners.add((kind, data) => {
  if (kind === "fleet") context.history.fleet(data);
  else context.history.requests(data.requests);
});
hooks.login = login;
setTheme(localStorage.getItem("theme") ?? "auto");
document.body.append(
  h(
    "header",
    {},
    h("a", { class: "brand", href: "#/fleet" }, "warmroute"),
    h("nav", { "aria-label": "views" }, tabs),
    h("span", { class: "grow" }),
    status,
    logout,
    theme,
    h("button", { class: "quiet", title: "Keys (?)", "aria-label": "keys", on: { click: () => help.showModal() } }, "?"),
  ),
  main,
  help,
);
addEventListener("hashchange", route);
addEventListener("keydown", onKey);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view && route());
start();
