"""A worker as the gateway sees it: who it is, its state, its load, what it can do and how fast it was seen to be.

Load is counted when a request is decided, when its answer begins and when it ends (`Lease`). From the order in which prompts were
sent there and the speed that was learned (`gateway.fleet.calibration`) follows how many seconds of prefill are before a new one:
workers compute prompts first come, first served.
"""

import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

import msgspec

from gateway.fleet.calibration import Calibration
from gateway.fleet.capabilities import WorkerCapabilities
from policies.base import NO_MATCH, Candidate, Match

if TYPE_CHECKING:
    from backends.base import Driver
    from gateway.config.schema import Capabilities
    from gateway.prefix.map import Expectation

_STREAMED: Final = 0.01
"""Seconds from the first byte to the end of an answer from which on it came as a stream: only of those the first byte ends the prefill."""


SOON: Final = 0.001
"""Seconds until a prefill begins at the earliest that is behind one which has not ended."""


class WorkerState(enum.Enum):
    """The life of a worker. Only `READY` ones take new requests (see `gateway.fleet.health` for the panic rule)."""

    WARMING = "warming"
    """Known, not yet answering its health check: loading or compiling, up to 90 minutes on Neuron."""
    READY = "ready"
    DRAINING = "draining"
    """Finishes what it has, takes nothing new."""
    EJECTED = "ejected"
    """Answers its health check but fails requests, or stopped answering."""
    GONE = "gone"
    """No longer in the configuration; forgotten when its last request ends."""


class WorkerLoad(msgspec.Struct, frozen=True, gc=False):
    """A worker at one moment, for good: what policies may see of it (`policies.base.WorkerView`)."""

    id: str
    routable: bool
    in_flight: int
    in_flight_tokens: int
    pending: int
    pending_tokens: int
    pending_padded: int
    backlog: float
    head: float
    prefill_since: float
    rate: float
    overhead: float
    hold: float
    weight: float
    model: str
    capabilities: WorkerCapabilities


class Worker:
    """One inference server process.

    Attributes:
        id: unique among all workers; ``host:port`` unless configured.
        url: base URL without a trailing slash.
        host, port, tls, base_path: the parts of `url` that the upstream connection needs.
        machine: the host that it stands on, as configured, else `host`.
        authority: host and port as they stand in `url`, for the Host field.
        model: what the worker calls the model.
        api_key: sent as a bearer token, or None.
        state: see `WorkerState`; changed only by `gateway.fleet.health` and the admin API.
        routable: whether filters may let it through; derived from `state` by `gateway.fleet.health`.
        in_flight: requests that were sent there and have not ended. Counted by us, synchronously, at the decision.
        in_flight_tokens: their prompt tokens, where known.
        pending: those of them whose answer has not begun: they wait for their prefill, or are in it.
        pending_tokens: prompt tokens that the worker has to compute for the pending ones, as far as known: what it held
            of a prompt at the decision is left out, and all of it leaves with the first byte of the answer's body.
        pending_padded: the same as the device computes it: padded, less only what is really credited.
        backlog: seconds that the prefills take which have not ended as far as we know, the one under way as a whole.
        head: seconds of the `backlog` that may be over by now without our having heard of it: the first one's, and those of answers
            that do not come as streams.
        prefill_since: when the first of them began, as far as we know; 0: there is none, or it is not known.
        rate, overhead, hold: what was learned, see `Calibration`.
        weight: share of a full load it should take, in (0, 1]; below 1 only during slow start.
        probe: half-open after an ejection: True when the next request is the one that may try it, that request's lease
            while it runs, None at any other time. Set by `gateway.fleet.states`.
        capabilities: what it can do; replaced as a whole, by `adopt`. A plain attribute, for policies read it for every candidate.
        candidate: the candidate that stands for this worker in requests of which it holds nothing.
        opened: told when there may be more room here (a prefill has ended, or a request), with the time, 0: unknown. None: nobody
            waits for that.
    """

    __slots__ = (
        "_calibration",
        "_load",
        "_queue",
        "_silent",
        "api_key",
        "authority",
        "backlog",
        "base_path",
        "candidate",
        "capabilities",
        "driver",
        "head",
        "hold",
        "host",
        "id",
        "in_flight",
        "in_flight_tokens",
        "machine",
        "model",
        "opened",
        "overhead",
        "pending",
        "pending_padded",
        "pending_tokens",
        "port",
        "prefill_since",
        "probe",
        "rate",
        "routable",
        "state",
        "tls",
        "url",
        "weight",
    )

    def __init__(
        self,
        *,
        url: str,
        driver: "Driver",
        model: str,
        worker_id: str | None = None,
        api_key: str | None = None,
        capabilities: "Capabilities | None" = None,
    ) -> None:
        parts = urlsplit(url)
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.machine = self.host
        self.port = parts.port or (443 if self.tls else 80)
        self.base_path = parts.path.rstrip("/")
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.url = url.rstrip("/")
        self.id = worker_id or f"{self.host}:{self.port}"
        self.driver = driver
        self.model = model
        self.api_key = api_key
        self.capabilities = WorkerCapabilities.of(capabilities, driver)
        self._learn_anew(self.capabilities.prefill_rate, self.capabilities.overhead)
        self.state = WorkerState.WARMING
        self.routable = False
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.pending = 0
        self.pending_tokens = 0
        self.pending_padded = 0
        self.backlog = 0.0
        self.head = 0.0
        self.prefill_since = 0.0
        self._queue: dict[
            Lease, None
        ] = {}  # whose prefill has not ended as far as we know, in the order of their decisions
        self._silent = 0.0  # seconds of those of them whose answers are not streamed
        self.weight = 1.0
        self.probe: Lease | Literal[True] | None = None
        self.candidate = Candidate(self, NO_MATCH)
        self.opened: Callable[[float], None] | None = None

    def __repr__(self) -> str:
        return f"<Worker {self.id} {self.state.value} in_flight={self.in_flight}>"

    def adopt(self, capabilities: WorkerCapabilities) -> None:
        """It can do something else from now on; what was learned of its speed is forgotten if that starts elsewhere."""
        start = capabilities.prefill_rate, capabilities.overhead
        self.capabilities = capabilities
        if start != self._calibration.start:
            self._learn_anew(*start)

    @property
    def calibration(self) -> Calibration:
        """What was learned of its speed."""
        return self._calibration

    def restarted(self) -> None:
        """It is another process now, or may be: what was learned of its speed is forgotten."""
        self._learn_anew(*self._calibration.start)

    def _learn_anew(self, rate: float, overhead: float) -> None:
        self._calibration = Calibration(rate, overhead)
        self.rate = rate
        self.overhead = overhead
        self.hold = 0.0
        self._load: WorkerLoad | None = None

    def snapshot(self) -> WorkerLoad:
        """Itself at this moment, the same object until something changes."""
        load = self._load
        if (
            load is not None
            and load.routable is self.routable
            and load.weight == self.weight
            and load.capabilities is self.capabilities
        ):
            return load
        # Without keywords, in the order of the fields: a third of the time, and a busy worker has a new one for every decision.
        self._load = load = WorkerLoad(
            self.id,
            self.routable,
            self.in_flight,
            self.in_flight_tokens,
            self.pending,
            self.pending_tokens,
            self.pending_padded,
            self.backlog,
            self.head,
            self.prefill_since,
            self.rate,
            self.overhead,
            self.hold,
            self.weight,
            self.model,
            self.capabilities,
        )
        return load

    def acquire(
        self,
        tokens: int = 0,
        uncached: int | None = None,
        *,
        match: Match = NO_MATCH,
        now: float = 0.0,
        streamed: bool = True,
    ) -> "Lease":
        """Count a request in, at the moment of the decision. Its lease must be released in a ``finally``.

        Args:
            tokens: of the prompt; 0 when not known.
            uncached: those of them that the worker has to compute; None: ``tokens - match.tokens``.
            match: what it holds, for the time that loading from l1 and l2 takes.
            now: seconds on the caller's clock; 0: unknown, and nothing is learned from this request.
            streamed: whether the answer's first byte comes when the prefill ends. Otherwise the prefill counts as ended when its
                predicted time is over, or the first byte of a later, streamed one has come.
        """
        if uncached is None:
            uncached = max(0, tokens - match.tokens)
        padded = uncached
        capabilities = self.capabilities
        load = 0.0
        if tokens:
            if capabilities.shaped:
                padded = capabilities.padded(tokens - capabilities.credit(tokens, tokens - uncached))
            if match.l1 or match.l2:
                load = min(capabilities.load_seconds(match.l1, match.l2), (match.l1 + match.l2) / self.rate)
        seconds = self.overhead + padded / self.rate + load
        lease = Lease(self, tokens, uncached, padded, now, load, seconds)
        queue = self._queue
        if self._silent and now:
            self._settle(now)
        if not queue:
            self.prefill_since = now
            self.head = seconds
            slots = capabilities.slots
            if (slots is None or self.in_flight < slots) and self._has_room(tokens):
                # Where prompts share their steps with decodes, only an idle worker shows how fast it is.
                lease.began = now if not self.in_flight or capabilities.prefill == "exclusive" else 0.0
        elif not streamed:
            self.head += seconds
        queue[lease] = None
        if not streamed:
            lease.silent = True
            self._silent += seconds
        self.backlog += seconds
        self.in_flight += 1
        self.in_flight_tokens += tokens
        self.pending += 1
        self.pending_tokens += uncached
        self.pending_padded += padded
        self._load = None
        if self.probe is True:  # this request is the only one that may try the worker
            self.probe = lease
            self.routable = False
        return lease

    def _has_room(self, tokens: int) -> bool:
        """Whether the prompts that are there, and `tokens` more, fit its KV cache side by side: otherwise a prefill may wait for blocks.

        What it waits then is not to be learned as slowness. Prefixes that they share count more than once: rather no lesson than a wrong one.
        """
        capacity = self.capabilities.kv_capacity_tokens
        return capacity is None or self.in_flight_tokens + tokens <= capacity

    def _settle(self, now: float) -> None:
        """Take from the front of the queue what must be over by now, though its answer will not tell before it ends."""
        queue = self._queue
        since = self.prefill_since
        while since and queue and (first := next(iter(queue))).silent and since + first.seconds <= now:
            since += first.seconds
            self._drop(first)
        self._front(since)

    def changed(self) -> None:
        """For `Lease`: the last snapshot is out of date."""
        self._load = None

    def prefilled(self, lease: "Lease", now: float) -> None:
        """For `Lease`: its prefill has ended, or it will not be computed any more."""
        queue = self._queue
        if lease not in queue:
            return
        first = next(iter(queue))
        while first is not lease and first.silent and now and not lease.silent:
            self._drop(first)  # was sent there before: its prefill has ended, too
            first = next(iter(queue))
        self._drop(lease)
        if first is not lease:
            self._front(self.prefill_since)
            return
        self._front(now)
        if not queue:
            return
        if self.capabilities.prefill == "chunked":
            lease.began = 0.0  # the others' tokens may have been in its steps
        elif now and not lease.silent:
            slots = self.capabilities.slots
            if (slots is None or self.in_flight <= slots) and self._has_room(0):
                next(iter(queue)).began = now

    def _front(self, since: float) -> None:
        """The queue has another front, whose prefill began at `since`."""
        queue = self._queue
        if not queue:
            self.backlog = self.head = self.prefill_since = self._silent = 0.0
            return
        self.prefill_since = since
        head = next(iter(queue))
        self.head = self._silent if head.silent else self._silent + head.seconds

    def _drop(self, lease: "Lease") -> None:
        del self._queue[lease]
        self.backlog -= lease.seconds
        if lease.silent:
            self._silent -= lease.seconds

    def begins(self, lease: "Lease", now: float) -> float | None:
        """When the prefill of `lease` begins, or began, by what was predicted of those before it; None: it is over, or will not be computed.

        Where prompts are computed one at a time, it has not begun as long as a streamed one before it has not brought its first byte.
        """
        if lease not in self._queue:
            return None
        begins = self.prefill_since or lease.at
        in_turn = self.capabilities.prefill == "exclusive"
        for each in self._queue:
            if each is lease:
                break
            begins += each.seconds
            if in_turn and not each.silent:
                begins = max(begins, now + SOON)
        return max(begins, lease.at)

    def learn(self, lease: "Lease", first: float, now: float) -> None:
        """For `Lease`: what a request that was answered says of the worker: `first` is when its answer began, `now` when it ended."""
        calibration = self._calibration
        if lease.began and not lease.silent and now - first >= _STREAMED:
            if lease.padded and calibration.prefill(lease.padded, first - lease.began - lease.load):
                self.rate = calibration.rate
                self.overhead = calibration.overhead
            calibration.held(now - lease.began)
        else:
            calibration.held(now - max(lease.at, first - lease.seconds))
        self.hold = calibration.hold

    def request_headers(self) -> Mapping[str, str]:
        """Header fields that requests to this worker carry on our behalf (its API key)."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class Lease:
    """One counted request: `first_byte` when its prefill has ended, `release` when all of it has. Each counts once.

    Attributes:
        worker: who has it.
        padded: prompt tokens that the device computes for it.
        seconds: how long its prefill was predicted to take, loading included.
        load: seconds of those that are loading.
        at: when it was decided; 0: unknown.
        began: when its prefill began, if that is known well; else 0.
        silent: its answer does not come as a stream.
        expectation: what is believed because of this request, settled when its prefill has ended or it has.
    """

    __slots__ = (
        "_first",
        "_tokens",
        "_uncached",
        "at",
        "began",
        "expectation",
        "load",
        "padded",
        "seconds",
        "silent",
        "worker",
    )

    def __init__(
        self, worker: Worker, tokens: int, uncached: int, padded: int, now: float, load: float, seconds: float
    ) -> None:
        self.worker: Worker = worker
        self._tokens = tokens
        self._uncached = uncached
        self._first = 0.0
        self.padded = padded
        self.at = now
        self.load = load
        self.seconds = seconds
        self.began = 0.0
        self.silent = False
        self.expectation: Expectation | None = None

    def first_byte(self, now: float = 0.0) -> None:
        """The prefill has ended: the request is pending no more. Calling it again, or after `release`, does nothing.

        To be called with the first byte of the answer's *body*. The head of a streamed answer proves nothing: vLLM sends it
        before the first token. An answer that is not streamed comes whole, so there its prefill ends no earlier than it does.

        Args:
            now: seconds on the clock of `Worker.acquire`; 0: unknown.
        """
        uncached = self._uncached
        if uncached < 0:
            return
        self._uncached = -1
        self._first = now
        worker = self.worker
        worker.pending -= 1
        worker.pending_tokens -= uncached
        worker.pending_padded -= self.padded
        worker.prefilled(self, now)
        worker.changed()
        if self.expectation is not None:
            self.expectation.settle(now)
            self.expectation = None
        if worker.opened is not None and self._tokens >= 0:
            worker.opened(now)

    def release(self, now: float = 0.0) -> None:
        """Count the request out, from what is pending too. Calling it again does nothing.

        Args:
            now: when its answer ended, for what can be learned from it; 0: unknown, or it did not end well.
        """
        tokens = self._tokens
        if tokens < 0:
            return
        self._tokens = -1
        first = self._first
        if self._uncached >= 0:
            self.first_byte(now)
        worker = self.worker
        worker.in_flight -= 1
        worker.in_flight_tokens -= tokens
        worker.changed()
        if self.at and first and now:
            worker.learn(self, first, now)
        if worker.probe is self:  # ended without a verdict (its client left, say): the next request may try
            worker.probe = True
            worker.routable = True
        if worker.opened is not None:
            worker.opened(now)
