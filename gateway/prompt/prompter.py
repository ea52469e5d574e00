"""The part that makes prompts: one `Prompter` per model, on the event loop, with threads for what is big and new.

A request costs the loop what is new in it. Small requests are rendered and encoded in place; conversations that were
seen before are rendered and looked up in place; big new texts are encoded in a few threads, during which `tokenizers`
holds no lock. What is too big, or too slow to be there before the deadline, is matched by its bytes instead.

Nothing that a client sends makes it raise: what it does not understand it calls approximate, and the worker judges.
"""

import asyncio
import functools
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import structlog

from gateway.prompt.approximate import pseudo_tokens
from gateway.prompt.chat import JsonMemory, RendererOptions, UnrenderableError
from gateway.prompt.prompt import How, Prompt, approximate, exact
from gateway.prompt.rendering import PATHS, Renderer, Request, Source, Text, truncated
from gateway.prompt.segments import Segment, SegmentCache, joined
from gateway.prompt.template import TemplateError
from gateway.prompt.tokenizer import PromptTokenizer

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_EXACT: Final = ("exact", "")
"""The key of nearly all prompts in `Prompter.counts`; asking an enum for its value takes as long as a look-up."""

_BATCH: Final = 64
"""Small pieces that are encoded in one visit to a thread."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What one request may cost. Texts are measured in characters, which is what is known before they are encoded.

    Attributes:
        cache: bytes of all cached texts, ids and their JSON together.
        inline_body: a body of more bytes is rendered in a thread.
        inline_items: so is one with more messages, parts, calls and tools together (3 us each to render with Qwen3's template).
        inline_new: more new text than this is encoded in a thread (the worst text takes 0.4 us a byte).
        text: a single piece of more bytes than this is not encoded at all: its ids become a list under the lock, which
            takes up to 20 ns a byte.
        body: neither is a body of more bytes than this.
        pending: nor anything big, while this much is being encoded.
        deadline: seconds that a request waits for its tokens.
        approximate: bytes of a request that count when it is matched by its bytes.
        threads: how many encode at a time.
    """

    cache: int = 128 * 1024 * 1024
    inline_body: int = 1024 * 1024
    inline_items: int = 1024
    inline_new: int = 8 * 1024
    text: int = 2 * 1024 * 1024
    body: int = 8 * 1024 * 1024
    pending: int = 16 * 1024 * 1024
    deadline: float = 2.0
    approximate: int = 4 * 1024 * 1024
    threads: int = 2


class _Lookup(msgspec.Struct, frozen=True):
    """What the cache knows of a request.

    Attributes:
        sources: its texts and ids.
        found: for each text the segments of its pieces, None where it is not known; for ids a segment of them.
        missing: the distinct pieces that are not known.
        size: the characters of those.
    """

    sources: Sequence[Source]
    found: Sequence[list[Segment | None]]
    missing: Sequence[str]
    size: int


class Prompter:
    """Bodies to prompts, for one model. All methods are called on one event loop.

    Attributes:
        counts: prompts so far by how they are known and why not better, such as ``("approximate", "deadline")``.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer | None,
        *,
        limits: PromptLimits | None = None,
        options: RendererOptions | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`tokenizer` None: every prompt is approximate, except token ids that the client sends."""
        self._tokenizer = tokenizer
        self._limits = limits or PromptLimits()
        self._renderer = Renderer(tokenizer, options or RendererOptions())
        self._clock = clock
        self._memory = JsonMemory()
        self._cache = SegmentCache(self._limits.cache)
        self._threads: ThreadPoolExecutor | None = None
        self._flying: dict[str, asyncio.Future[Segment]] = {}
        self._pending = 0
        self._complained = False
        self._closed = False
        self._prefix = Segment(tokenizer.prefix if tokenizer else array("I"))
        self._suffix = Segment(tokenizer.suffix if tokenizer else array("I"))
        self.counts: Counter[tuple[str, str]] = Counter()

    def now(self, path: str, body: Any, size: int = 0) -> Prompt | None:
        """The prompt, if it can be had without waiting: small, seen before, or not to be known at all.

        Args:
            path: the request's path, without a query.
            body: its parsed JSON, which is not changed.
            size: how many bytes it was parsed from.

        Returns:
            None if a thread is needed; then `prompt` must be awaited.
        """
        start = self._clock()
        try:
            done = self._attempt(path, body, size, start)
        except Exception as error:  # noqa: BLE001  # whatever a client sends, its request goes on
            return self._worse(path, body, error, start)
        return self._counted(done) if isinstance(done, Prompt) else None

    async def prompt(self, path: str, body: Any, size: int = 0) -> Prompt:
        """The prompt, waiting for a thread if need be. The arguments are those of `now`."""
        start = self._clock()
        try:
            done = self._attempt(path, body, size, start)
            if isinstance(done, Prompt):
                return self._counted(done)
            async with asyncio.timeout(self._limits.deadline):
                lookup = done if isinstance(done, _Lookup) else await self._render_in_thread(done)
                made = await self._encode(lookup.missing)
            return self._counted(self._assemble(lookup, made, start, off_loop=True))
        except Exception as error:  # noqa: BLE001  # whatever a client sends, its request goes on
            return self._worse(path, body, error, start)

    def texts(self, path: str, body: Mapping[str, Any]) -> list[str]:
        """The texts that the worker encodes for this body: one, or one for each prompt of a completion.

        Raises:
            UnrenderableError: they cannot be known; also for prompts that are token ids.
            TemplateError: the template refuses the messages.
        """
        request = self._renderer.read(path, body, self._memory)
        texts: list[str] = []
        for source in self._renderer.sources(request, self._memory, max_items=None) or ():
            if not isinstance(source, Text):
                raise UnrenderableError("prompt: token ids have no text")
            texts.append("".join(source.pieces))
        return texts

    @property
    def stats(self) -> dict[str, int]:
        """The cache's counters, those of `Shapes`, and how many characters are being encoded."""
        shapes = self._renderer.shapes
        return {
            **self._cache.stats,
            "pending": self._pending,
            "shape_hits": shapes.hits if shapes else 0,
            "shape_checks": shapes.checks if shapes else 0,
            "shape_differences": shapes.differences if shapes else 0,
        }

    def close(self) -> None:
        """End the threads once they have done what they are at; requests that wait become approximate."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _attempt(self, path: str, body: Any, size: int, start: float) -> Prompt | _Lookup | Request:
        """As far as it goes on the loop: the prompt, or what is missing of it, or the request that has to be rendered."""
        if path not in PATHS or not isinstance(body, dict):
            return Prompt(How.NONE, reason="no prompt")
        if size > self._limits.body:
            raise UnrenderableError("too big")
        request = self._renderer.read(path, body, self._memory)
        if size > self._limits.inline_body:
            return request
        sources = self._renderer.sources(request, self._memory, max_items=self._limits.inline_items)
        if sources is None:
            return request
        if len(sources) == 1:
            prompt = self._at_once(sources[0], start)
            if prompt is not None:
                return prompt
        lookup = self._look_up(sources)
        if lookup.size > self._limits.inline_new:
            return lookup
        missing = lookup.missing
        made = self._keep(missing, self._encode_all(missing)) if missing else {}
        return self._assemble(lookup, made, start)

    def _at_once(self, source: Source, start: float) -> Prompt | None:
        """The prompt of one text with little that is new, as most are; None for all else. Does what the steps of `_look_up` and `_assemble` do."""
        if type(source) is not Text or source.special or source.truncate is not None:
            return None
        pieces = source.pieces
        segments = self._cache.find(pieces)
        new = 0
        if None in segments:
            missing = [at for at, segment in enumerate(segments) if segment is None]
            if sum([len(pieces[at]) for at in missing]) > self._limits.inline_new:
                return None
            assert self._tokenizer is not None
            for at in missing:
                ids = self._tokenizer.encode(pieces[at])
                new += len(ids)
                segments[at] = self._cache.put(pieces[at], ids)
        known: tuple[Segment, ...] = tuple(segments)  # type: ignore[arg-type]  # none is None any more
        count = sum([len(segment.ids) for segment in known])
        return Prompt(How.EXACT, known, count, "", new, self._clock() - start)

    async def _render_in_thread(self, request: Request) -> _Lookup:
        """Render what is too big for the loop; the interpreter's lock goes round every 5 ms."""
        # The memory of parsed JSON belongs to the loop: a thread gets one of its own.
        sources = await self._in_thread(lambda: self._renderer.sources(request, JsonMemory(), max_items=None))
        return self._look_up(sources or ())

    def _look_up(self, sources: Sequence[Source]) -> _Lookup:
        """What the cache knows of these texts.

        Raises:
            UnrenderableError: a piece is too long to be encoded.
        """
        missing: dict[str, None] = {}
        found: list[list[Segment | None]] = []
        for source in sources:
            if type(source) is Text:
                known = self._cache.find(source.pieces)
                if None in known:
                    missing |= {
                        piece: None for piece, segment in zip(source.pieces, known, strict=True) if segment is None
                    }
                found.append(known)
            else:
                found.append([Segment(source)])  # type: ignore[arg-type]  # the type of a union's other member
        size = 0
        for piece in missing:
            size += len(piece)
            if len(piece) * 4 > self._limits.text and _utf8_size(piece) > self._limits.text:
                raise UnrenderableError("too big")
        return _Lookup(sources, found, list(missing), size)

    async def _encode(self, missing: Sequence[str]) -> dict[str, Segment]:
        """Encode pieces in threads, each big one once however many requests wait for it.

        Raises:
            UnrenderableError: too much is being encoded already.
        """
        big = {
            piece: self._flying.get(piece) or self._launch(piece)
            for piece in missing
            if len(piece) > self._limits.inline_new
        }
        small = [piece for piece in missing if piece not in big]
        made: dict[str, Segment] = {}
        if sum(map(len, small)) <= self._limits.inline_new:
            made = self._keep(small, self._encode_all(small))
            small = []
        for start in range(0, len(small), _BATCH):
            batch = small[start : start + _BATCH]
            made |= self._keep(batch, await self._in_thread(functools.partial(self._encode_all, batch)))
        for piece, future in big.items():
            # Shielded: others wait for the same piece, and the cache keeps it in any case.
            made[piece] = await asyncio.shield(future)
        return made

    def _launch(self, piece: str) -> "asyncio.Future[Segment]":
        if self._pending and self._pending + len(piece) > self._limits.pending:
            raise UnrenderableError("busy")
        assert self._tokenizer is not None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Segment] = loop.create_future()
        job = loop.run_in_executor(self._executor(), self._tokenizer.encode, piece)
        self._flying[piece] = done
        self._pending += len(piece)

        def finish(job: "asyncio.Future[array[int]]") -> None:
            self._pending -= len(piece)
            del self._flying[piece]
            error = UnrenderableError("closed") if job.cancelled() else job.exception()
            if error is None:
                done.set_result(self._cache.put(piece, job.result()))
            else:
                done.set_exception(error)
                done.exception()  # looked at: nobody may be waiting any more

        job.add_done_callback(finish)
        return done

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Do `work` in a thread.

        Raises:
            UnrenderableError: the prompter was closed before it began.
        """
        job = asyncio.get_running_loop().run_in_executor(self._executor(), work)
        await asyncio.wait([job])
        if job.cancelled():
            raise UnrenderableError("closed")
        return job.result()

    def _encode_all(self, pieces: Sequence[str]) -> "list[array[int]]":
        if not pieces:
            return []
        assert self._tokenizer is not None
        return [self._tokenizer.encode(piece) for piece in pieces]

    def _keep(self, pieces: Sequence[str], ids: "Sequence[array[int]]") -> dict[str, Segment]:
        return {piece: self._cache.put(piece, found) for piece, found in zip(pieces, ids, strict=True)}

    def _executor(self) -> ThreadPoolExecutor:
        if self._closed:
            raise UnrenderableError("closed")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="tokenize")
        return self._threads

    def _assemble(
        self, lookup: _Lookup, made: Mapping[str, Segment], start: float, *, off_loop: bool = False
    ) -> Prompt:
        runs = [self._run(source, known, made) for source, known in zip(lookup.sources, lookup.found, strict=True)]
        new = sum([len(segment.ids) for segment in made.values()])
        also = tuple([exact(run) for run in runs[1:]]) if len(runs) > 1 else ()
        return exact(runs[0], new_tokens=new, seconds=self._clock() - start, off_loop=off_loop, also=also)

    def _run(self, source: Source, known: list[Segment | None], made: Mapping[str, Segment]) -> list[Segment]:
        """A text's segments, those that were not known from `made`, with special tokens around them, and truncated."""
        if not isinstance(source, Text):
            return [segment for segment in known if segment is not None]
        segments = [
            made[piece] if segment is None else segment for piece, segment in zip(source.pieces, known, strict=True)
        ]
        surrounded = source.special and (len(self._prefix) or len(self._suffix))
        if surrounded:
            segments = [segment for segment in (self._prefix, *segments, self._suffix) if len(segment)]
        if source.truncate is None or sum(map(len, segments)) <= source.truncate:
            return segments
        if surrounded:
            raise UnrenderableError("truncate_prompt_tokens: with special tokens")
        return [Segment(truncated(joined(segments), source.truncate, left=source.truncate_left))]

    def _worse(self, path: str, body: dict[str, Any], error: Exception, start: float) -> Prompt:
        """What is left when the tokens cannot be had."""
        if isinstance(error, UnrenderableError):
            reason = error.reason
        elif isinstance(error, TemplateError):
            reason = "template"
        elif isinstance(error, TimeoutError):
            reason = "deadline"
        else:
            reason = "failed"
            if not self._complained:
                self._complained = True
                _log.error("a prompt could not be made; further failures are only counted", path=path, exc_info=error)
        tokens = pseudo_tokens(body, self._limits.approximate)
        return self._counted(approximate(tokens, reason, self._clock() - start))

    def _counted(self, prompt: Prompt) -> Prompt:
        self.counts[_EXACT if prompt.how is How.EXACT else (prompt.how.value, prompt.reason)] += 1
        return prompt


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
