"""Recorded Claude Code sessions (Weka's kv-cache-tester): who asked what when, as ids of blocks of 64 tokens.

The original is one JSON document per session, in a file ``trace_NNNN.json`` of its own; a request's `hash_ids` name the
whole blocks of its prompt. Two shapes are read: the original (a file, or a folder of them), and JSON lines with one
session each whose requests may have `hash_ranges` ``[[first, last], ...]`` instead, a run-length coding without loss.
Source: github.com/callanjfox/kv-cache-tester, docs/trace_replay_tester.md, which also defines `think_time` and sub-agents.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from simulator.workloads.formats.reading import lines
from simulator.workloads.runs import Ids, Runs
from simulator.workloads.workload import Workload, WorkloadError, WorkRequest

_ACCEPTED = (
    '{"id", "block_size", "hash_id_scope", "requests": [{"t": seconds, "in": tokens, "out": tokens, "hash_ids": [ids] '
    'or "hash_ranges": [[first, last], ...], "think_time": seconds}, or {"type": "subagent", "t", "requests"}]}'
)
_SCOPE = 1 << 32
"""Ids are local to a session: each session has a number, and this many ids."""
_TAILS = 1 << 62
"""Ends of prompts that fill no block have no id in the file; they get new ones from here on."""


class _Turn(msgspec.Struct, kw_only=True):
    t: float
    type: str = "n"
    prompt: int = msgspec.field(name="in", default=0)
    output: int = msgspec.field(name="out", default=0)
    hash_ids: list[int] | None = None
    hash_ranges: list[tuple[int, int]] | None = None
    think_time: float | None = None
    api_time: float | None = None
    agent_id: str = ""
    duration_ms: float | None = None
    requests: "list[_Turn] | None" = None


class _Session(msgspec.Struct, kw_only=True):
    id: str
    requests: list[_Turn]
    block_size: int = 64
    hash_id_scope: Literal["local", "global"] = "local"


_DECODER = msgspec.json.Decoder(_Session)


def weka(
    path: Path,
    *,
    seed: int = 0,
    sessions: int = 120,
    spread: float = 1800.0,
    begin: float = 600.0,
    end: float = 2400.0,
    max_prompt_tokens: int = 180_000,
    loop: Literal["recorded", "open", "closed"] = "recorded",
    sample: bool = True,
) -> Workload:
    """Read Claude Code sessions and let them overlap. The defaults are a half-hour slice of 120 sessions.

    Args:
        path: a file of either shape, plain or gzip, or a folder with ``*.json`` and ``*.json.gz``.
        seed: of the sessions' starts, and of their choice.
        sessions: how many at most; 0: all.
        spread: sessions start by chance in so many seconds.
        begin: only requests recorded from this second of the replay on are kept (so that sessions are under way).
        end: and before this one; 0: to the last.
        max_prompt_tokens: longer prompts are left out; 0: none.
        loop: ``open``: requests arrive when they were recorded. ``closed``: a request comes `think_time` after the
            session's previous one ended. ``recorded``: closed where the file has a `think_time`, else open.
        sample: choose the sessions by chance instead of taking the first ones.

    Raises:
        WorkloadError: with the file and the line.
    """
    if loop not in {"recorded", "open", "closed"}:
        raise WorkloadError(f"loop is {loop!r}; recorded, open and closed are accepted")
    random = Random(seed)
    files = _files(path)
    kept: set[int] | None = None
    if sample and sessions:
        count = sum(1 for file in files for _ in lines(file))
        kept = set(random.sample(range(count), min(sessions, count)))
    reader = _Reader(begin, end or float("inf"), max_prompt_tokens or (1 << 62), loop)
    taken = 0
    for index, (file, number, session) in enumerate(_sessions(files, kept)):
        if sessions and taken == sessions:
            break
        taken += 1
        reader.session(file, number, index, session, random.random() * spread)
    return Workload(
        name=path.name.split(".")[0],
        block_tokens=reader.block_size or 64,
        requests=sorted(reader.requests, key=lambda request: request.time),
        seed=seed,
        notes=[f"{taken} sessions, of which {reader.too_long} requests have too long prompts and are left out."],
    )


@dataclass(frozen=True, slots=True)
class _Previous:
    """What a turn waits for: a request that was kept, its arrival in the replay, and when it had ended as recorded."""

    id: str
    time: float
    ended: float


class _Reader:
    """Turns sessions into requests, one after another."""

    def __init__(self, begin: float, end: float, longest: int, loop: str) -> None:
        self.requests: list[WorkRequest] = []
        self.block_size = 0
        self.too_long = 0
        self._begin = begin
        self._end = end
        self._longest = longest
        self._loop = loop
        self._tails = Ids(_TAILS)

    def session(self, file: Path, number: int, index: int, session: _Session, start: float) -> None:
        """Add one session that starts at `start` seconds of the replay."""
        if session.block_size < 1:
            raise WorkloadError.at(file, number, f"block_size {session.block_size}; a positive number is accepted")
        if self.block_size not in {0, session.block_size}:
            raise WorkloadError.at(
                file, number, f"block_size {session.block_size} after {self.block_size}; one for all is accepted"
            )
        self.block_size = session.block_size
        base = 0 if session.hash_id_scope == "global" else (index + 1) * _SCOPE
        try:
            self._turns(session.id, session.requests, base, start, None)
        except (WorkloadError, RecursionError) as error:
            raise WorkloadError.at(file, number, f"session {session.id}: {error}") from error

    def _turns(
        self, name: str, turns: Sequence[_Turn], base: int, start: float, parent: _Previous | None
    ) -> _Previous | None:
        """Add the turns of one conversation, which began at `start`; returns its last kept one.

        Sub-agents run beside each other, and the conversation goes on when the last of them is done. Their `t` is when
        they were done (`t` less `duration_ms` is the end of the turn that started them, for all 63 in the public set).
        """
        previous = parent
        joined: _Previous | None = None
        for position, turn in enumerate(turns):
            time = start + turn.t
            if turn.requests is not None:
                agent = f"{name}/{turn.agent_id or position}"
                last = self._turns(
                    agent, turn.requests, base, max(time - (turn.duration_ms or 0.0) / 1000, start), previous
                )
                if last is not None and last is not previous and (joined is None or joined.ended <= time):
                    joined = replace(last, ended=time)
                continue
            blocks = self._blocks(turn, position, base)
            if turn.prompt > self._longest:
                self.too_long += 1
                continue
            if not self._begin <= time < self._end:
                continue
            waits_for, delay = self._wait(turn, time, previous, joined)
            request = WorkRequest(
                id=f"{name}#{position}",
                # In a closed loop only the wait counts, however slow the service was that was recorded.
                time=waits_for.time if waits_for else time - self._begin,
                session=name,
                prompt_tokens=turn.prompt,
                output_tokens=max(turn.output, 1),
                blocks=blocks,
                after=waits_for.id if waits_for else None,
                delay=delay,
            )
            self.requests.append(request)
            previous, joined = _Previous(request.id, request.time, time + (turn.api_time or 0.0)), None
        return joined or previous

    def _wait(
        self, turn: _Turn, time: float, previous: _Previous | None, joined: _Previous | None
    ) -> tuple[_Previous | None, float]:
        """What the turn waits for, and how many seconds it comes after that."""
        if self._loop == "open" or (self._loop == "recorded" and turn.think_time is None):
            return None, 0.0
        if joined is not None:
            return joined, max(time - joined.ended, 0.0)
        if previous is None:
            return None, 0.0
        if turn.think_time:
            return previous, max(turn.think_time, 0.0)
        return previous, max(time - previous.ended, 0.0)

    def _blocks(self, turn: _Turn, position: int, base: int) -> Runs:
        place = f"request {position}"
        if turn.prompt < 1 or not turn.t >= 0:
            raise WorkloadError(
                f"{place}: t {turn.t} and in {turn.prompt}; seconds from 0 and tokens from 1 are accepted"
            )
        limits = turn.hash_ranges
        if limits is None:
            if turn.hash_ids is None:
                raise WorkloadError(f"{place}: neither hash_ids nor hash_ranges")
            limits = [(identity, identity) for identity in turn.hash_ids]
        most = (_SCOPE if base else _TAILS) - 1
        if any(not 0 <= first <= last <= most for first, last in limits):
            raise WorkloadError(f"{place}: a hash id is not between 0 and {most}, or a range ends before it begins")
        ranges = [range(base + first, base + last + 1) for first, last in limits]
        whole = turn.prompt // self.block_size
        blocks = Runs(ranges)
        rest = -(-turn.prompt // self.block_size) - len(blocks)
        if rest not in {0, 1} or len(blocks) < whole:
            raise WorkloadError(
                f"{place}: {len(blocks)} blocks of {self.block_size} tokens for a prompt of {turn.prompt}"
            )
        return Runs([*blocks.ranges, self._tails.fresh(1)]) if rest else blocks


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted([*path.glob("*.json"), *path.glob("*.json.gz")])
    if not files:
        raise WorkloadError.at(path, None, "the folder has no *.json and no *.json.gz")
    return files


def _sessions(files: Sequence[Path], kept: set[int] | None) -> Iterator[tuple[Path, int, _Session]]:
    """Sessions in order; with `kept` those with these numbers (the others are not even parsed)."""
    index = -1
    for file in files:
        for number, line in _documents(file):
            index += 1
            if kept is not None and index not in kept:
                continue
            try:
                yield file, number, _DECODER.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise WorkloadError.at(file, number, f"{error}. A session is {_ACCEPTED}") from error


def _documents(file: Path) -> Iterator[tuple[int, bytes]]:
    """One document a line or, if the first line is not one, the file as a whole (an indented original)."""
    read = lines(file)
    first = next(read, None)
    if first is None:
        return
    if not first[1].endswith(b"}"):
        yield first[0], b"\n".join([first[1], *(line for _, line in read)])
        return
    yield first
    yield from read
