"""What a type cannot say: addresses that clash, names given twice, URLs that cannot work, values that contradict each other.

The checks read the plain data that `gateway.config.walk` made. It may have holes (`INVALID`): each check looks only at what
has the right type, so a problem is reported once.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from backends.hints.registry import HINT_DRIVERS, SPEAK_TO_SERVERS
from gateway.admission.keys import digest, parse_hash, usable
from gateway.config import schema
from gateway.config.capabilities import contradictions
from gateway.config.problems import NOWHERE, Mark, Where, choices, clip, did_you_mean, format_path
from gateway.config.source import Source
from gateway.config.units import format_duration

_LABEL = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*")
_OWN_LABELS = frozenset({"model_name", "pod_name", "metric_source", "le"})
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_VALUE = re.compile(r"[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?")
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.%A-Za-z0-9]+\]")
_ZMQ = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%]+\]|\*|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})|ipc://\S+")
_WILDCARDS = frozenset({"0.0.0.0", "::", "[::]", "*"})  # noqa: S104 - compared with, not bound to
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})
_MIN_HEADER = 1024
HINTS_AUTO = ("auto", "none")
"""What may stand in place of hint drivers' names."""


class Checker:
    """Checks one file's data."""

    def __init__(
        self,
        source: Source,
        marks: Mapping[Where, Mark],
        key_marks: Mapping[Where, Mark],
        *,
        drivers: Collection[str],
        profiles: Collection[str],
    ) -> None:
        self._source = source
        self._marks = marks
        self._key_marks = key_marks
        self._drivers = drivers
        self._profiles = profiles

    def check(self, data: dict[str, Any]) -> None:
        """Complain about everything that is wrong in `data`."""
        self._check_addresses(data)
        self._check_models(data)
        self._check_tenants(_mapping(data, "tenants"))
        self._check_stages(data)
        self._check_health(_mapping(data, "health"), ("health",))
        self._check_retries(_mapping(data, "retries"), ("retries",))
        self._check_pool(_mapping(data, "pool"))
        self._check_limits(_mapping(data, "limits"))
        telemetry = _mapping(data, "telemetry")
        self._check_traces(_mapping(telemetry, "traces"))
        self._check_metrics(_mapping(telemetry, "metrics"))

    def mark(self, where: Where) -> Mark:
        """Where the value at `where` begins, else its key, else the nearest thing around it."""
        while where:
            if (mark := self._marks.get(where) or self._key_marks.get(where)) is not None:
                return mark
            where = where[:-1]
        return self._marks.get((), NOWHERE)

    def complain(self, where: Where, message: str, *, at_key: bool = False) -> None:
        """Take a problem with the value at `where` down, or with its key."""
        mark = self._key_marks.get(where) if at_key else None
        self._source.complain(mark or self.mark(where), where, message)

    def _check_addresses(self, data: dict[str, Any]) -> None:
        hosts: list[Any] = []
        ports: list[Any] = []
        for name, default in (("listen", 8080), ("admin", 8081)):
            section = _mapping(data, name)
            host, port = section.get("host", "127.0.0.1"), section.get("port", default)
            if isinstance(host, str) and (not host or host.split() != [host]):
                self.complain(
                    (name, "host"), "expected a host name or an IP address; 0.0.0.0 listens on all interfaces"
                )
            hosts.append(host)
            ports.append(port if data.get(name, {}) is not None else None)
        if not all(isinstance(host, str) for host in hosts) or ports[0] != ports[1] or not isinstance(ports[0], int):
            return
        clash = _same_host(*hosts) or bool(_WILDCARDS & set(hosts))
        if ports[0] and clash:
            where = ("admin", "port") if "admin" in data else ("listen", "port")
            other = "listen" if "admin" in data else "admin"
            self.complain(
                where, f"the port {ports[0]} is the one of `{other}` too; give the two listeners different ports"
            )

    def _check_models(self, data: dict[str, Any]) -> None:
        models = data.get("models")
        if not isinstance(models, list):
            return
        if not models:
            self.complain(("models",), "empty; at least one model with its workers is needed")
        names: dict[str, Where] = {}
        ids: dict[str, tuple[str, Where]] = {}
        for index, model in enumerate(models):
            if not isinstance(model, dict):
                continue
            where: Where = ("models", index)
            aliases = [((*where, "aliases", at), name, "alias") for at, name in enumerate(_list(model, "aliases"))]
            for place, name, kind in [((*where, "name"), model.get("name"), "name"), *aliases]:
                if not isinstance(name, str):
                    continue
                if not name.isprintable() or name != name.strip():
                    self.complain(place, f"the {kind} has spaces around it or unprintable characters; remove them")
                if name in names:
                    first = names[name]
                    line = self.mark(first).line
                    self.complain(
                        place,
                        f'the {kind} "{clip(name)}" is taken by {format_path(first)} (line {line}); '
                        "each name and alias may stand once in the whole file",
                    )
                names.setdefault(name, place)
            self._check_workers(model, where, ids)
            if isinstance(model.get("health"), dict):
                self._check_health(model["health"], (*where, "health"))
            self._check_retries(_mapping(model, "retries"), (*where, "retries"))
            self._check_hedging(_mapping(model, "hedging"), (*where, "hedging"))

    def _check_workers(self, model: dict[str, Any], model_where: Where, ids: dict[str, tuple[str, Where]]) -> None:
        workers = model.get("workers")
        if not isinstance(workers, list):
            return
        if not workers:
            self.complain((*model_where, "workers"), "empty; a model needs at least one worker")
        urls: dict[str, Where] = {}
        for index, worker in enumerate(workers):
            if not isinstance(worker, dict):
                continue
            where: Where = (*model_where, "workers", index)
            parts = self._check_url(worker.get("url"), (*where, "url"), base=True)
            if parts is not None:
                self._check_identity(worker, parts, where, urls, ids)
            driver = worker.get("driver")
            if isinstance(driver, str) and driver not in self._drivers:
                known = choices(self._drivers)
                self.complain(
                    (*where, "driver"),
                    f'no driver is called "{clip(driver)}"{did_you_mean(driver, self._drivers) or "."} Known drivers: {known}',
                )
            key = worker.get("api_key")
            if isinstance(key, str) and not _FIELD_VALUE.fullmatch(key):
                self.complain((*where, "api_key"), _bad_field_value(key, "key"))
            capabilities = _mapping(worker, "capabilities")
            for place, message in contradictions(capabilities, driver, self._profiles):
                self.complain((*where, "capabilities", *place), message)
            for key in ("kv_events", "lmcache_events"):
                self._check_sockets(_mapping(worker, key), (*where, key))
            self._check_hints(_mapping(worker, "hints"), (*where, "hints"))

    def _check_hints(self, hints: dict[str, Any], where: Where) -> None:
        """Drivers that exist, in a list that makes sense, and a hint server for those that speak to one."""
        driver = hints.get("driver")
        named = _list(hints, "driver") if isinstance(driver, list) else [] if driver is None else [driver]
        known = (*HINTS_AUTO, *HINT_DRIVERS)
        for index, name in enumerate(named):
            place: Where = (*where, "driver", index) if isinstance(driver, list) else (*where, "driver")
            if not isinstance(name, str):
                continue
            if name not in known:
                self.complain(
                    place,
                    f'no hint driver is called "{clip(name)}"{did_you_mean(name, known) or "."} There are: {choices(known)}',
                )
            elif name in HINTS_AUTO and len(named) > 1:
                self.complain(place, f"{name} stands alone; name the drivers, or only {name}")
            elif name in named[:index]:
                self.complain(place, f"{name} is in the list already; remove one of the two")
            elif name in SPEAK_TO_SERVERS and hints.get("url") is None:
                self.complain(place, f"{name} speaks to a hint server; say where it is: `url: http://10.0.0.7:8080`")
        if driver == []:
            self.complain((*where, "driver"), "empty; name at least one driver, or `none`")
        self._check_url(hints.get("url"), (*where, "url"), base=True)
        key = hints.get("api_key")
        if isinstance(key, str) and not _FIELD_VALUE.fullmatch(key):
            self.complain((*where, "api_key"), _bad_field_value(key, "key"))

    def _check_tenants(self, tenants: dict[str, Any]) -> None:
        """Keys that are none, that two tenants have, or that a tenant lacks; nothing here shows one."""
        taken: dict[bytes, str] = {}
        for name, tenant in tenants.items():
            if not isinstance(tenant, dict):
                continue
            where: Where = ("tenants", name)
            if not any(tenant.get(each) for each in ("keys", "key", "keys_file")):
                self.complain(where, "no key; add `keys:`, `key:` or `keys_file:` (`warmroute key` makes one)")
            digests: list[tuple[Where, bytes]] = []
            for index, text in enumerate(_list(tenant, "keys")):
                if not isinstance(text, str):
                    continue
                if (found := parse_hash(text)) is None:
                    self.complain(
                        (*where, "keys", index),
                        "expected a hash: sha256: and 64 hexadecimal digits, as `warmroute key` prints it; "
                        "a key itself belongs in `key:`, from a variable",
                    )
                else:
                    digests.append(((*where, "keys", index), found))
            if isinstance(key := tenant.get("key"), str):
                if not usable(key):
                    self.complain((*where, "key"), _bad_field_value(key, "key"))
                digests.append(((*where, "key"), digest(key.encode("utf-8", "surrogatepass"))))
            for place, one in digests:
                if (owner := taken.setdefault(one, name)) != name:
                    self.complain(place, f'the same key as one of "{clip(owner)}"; a key belongs to one tenant')

    def _check_stages(self, data: dict[str, Any]) -> None:
        """Names that stages use and nobody has: of the stage before, of models, of tenants; and shares that add up to more than all."""
        stages = _mapping(data, "stages")
        models = [model for model in _list(data, "models") if isinstance(model, dict)]
        names = {name for model in models if isinstance(name := model.get("name"), str)}
        workers = {_id_of(worker) for model in models for worker in _list(model, "workers") if isinstance(worker, dict)}
        tenants = _mapping(data, "tenants")
        for name in stages:
            stage, where = _mapping(stages, name), ("stages", name)
            self._check_known(stage.get("after"), (*where, "after"), "stage", [each for each in stages if each != name])
            for index, worker in enumerate(_list(stage, "workers")):
                self._check_known(worker, (*where, "workers", index), "worker", workers)
            match = _mapping(stage, "match")
            for index, model in enumerate(_list(match, "models")):
                self._check_known(model, (*where, "match", "models", index), "model", names)
            for index, tenant in enumerate(_list(match, "tenants")):
                self._check_known(tenant, (*where, "match", "tenants", index), "tenant", tenants)
            self._check_headers(match, (*where, "match"))
            self._check_hedging(_mapping(stage, "hedging"), (*where, "hedging"))
        reserved = [share for name in stages if _is_number(share := _mapping(stages, name).get("reserve", 0))]
        if sum(reserved) > 1 + 1e-9:
            self.complain(
                ("stages",),
                "the stages reserve more slots than there are; the shares under `reserve` add up to at most 1",
            )

    def _check_known(self, name: Any, where: Where, kind: str, known: Collection[str]) -> None:
        """A name that has to be one of those known."""
        if isinstance(name, str) and name not in known:
            self.complain(
                where,
                f'no {kind} is called "{clip(name)}"{did_you_mean(name, known) or "."} There are: {choices(known) or "none"}',
            )

    def _check_sockets(self, section: dict[str, Any], where: Where) -> None:
        """Addresses that ZMQ can connect to."""
        for key in ("endpoint", "replay_endpoint"):
            address = section.get(key)
            if not isinstance(address, str):
                continue
            found = _ZMQ.fullmatch(address)
            if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
                self.complain(
                    (*where, key),
                    f'expected an address to connect to, such as tcp://10.0.0.7:5557, got "{clip(address)}"',
                )
            elif found["host"] in _WILDCARDS:
                self.complain(
                    (*where, key),
                    f"{clip(address)} is what a worker binds; write the host under which it can be reached from here",
                )

    def _check_identity(
        self,
        worker: dict[str, Any],
        parts: SplitResult,
        where: Where,
        urls: dict[str, Where],
        ids: dict[str, tuple[str, Where]],
    ) -> None:
        """The same URL twice in a fleet, or one id for two URLs anywhere."""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        url = f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}{parts.path.rstrip('/')}"
        if (first := urls.get(url)) is not None:
            self.complain(
                (*where, "url"),
                f"the same worker as {format_path(first)} (line {self.mark(first).line}); remove one of the two",
            )
            return
        urls[url] = (*where, "url")
        worker_id = worker.get("id")
        given = isinstance(worker_id, str)
        name = worker_id if isinstance(worker_id, str) else f"{parts.hostname}:{port}"
        if given and not _TOKEN.fullmatch(name.replace(":", "").replace("/", "").replace("[", "").replace("]", "")):
            self.complain((*where, "id"), "an id travels in a header; use letters, digits and any of -._:/ only")
            return
        taken_url, taken_by = ids.setdefault(name, (url, where))
        if taken_url != url:
            remedy = "choose another" if given else "give this worker an `id:` of its own"
            self.complain(
                (*where, "id") if given else (*where, "url"),
                f'the id "{clip(name)}" is taken by {format_path(taken_by)} (line {self.mark(taken_by).line}); {remedy}',
            )

    def _check_url(self, url: Any, where: Where, *, base: bool) -> SplitResult | None:
        """The parts of an http(s) URL; None after a complaint. `base`: API paths will be appended to it."""
        if not isinstance(url, str):
            return None
        expected = "expected a URL such as http://10.0.0.7:8000"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            self.complain(where, f"{expected}; its host or port is malformed")
            return None
        if any(char.isspace() or not char.isprintable() for char in url):
            problem = f"{expected}, without spaces or line breaks"
        elif parts.scheme not in {"http", "https"}:
            bare = "://" not in url and "@" not in url and bool(url)
            problem = f"{expected}, beginning with http:// or https://" + (
                f"; did you mean `http://{clip(url)}`?" if bare and "${" not in url else ""
            )
        elif parts.username is not None or parts.password is not None:
            problem = "a URL must not carry a user or password; use `api_key`" if base else "no user or password here"
        elif not parts.hostname or not _HOST.fullmatch(
            parts.netloc.rpartition(":")[0] if port is not None else parts.netloc
        ):
            problem = f"{expected}; the host is missing or malformed"
        elif port == 0:
            problem = f"{expected}; port 0 cannot be connected to"
        elif parts.query or parts.fragment or url.endswith(("?", "#")):
            problem = f"{expected}, without a query or fragment"
        elif base and parts.path.rstrip("/").endswith("/v1"):
            problem = "leave the /v1 at the end out; clients' paths, which begin with it, are appended"
        else:
            return parts
        self.complain(where, problem)
        return None

    def _check_health(self, health: dict[str, Any], where: Where) -> None:
        for key in ("interval", "timeout"):
            if health.get(key) == 0 and not isinstance(health.get(key), bool):
                self.complain((*where, key), "expected more than 0")
        path = health.get("path")
        if isinstance(path, str) and (not path.startswith("/") or path.split() != [path] or "#" in path):
            self.complain((*where, "path"), f'expected a path that begins with /, such as /health, got "{clip(path)}"')
        ejection = _mapping(health, "ejection")
        self._check_more_than_0(_mapping(ejection, "outliers"), "interval", (*where, "ejection", "outliers"))
        defaults = schema.Ejection()
        base, longest = ejection.get("base", defaults.base), ejection.get("max", defaults.max)
        if _is_number(base) and _is_number(longest) and base > longest:
            place = "base" if "base" in ejection else "max"
            self.complain(
                (*where, "ejection", place),
                f"the first ejection ({format_duration(base)}) lasts longer than the longest ({format_duration(longest)}); "
                "expected base ≤ max",
            )

    def _check_retries(self, retries: dict[str, Any], where: Where) -> None:
        self._check_more_than_0(retries, "budget_window", where)

    def _check_hedging(self, hedging: dict[str, Any], where: Where) -> None:
        self._check_more_than_0(
            hedging, "after", where, "; at once would send every request twice. To have no hedging: `budget: 0`"
        )

    def _check_more_than_0(self, section: dict[str, Any], key: str, where: Where, remedy: str = "") -> None:
        if _is_number(section.get(key)) and section[key] <= 0:
            self.complain((*where, key), f"expected more than 0{remedy}")

    def _check_pool(self, pool: dict[str, Any]) -> None:
        defaults = schema.Pool()
        idle, keep_alive = pool.get("idle", defaults.idle), pool.get("worker_keep_alive", defaults.worker_keep_alive)
        if _is_number(idle) and _is_number(keep_alive) and idle >= keep_alive:
            self.complain(
                ("pool", "idle" if "idle" in pool else "worker_keep_alive"),
                f"an idle connection ({format_duration(idle)}) must be closed before its worker closes it "
                f"({format_duration(keep_alive)}), or requests are lost to the race; lower `idle`, or raise the workers' "
                "keep-alive (vLLM: VLLM_HTTP_TIMEOUT_KEEP_ALIVE) and state it in `worker_keep_alive`",
            )

    def _check_limits(self, limits: dict[str, Any]) -> None:
        for key, least in (("body", 1), ("header", _MIN_HEADER), ("connections", 1)):
            value = limits.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                self.complain(("limits", key), f"expected at least {least}, got {value}; no request could pass")

    def _check_traces(self, traces: dict[str, Any]) -> None:
        where: Where = ("telemetry", "traces")
        self._check_url(traces.get("endpoint"), (*where, "endpoint"), base=False)
        if traces.get("exporter") == "file" and not traces.get("file"):
            self.complain((*where, "exporter"), "the exporter `file` needs `file:` with a path beside it")
        self._check_headers(traces, where)

    def _check_metrics(self, metrics: dict[str, Any]) -> None:
        where: Where = ("telemetry", "metrics")
        self._check_url(metrics.get("endpoint"), (*where, "endpoint"), base=False)
        self._check_headers(metrics, where)
        for name in _mapping(metrics, "labels"):
            if not _LABEL.fullmatch(name) or name in _OWN_LABELS:
                self.complain(
                    (*where, "labels", name), "no valid name of a label, or one that the metrics have themselves"
                )

    def _check_headers(self, section: dict[str, Any], where: Where) -> None:
        for name, value in _mapping(section, "headers").items():
            if not _TOKEN.fullmatch(name):
                self.complain((*where, "headers", name), "no valid name of a header")
            if isinstance(value, str) and value and not _FIELD_VALUE.fullmatch(value):
                self.complain((*where, "headers", name), _bad_field_value(value, "header"))


def _bad_field_value(value: str, noun: str) -> str:
    """What is wrong with a secret that is sent in a header, without showing it."""
    if not value:
        return f"the {noun} is empty; is its variable set to nothing? Remove the line if none is needed"
    if value != value.strip():
        return f"the {noun} has spaces or a line break around it (a secret read from a file?); remove them"
    return f"the {noun} has characters that no header can carry (line breaks, control characters or non-Latin letters)"


def _id_of(worker: dict[str, Any]) -> str:
    """The id of a worker, given or by its URL; empty if that is none."""
    if isinstance(worker_id := worker.get("id"), str):
        return worker_id
    try:
        parts = urlsplit(worker["url"])
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except (KeyError, ValueError, AttributeError, TypeError):
        return ""
    return f"{parts.hostname}:{port}"


def _same_host(one: str, other: str) -> bool:
    return one.lower() == other.lower() or (one in _LOOPBACK and other in _LOOPBACK and "localhost" in {one, other})


def _mapping(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _list(data: dict[str, Any], key: str) -> list[Any]:
    value = data.get(key)
    return value if isinstance(value, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
