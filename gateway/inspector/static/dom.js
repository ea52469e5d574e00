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

/** A table of `columns` [{head, class, title, cell(row)}]; `attributes(row)` are those of its element. */
export function table(columns, rows, attributes = () => ({})) {
  const made = keyed(columns, (row) => row, attributes);
  made.set(rows);
  return made.element;
}

/**
 * A table that is changed in place: `set(rows)` keeps the elements of rows that are still the same objects, so that what is under
 * the pointer stays there. `key(row)` tells which row takes the place of which.
 */
export function keyed(columns, key, attributes = () => ({})) {
  const body = h("tbody", {});
  const head = h("thead", {}, h("tr", {}, columns.map((c) => h("th", { class: c.class, title: c.title, scope: "col" }, c.head))));
  const element = h("div", { class: "scroll" }, h("table", {}, head, body));
  const make = (row) => h("tr", attributes(row), columns.map((c) => h("td", { class: c.class, data: { label: c.head } }, c.cell(row))));
  let known = new Map();
  const set = (rows) => {
    const wanted = new Map();
    for (const row of rows) {
      const name = key(row);
      const before = known.get(name);
      const tr = before?.row === row ? before.tr : make(row);
      if (before && before.tr !== tr && before.tr.hasAttribute("aria-selected")) tr.setAttribute("aria-selected", "true");
      wanted.set(name, { row, tr });
    }
    for (const [name, before] of known) if (wanted.get(name)?.tr !== before.tr) before.tr.remove();
    let next = body.firstChild;
    for (const { tr } of wanted.values()) {
      if (tr === next) next = next.nextSibling;
      else body.insertBefore(tr, next);
    }
    known = wanted;
  };
  return { element, set };
}

/** Copies text and says so on the button for a moment. */
export async function copy(text, button) {
  await navigator.clipboard.writeText(text);
  const before = button.textContent;
  button.textContent = "copied";
  setTimeout(() => (button.textContent = before), 1200);
}
