"""What is known of a request's prompt at the moment of its decision: its tokens, and which workers hold how much of it.

A `Matcher` per fleet ties together the parts that are each about one thing: the `PromptMaker` (body to tokens), the `ChainCache` (tokens to hashes) and
the `Feeds` (hashes to holders).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.prompt.blocks import Chain, worker_salt
from gateway.prompt.prompt import How, Prompt
from policies.base import NO_MATCH, Candidate, Match

if TYPE_CHECKING:
    from gateway.fleet.worker import Worker
    from gateway.http.usage import Usage
    from gateway.prefix.feed import Feeds
    from gateway.prefix.hot import HotPrefixes
    from gateway.prefix.index import Watcher
    from gateway.prefix.map import Expectation
    from gateway.prefix.truth import Truth
    from gateway.prompt.chain_cache import ChainCache
    from gateway.prompt.guard import PromptMaker
    from gateway.prompt.parity import Parity
    from gateway.prompt.passing import TokenPassing


MAX_MADE: Final = 16_384
"""Candidates that a matcher keeps: about 2 MB."""


class Lookup(msgspec.Struct, frozen=True, gc=False):
    """One prompt, looked up.

    Attributes:
        fleet: whose workers may take it.
        prompt: its tokens and how they are known.
        chains: its block hashes by block size; empty when nothing can match.
        matches: what each worker holds of it, by worker id; those that hold nothing are left out.
        made: candidates that were made for the same matches before.
    """

    fleet: str
    prompt: Prompt
    chains: Mapping[int, Chain]
    matches: Mapping[str, Match]
    made: "_Made" = msgspec.field(default_factory=dict)

    def candidates(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The fleet's persistent candidates, with others in place of those whose worker holds a part of the prompt."""
        matches = self.matches
        if not matches:
            return candidates
        known = self.made.get(id(matches))
        if known is not None and known[1] is candidates:
            return known[2]
        made = tuple(
            [
                candidate if (match := matches.get(candidate.worker.id)) is None else Candidate(candidate.worker, match)
                for candidate in candidates
            ]
        )
        if len(self.made) * len(made) >= MAX_MADE:
            self.made.clear()
        # The entry holds on to the matches: as long as it is there, nothing else can have their id.
        self.made[id(matches)] = matches, candidates, made
        return made


_Made = dict[int, tuple[Mapping[str, Match], Sequence[Candidate], Sequence[Candidate]]]


class Matcher:
    """Looks up the prompts of one fleet.

    Attributes:
        prompter: makes the tokens.
        parity: says whether they are the workers'.
    """

    __slots__ = (
        "_chains",
        "_feeds",
        "_hot",
        "_made",
        "_model",
        "_names",
        "_passing",
        "_root_plain",
        "_truth",
        "parity",
        "prompter",
    )

    def __init__(
        self,
        model: str,
        prompter: "PromptMaker",
        *,
        aliases: Sequence[str] = (),
        parity: "Parity",
        passing: "TokenPassing",
        chains: "ChainCache",
        feeds: "Feeds",
        truth: "Truth",
        hot: "HotPrefixes",
    ) -> None:
        """`model` is the namespace: the fleet's name, as its workers' events are filed under.

        A request for a name that is neither this nor one of `aliases` is for a LoRA adapter, whose blocks are its own.
        """
        self._model = model
        self._names = frozenset((model, *aliases))
        self.prompter = prompter
        self.parity = parity
        self._chains = chains
        self._feeds = feeds
        self._passing = passing
        self._truth = truth
        self._hot = hot
        self._made: _Made = {}
        self._root_plain = chains.hasher.root(model)

    def now(self, path: str, body: Mapping[str, Any], size: int) -> Lookup | None:
        """The lookup, if it can be had without waiting; see `Prompter.now`."""
        prompt = self.prompter.now(path, body, size)
        return None if prompt is None else self._look_up(prompt, body)

    async def lookup(self, path: str, body: Mapping[str, Any], size: int) -> Lookup:
        """The lookup, waiting for a thread if need be."""
        return self._look_up(await self.prompter.prompt(path, body, size), body)

    def sent(self, worker_id: str, lookup: Lookup, now: float) -> "Expectation | None":
        """The prompt goes to this worker: until its events say so themselves, believe that it will hold it.

        Returns:
            What to settle when its answer begins (`Lease.expectation`).
        """
        if not lookup.chains:
            return None
        held = lookup.matches.get(worker_id, NO_MATCH)
        self._hot.saw(self._model, lookup.chains, held, now)
        return self._feeds.sent(worker_id, lookup.chains, held, by_bytes=lookup.prompt.how is not How.EXACT)

    def ids(self, worker: "Worker", path: str, lookup: Lookup, body: Mapping[str, Any]) -> bytes | None:
        """The prompt's ids as JSON if they are to go along with the request, else None."""
        return self._passing.ids(worker, path, lookup.prompt, body)

    def answered(self, worker: "Worker", lookup: Lookup, match: Match, usage: "Usage", now: float) -> None:
        """The worker has said what the request cost it: compare with what was predicted, and with our count of tokens."""
        prompt = lookup.prompt
        if prompt.how is not How.EXACT:
            return
        expected = prompt.token_count + sum(other.token_count for other in prompt.also)
        self.parity.observed(worker.id, expected, usage.prompt_tokens)
        if usage.cached_tokens is None or prompt.also:
            return
        block_size = max(lookup.chains, default=1)
        if (
            match.l2
            and usage.cached_tokens + block_size < match.tokens
            and (watcher := self._feeds.index.watchers.get(self._model)) is not None
        ):
            watcher.missing(lookup.chains, usage.cached_tokens)
        score = self._truth.of(worker.id)
        judge = worker.driver.credits_blocks
        if score.compare(match, usage.cached_tokens, prompt.token_count, block_size, now, judge=judge):
            self._feeds.resync(worker.id)

    def _look_up(self, prompt: Prompt, body: Mapping[str, Any]) -> Lookup:
        sizes = self._feeds.block_sizes
        if prompt.how is How.NONE or not sizes:
            return Lookup(self._model, prompt, {}, {})
        chains = self._chains.chains(prompt, self._root(body, prompt.how), sizes)
        if (watcher := self._feeds.index.watchers.get(self._model)) is not None:
            self._tell(watcher, prompt, chains, body)
        return Lookup(self._model, prompt, chains, self._feeds.match(chains), self._made)

    def _tell(self, watcher: "Watcher", prompt: Prompt, chains: Mapping[int, Chain], body: Mapping[str, Any]) -> None:
        """Slower memory can be asked about a prompt as soon as that is known, if its tokens are and it is for no adapter."""
        asked, cache_salt = body.get("model"), body.get("cache_salt")
        if prompt.how is How.EXACT and (not isinstance(asked, str) or asked in self._names):
            watcher.saw(prompt, chains, worker_salt(None, cache_salt) if isinstance(cache_salt, str) else None)

    def _root(self, body: Mapping[str, Any], how: How) -> int:
        """The namespace of this request's blocks.

        Pseudo-tokens have one of their own: they must not meet real ids by chance.
        """
        cache_salt, asked = body.get("cache_salt"), body.get("model")
        salt = worker_salt(None, cache_salt) if isinstance(cache_salt, str) else None
        lora = asked if isinstance(asked, str) and asked not in self._names else None
        if how is How.EXACT and salt is None and lora is None:
            return self._root_plain
        model = self._model if how is How.EXACT else f"{self._model}\0bytes"
        return self._chains.hasher.root(model, lora, salt)
