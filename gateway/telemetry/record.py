"""What is known of one request: references and floats while it runs, a document when somebody looks.

On the way of a request nothing is built but these structs. Names, tables, sentences and dictionaries are made by `summary`
and `document`, long after it perhaps: they ask the policy once more, with snapshots of the workers as they were then. A
record never refers to a prompt's tokens, nor to a body unless capture is on.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.prompt.prompt import How
from gateway.telemetry.pace import Gaps
from gateway.telemetry.table import Table, cached_of, table_of, ttft_of
from policies.base import Candidate, Decision, Policy, RouteRequest, WorkerView

if TYPE_CHECKING:
    from gateway.http.usage import Usage
    from gateway.residency.live import Note
    from gateway.telemetry.capture import Captured
    from gateway.telemetry.spans import Trace

HEDGE_LOST: Final = "hedge_lost"
"""What is said of an attempt that another one beside it has overtaken: it was ended, and nothing was wrong with it."""
RUNNING: Final = "running"
"""The outcome of a request that has not ended."""

_HOW: Final = {How.EXACT: "exact", How.APPROXIMATE: "bytes", How.NONE: "none"}
_DIGITS: Final = 7
"""Decimals of seconds in documents: a tenth of a microsecond."""
_BASE_BYTES: Final = 1500
_ATTEMPT_BYTES: Final = 250
_CANDIDATE_BYTES: Final = 120
_HINT_BYTES: Final = 220


class Decided(msgspec.Struct, gc=False):
    """One decision, with all that it takes to explain it.

    Attributes:
        policy: what decided.
        request: what it was told. Shared by all decisions of a request; stripped of body and header fields at its end.
        candidates: what it was given.
        loads: their workers at that moment, in the same order.
        decision: None when the filters let none through.
        at: when, in seconds of the monotonic clock.
        seconds: how long it took.
    """

    policy: Policy
    request: RouteRequest
    candidates: Sequence[Candidate]
    loads: Sequence[WorkerView]
    decision: Decision | None
    at: float
    seconds: float


class Attempt(msgspec.Struct, gc=False):
    """One attempt at one worker. All times are in seconds; `at` is of the monotonic clock, the others count from it.

    Attributes:
        worker: who was asked.
        at: when it began.
        connect: until there was a connection; 0 with one from the pool.
        first_byte: until the first byte of the answer's body; 0: there was none.
        seconds: until its end; 0: it goes on.
        status: of the worker's answer, 0: none.
        error: low-cardinality name of what went wrong, or None.
        hedge: it was made beside another one that went on.
        unspent: it would have been followed by another, had the retry budget allowed it.
    """

    worker: Any
    at: float
    connect: float = 0.0
    first_byte: float = 0.0
    seconds: float = 0.0
    status: int = 0
    error: str | None = None
    hedge: bool = False
    unspent: bool = False


class RequestRecord(msgspec.Struct, gc=False, eq=False):
    """One request. Marks are seconds of the monotonic clock, 0: it never came to that.

    Attributes:
        request_id: as sent back in ``x-request-id``.
        trace: its place in a trace, None where nothing is traced.
        method: of the client's request.
        path: the API path.
        model: the fleet's name, empty when none was found.
        policy: by which a worker was chosen, as the configuration calls it.
        stream: the client asked for a stream.
        stage, tenant: classes that it belongs to, None: none.
        start: its head was there.
        read: its body was there.
        tokenized: it was known what workers hold of its prompt.
        queued: seconds that it waited for its turn.
        first_byte: the first byte of the answer's body went to the client.
        end: it was over.
        prompt_tokens: of its prompt, 0 when not known.
        how: how they are known; None when nobody looked.
        why: why not exactly.
        prompt_seconds: how long that took, waiting included.
        off_loop: in a thread.
        decisions: one, and one more for each retry.
        attempts: in their order.
        gaps: between reads of a stream, None for other answers.
        usage: what the worker says that it cost, None when it does not say.
        bytes_in, bytes_out: of the bodies of request and answer, as the client saw them.
        status: of the answer that the client got, 0: none.
        outcome: see `gateway.telemetry.metrics.Outcome`, or `RUNNING`.
        error_type, error_message: what went wrong, or None.
        captured: the request's body, where bodies are kept.
        hints: what was wished of the workers' caches because of it.
        kept_bytes: `size` as a ring has counted it.
    """

    request_id: bytes
    trace: "Trace | None"
    method: str
    path: str
    model: str
    policy: str
    stream: bool
    start: float
    read: float
    tokenized: float
    queued: float
    first_byte: float
    end: float
    prompt_tokens: int
    how: How | None
    why: str
    prompt_seconds: float
    off_loop: bool
    decisions: Sequence[Decided]
    attempts: Sequence[Attempt]
    gaps: Gaps | None
    usage: "Usage | None"
    bytes_in: int
    bytes_out: int
    status: int
    outcome: str
    error_type: str | None
    error_message: str | None
    stage: str | None = None
    tenant: str | None = None
    captured: "Captured | None" = None
    hints: "Sequence[Note]" = ()
    kept_bytes: int = 0

    @property
    def id(self) -> str:
        """The request id."""
        return self.request_id.decode("ascii", "replace")

    @property
    def total(self) -> float:
        """Seconds from head to end, or until now."""
        return (self.end or time.monotonic()) - self.start

    @property
    def ttft(self) -> float | None:
        """Seconds from head to the first byte of the answer's body."""
        return self.first_byte - self.start if self.first_byte else None

    @property
    def size(self) -> int:
        """About how many bytes of memory it keeps."""
        decisions = self.decisions
        # Nearly always there is one.
        candidates = len(decisions[0].loads) * len(decisions) if decisions else 0
        size = _BASE_BYTES + _ATTEMPT_BYTES * len(self.attempts) + _CANDIDATE_BYTES * candidates
        size += _HINT_BYTES * len(self.hints)
        return size if self.captured is None else size + len(self.captured.body)

    @property
    def time(self) -> float:
        """When it began, in seconds since 1970."""
        return wall_time(self.start)

    @property
    def how_known(self) -> str:
        """How its tokens are known: ``exact``, ``bytes`` or ``none``."""
        return _HOW[self.how] if self.how is not None else "none"

    @property
    def answering(self) -> Attempt | None:
        """The attempt that the request ended with: the last one that no other has overtaken."""
        attempts = self.attempts
        for attempt in reversed(attempts):
            if attempt.error != HEDGE_LOST:
                return attempt
        return attempts[-1] if attempts else None

    def involves(self, worker: str) -> bool:
        """Whether `worker` was asked."""
        return any(attempt.worker.id == worker for attempt in self.attempts)

    def table(self) -> Table | None:
        """The last decision's candidates and why; None when there was none. Without side effects, not for the hot path."""
        return table_of(self.decisions[-1]) if self.decisions else None

    def summary(self) -> dict[str, Any]:
        """One line of a list, ready for JSON. Seconds everywhere."""
        usage = self.usage
        last = self.answering
        return {
            "id": self.id,
            "trace_id": self.trace.trace_id if self.trace is not None else None,
            "time": self.time,
            "model": self.model or None,
            "path": self.path,
            "stream": self.stream,
            "tenant": self.tenant,
            "stage": self.stage,
            "policy": self.policy or None,
            "worker": last.worker.id if last is not None else None,
            "attempts": len(self.attempts),
            "status": self.status or None,
            "outcome": self.outcome,
            "error": self.error_type,
            "ttft": _seconds(self.ttft),
            "total": _seconds(self.total),
            "prompt_tokens": self.prompt_tokens or (usage.prompt_tokens if usage is not None else None),
            "cached_tokens": usage.cached_tokens if usage is not None else None,
            "output_tokens": usage.completion_tokens if usage is not None else None,
        }

    def document(self, *, ask: bool = True) -> dict[str, Any]:
        """All that is known, ready for JSON. Without `ask` no policy is asked what costs are made of: then any thread may call."""
        trace = self.trace
        table = table_of(self.decisions[-1], ask=ask) if self.decisions else None
        error = {"type": self.error_type, "message": self.error_message} if self.error_type is not None else None
        document: dict[str, Any] = {
            "id": self.id,
            "trace_id": trace.trace_id if trace is not None else None,
            "span_id": trace.span_id if trace is not None else None,
            "sampled": trace.sampled if trace is not None else False,
            "time": self.time,
            "model": self.model or None,
            "path": self.path,
            "stream": self.stream,
            "tenant": self.tenant,
            "stage": self.stage,
            "policy": self.policy or None,
            "prompt": self._prompt(),
            "timings": self.timings(),
            "candidates": table.document() if table is not None else [],
            "chosen": table.chosen_id if table is not None else None,
            "reason": table.reason if table is not None else None,
            "attempts": [self._attempt(attempt) for attempt in self.attempts],
            "predicted": self._predicted(),
            "actual": self._actual(),
            "gaps": self.gaps.document() if self.gaps is not None else None,
            "hints": [note.document(self.start) for note in self.hints],
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "status": self.status or None,
            "outcome": self.outcome,
            "error": error,
        }
        if len(self.decisions) > 1:
            earlier = [table_of(decided, ask=ask) for decided in self.decisions[:-1]]
            document["earlier"] = [{"chosen": each.chosen_id, "reason": each.reason} for each in earlier]
        if self.captured is not None and ask:
            document["capture"] = {"request": self.captured.document()}
        return document

    def timings(self) -> dict[str, float | None]:
        """How long each phase took; None for those that it never came to. ``first_byte`` and ``total`` count from the start."""
        decided = self.decisions[0].seconds if self.decisions else None
        last = self.answering
        return {
            "read": _seconds(self.read - self.start if self.read else None),
            "tokenize": _seconds(self.tokenized - self.read if self.tokenized else None),
            "queue": _seconds(self.queued),
            "decide": _seconds(decided),
            "connect": _seconds(last.connect if last is not None else None),
            "first_byte": _seconds(self.ttft),
            "total": _seconds(self.total),
        }

    def predicted_ttft(self) -> float | None:
        """Seconds to the first token that the chosen worker was predicted to need; None where nothing can be said."""
        return ttft_of(self.decisions[-1]) if self.decisions else None

    def _prompt(self) -> dict[str, Any]:
        return {
            "tokens": self.prompt_tokens or None,
            "how": self.how_known,
            "why": self.why or None,
            "seconds": _seconds(self.prompt_seconds),
            "where": ("thread" if self.off_loop else "loop") if self.how is not None else None,
        }

    def _attempt(self, attempt: Attempt) -> dict[str, Any]:
        return {
            "worker": attempt.worker.id,
            "at": _seconds(attempt.at - self.start),
            "connect": _seconds(attempt.connect),
            "first_byte": _seconds(attempt.first_byte or None),
            "seconds": _seconds(attempt.seconds or None),
            "status": attempt.status or None,
            "error": attempt.error,
            "hedge": attempt.hedge,
            "retry_budget_exhausted": attempt.unspent,
        }

    def _predicted(self) -> dict[str, Any]:
        return {
            "ttft": _seconds(self.predicted_ttft()),
            "cached_tokens": cached_of(self.decisions[-1]) if self.decisions and self.how is How.EXACT else None,
        }

    def _actual(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "ttft": _seconds(self.ttft),
            "cached_tokens": usage.cached_tokens if usage is not None else None,
            "prompt_tokens": usage.prompt_tokens if usage is not None else None,
            "output_tokens": usage.completion_tokens if usage is not None else None,
        }


def loads_of(candidates: Sequence[Any]) -> tuple[WorkerView, ...]:
    """The candidates' workers as they are now. The same snapshots again and again, as long as nothing changes."""
    # From a list: a generator takes twice as long.
    return tuple([candidate.worker.snapshot() for candidate in candidates])


def wall_time(monotonic: float) -> float:
    """The same moment in seconds since 1970, by what the two clocks say now."""
    return time.time() - time.monotonic() + monotonic


def stripped(request: RouteRequest) -> None:
    """Take everything big or private out of what a policy was told, and leave what explanations need: a few short members.

    After that `request` may be kept: no text of the prompt, no header field but the session's.
    """
    body: Mapping[str, Any] = request.body
    request.body = {name: value for name, value in body.items() if name in _MEMBERS and _short(value)}
    session = request.headers.get(_SESSION)
    request.headers = {_SESSION: session} if session is not None and len(session) <= _SHORT else _NO_HEADERS


_SHORT: Final = 128
_SESSION: Final = "x-session-id"
_NO_HEADERS: Final[Mapping[str, str]] = {}
_MEMBERS: Final = frozenset(
    {"model", "max_tokens", "max_completion_tokens", "session_id", "prompt_cache_key", "user", "priority"}
)


def _short(value: object) -> bool:
    return len(value) <= _SHORT if isinstance(value, str) else isinstance(value, int)


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
