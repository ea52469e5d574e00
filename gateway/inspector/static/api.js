// The admin API, and nothing else, is where the page gets its data.

/** Called when a token is needed; the page shows its form. */
export const hooks = { login: () => {} };

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(method, path, body) {
  const options = { method, credentials: "same-origin", headers: {} };
  if (body !== undefined) {
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new ApiError(0, "the gateway does not answer");
  }
  const document = await response.json().catch(() => ({}));
  if (response.status === 401 && path !== "/api/login") hooks.login();
  if (!response.ok) throw new ApiError(response.status, document.error ?? `status ${response.status}`);
  return document;
}

export const get = (path) => ask("GET", path);
export const post = (path, body = {}) => ask("POST", path, body);
export const workerPath = (id) => `/api/workers/${encodeURIComponent(id)}`;
export const requestPath = (id) => `/api/requests/${encodeURIComponent(id)}`;

/** The live stream: hands events to listeners, and tells `state` whether it stands. Reconnects by itself. */
export class Live {
  constructor(state) {
    this.listeners = new Set();
    this.state = state;
    this.fleet = null;
    this.wait = 1000;
  }

  open() {
    this.close();
    const source = (this.source = new EventSource("/api/live"));
    source.onopen = () => {
      this.wait = 1000;
      this.state("live");
    };
    source.onerror = () => {
      this.state("lost");
      if (source.readyState === EventSource.CLOSED) {
        // A status that is no 200: perhaps the login is over. Ask in a way that says so, then try again, slower each time.
        get("/api/config").catch(() => {});
        this.timer = setTimeout(() => this.open(), this.wait);
        this.wait = Math.min(30000, this.wait * 2);
      }
    };
    for (const kind of ["fleet", "requests"]) {
      source.addEventListener(kind, (event) => {
        const data = JSON.parse(event.data);
        if (kind === "fleet") this.fleet = data;
        for (const listener of this.listeners) listener(kind, data);
      });
    }
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
  }
}
