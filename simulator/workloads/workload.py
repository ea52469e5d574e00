"""What a replay replays: requests with arrival times, lengths and the identity of their content."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

MOST_TOKENS: Final = 10**9
"""Of a prompt, and of an answer."""


class WorkloadError(ValueError):
    """A workload cannot be read or made; the text names the place, what is wrong and what is accepted."""

    @classmethod
    def at(cls, path: Path | str, line: int | None, problem: str) -> "WorkloadError":
        """An error in a file, `line` from 1 (None: the file as a whole)."""
        return cls(f"{path}:{line}: {problem}" if line is not None else f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One request.

    Attributes:
        id: unique in the workload.
        time: earliest arrival, in seconds from the start.
        session: what a client would send as its session key; equal for the turns of one conversation.
        prompt_tokens: 1 to `MOST_TOKENS`.
        output_tokens: the same.
        blocks: content ids (0 to 2**63 - 1) of the prompt's runs of `Workload.block_tokens` tokens, in order; the last
            run may be short. Two prompts that begin with the same ids begin with the same tokens. Whether an id says
            so for its own run only or, chained, for all before it too is left open: both hold.
        after: id of an earlier request of the workload; this one arrives `delay` seconds after that one ended, and not
            before `time`.
        delay: seconds, at least 0.
        stage: name of its class of work (``planner``, ``generator``), None where there are none.
        model: which model it asks for.
        output_blocks: where the answer's content is known (the next turn's prompt contains it): ids of the runs of
            prompt and answer together from run number ``prompt_tokens // block_tokens`` on, whole runs only. Else
            empty: the answer is like no other.
        tenant: whose it is, by name; empty where there are none.
    """

    id: str
    time: float
    session: str
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    after: str | None = None
    delay: float = 0.0
    stage: str | None = None
    model: str = "m"
    output_blocks: Sequence[int] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of `time`, ties in the order in which they were written down.

    Attributes:
        name: what it is called in reports.
        block_tokens: tokens per content id.
        requests: see `WorkRequest`; bounded by the loaders and generators, all in memory.
        seed: what its random parts came from.
        notes: plain sentences on what was assumed or left out, for reports.
    """

    name: str
    block_tokens: int
    requests: Sequence[WorkRequest]
    seed: int = 0
    notes: Sequence[str] = ()

    def first(self, count: int) -> "Workload":
        """The earliest `count` requests; one whose `after` is left out is not kept either."""
        kept: list[WorkRequest] = []
        ids: set[str] = set()
        for request in self.requests:
            if len(kept) == count:
                break
            if request.after is None or request.after in ids:
                kept.append(request)
                ids.add(request.id)
        return replace(self, requests=kept)

    def validate(self) -> None:
        """Check what the attributes promise, without walking the blocks.

        Raises:
            WorkloadError: naming the request.
        """
        if self.block_tokens < 1:
            raise WorkloadError(f"{self.name}: block_tokens is {self.block_tokens}, not a positive number")
        ids: set[str] = set()
        time = 0.0
        for request in self.requests:
            place = f"{self.name}: request {request.id}"
            if request.id in ids:
                raise WorkloadError(f"{place}: another one has the same id")
            ids.add(request.id)
            if not time <= request.time < float("inf"):
                raise WorkloadError(f"{place}: time {request.time} is before that of its predecessor, {time}")
            time = request.time
            if not (1 <= request.prompt_tokens <= MOST_TOKENS and 1 <= request.output_tokens <= MOST_TOKENS):
                raise WorkloadError(
                    f"{place}: {request.prompt_tokens} prompt and {request.output_tokens} output tokens"
                )
            expected = -(-request.prompt_tokens // self.block_tokens)
            if len(request.blocks) != expected:
                raise WorkloadError(
                    f"{place}: {len(request.blocks)} blocks for {request.prompt_tokens} tokens, "
                    f"{expected} of {self.block_tokens} tokens expected"
                )
            if request.after is not None and (request.after not in ids or request.after == request.id):
                raise WorkloadError(f"{place}: comes after {request.after}, which is no earlier request")
            if not 0 <= request.delay < float("inf"):
                raise WorkloadError(f"{place}: delay {request.delay} s")
