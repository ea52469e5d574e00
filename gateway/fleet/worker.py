"""A worker as the gateway sees it: who it is, its state, its load, what it can do."""

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from gateway.config.schema import Capabilities
from policies.base import NO_MATCH, Candidate

if TYPE_CHECKING:
    from backends.base import Driver


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


class Worker:
    """One inference server process.

    Attributes:
        id: unique among all workers; ``host:port`` unless configured.
        url: base URL without a trailing slash.
        host, port, tls, base_path: the parts of `url` that the upstream connection needs.
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
        weight: share of a full load it should take, in (0, 1]; below 1 only during slow start.
        probe: half-open after an ejection: True when the next request is the one that may try it, that request's lease
            while it runs, None at any other time. Set by `gateway.fleet.states`.
        candidate: the candidate that stands for this worker in requests of which it holds nothing.
    """

    __slots__ = (
        "api_key",
        "authority",
        "base_path",
        "candidate",
        "capabilities",
        "driver",
        "host",
        "id",
        "in_flight",
        "in_flight_tokens",
        "model",
        "pending",
        "pending_tokens",
        "port",
        "probe",
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
        capabilities: Capabilities | None = None,
    ) -> None:
        parts = urlsplit(url)
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.tls else 80)
        self.base_path = parts.path.rstrip("/")
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.url = url.rstrip("/")
        self.id = worker_id or f"{self.host}:{self.port}"
        self.driver = driver
        self.model = model
        self.api_key = api_key
        self.capabilities = capabilities or Capabilities()
        self.state = WorkerState.WARMING
        self.routable = False
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.pending = 0
        self.pending_tokens = 0
        self.weight = 1.0
        self.probe: Lease | Literal[True] | None = None
        self.candidate = Candidate(self, NO_MATCH)

    def __repr__(self) -> str:
        return f"<Worker {self.id} {self.state.value} in_flight={self.in_flight}>"

    def acquire(self, tokens: int = 0, uncached: int | None = None) -> "Lease":
        """Count a request in, at the moment of the decision. Its lease must be released in a ``finally``.

        Args:
            tokens: of the prompt; 0 when not known.
            uncached: those of them that the worker has to compute, ``tokens - match.tokens``; None: all.
        """
        if uncached is None:
            uncached = tokens
        self.in_flight += 1
        self.in_flight_tokens += tokens
        self.pending += 1
        self.pending_tokens += uncached
        lease = Lease(self, tokens, uncached)
        if self.probe is True:  # this request is the only one that may try the worker
            self.probe = lease
            self.routable = False
        return lease

    def request_headers(self) -> Mapping[str, str]:
        """Header fields that requests to this worker carry on our behalf (its API key)."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class Lease:
    """One counted request: `first_byte` when its prefill has ended, `release` when all of it has. Each counts once."""

    __slots__ = ("_tokens", "_uncached", "worker")

    def __init__(self, worker: Worker, tokens: int, uncached: int) -> None:
        self.worker: Worker = worker
        self._tokens = tokens
        self._uncached = uncached

    def first_byte(self) -> None:
        """The prefill has ended: the request is pending no more. Calling it again, or after `release`, does nothing.

        To be called with the first byte of the answer's *body*. The head of a streamed answer proves nothing: vLLM sends it
        before the first token. An answer that is not streamed comes whole, so there its prefill ends no earlier than it does.
        """
        uncached = self._uncached
        if uncached < 0:
            return
        self._uncached = -1
        worker = self.worker
        worker.pending -= 1
        worker.pending_tokens -= uncached

    def release(self) -> None:
        """Count the request out, from what is pending too. Calling it again does nothing."""
        tokens = self._tokens
        if tokens < 0:
            return
        self._tokens = -1
        self.first_byte()
        worker = self.worker
        worker.in_flight -= 1
        worker.in_flight_tokens -= tokens
        if worker.probe is self:  # ended without a verdict (its client left, say): the next request may try
            worker.probe = True
            worker.routable = True
