// Elements made of data. Text is always text: nothing here, nor anywhere in the page, parses markup.

/** An element: `h("a", {href: "#/x", class: "k", on: {click: f}}, "text", other)`. Children that are null or false are left out. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(element, child);
    else if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }
}

/** Puts `children` in place of all that `element` holds. */
export function fill(element, ...children) {
  element.textContent = "";
  add(element, children);
  return element;
}

/** A bar of several parts: `[[share of the whole from 0 to 1, class], ...]`, with `title` for the pointer. */
export function bar(parts, title) {
  return h(
    "span",
    { class: "bar", title, role: "img", "aria-label": title },
    parts.map(([share, kind]) => h("i", { class: kind, style: { width: `${Math.max(0, Math.min(1, share)) * 100}%` } })),
  );
}

/** A table of `columns` [{head, class, title, cell(row)}]; each row is an element made by `attributes(row)`. */
export function table(columns, rows, attributes = () => ({})) {
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, columns.map((c) => h("th", { class: c.class, title: c.title, scope: "col" }, c.head)))),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            attributes(row),
            columns.map((c) => h("td", { class: c.class, data: { label: c.head } }, c.cell(row))),
          ),
        ),
      ),
    ),
  );
}

/** Copies text and says so on the button for a moment. */
export async function copy(text, button) {
  await navigator.clipboard.writeText(text);
  const before = button.textContent;
  button.textContent = "copied";
  setTimeout(() => (button.textContent = before), 1200);
}
