"""Everything that prefix-aware routing needs, for all fleets that want it: built from the configuration, started, reloaded, stopped."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gateway.fleet.fleet import policies_of
from gateway.prefix.feed import Feeds
from gateway.prefix.hot import HotPrefixes
from gateway.prefix.index import PrefixIndex
from gateway.prefix.lookup import Matcher
from gateway.prefix.truth import Truth
from gateway.prompt import hub
from gateway.prompt.blocks import Hasher
from gateway.prompt.chain_cache import ChainCache
from gateway.prompt.guard import GuardedPrompter, PromptMaker
from gateway.prompt.oracle import OraclePrompter
from gateway.prompt.parity import Parity
from gateway.prompt.passing import TokenPassing
from gateway.prompt.prompter import Prompter
from gateway.tasks import TaskGroup
from policies.base import Policy, knowledge_of

if TYPE_CHECKING:
    import aiohttp

    from gateway.config.schema import Config, Model
    from gateway.fleet.fleet import Fleet, Fleets
    from gateway.fleet.worker import Worker
    from gateway.prompt.parity_status import ParityStatus
    from gateway.prompt.tokenizer import PromptTokenizer


class Tokenizers:
    """Tokenizers by directory or Hugging Face id, each loaded once; loading takes about half a second."""

    def __init__(self) -> None:
        self._loaded: dict[str, PromptTokenizer] = {}

    def load(self, names: "set[str]") -> "dict[str, PromptTokenizer]":
        """Those of `names`; others are forgotten. Blocks: call it in a thread.

        Raises:
            TokenizerError: one can't be loaded; the message says which and why.
        """
        loaded = {name: self._loaded.get(name) or hub.load(name) for name in sorted(names)}
        self._loaded = loaded
        return loaded


class _Prompts:
    """How one fleet's prompts are made: by a tokenizer of our own or by asking its workers, and compared with them all the time."""

    def __init__(
        self,
        fleet: "Fleet",
        model: "Model",
        tokenizer: "PromptTokenizer | None",
        session: "aiohttp.ClientSession",
    ) -> None:
        self.workers: Sequence[Worker] = fleet.workers
        self.made_from = self.source(model)
        inner: PromptMaker
        if tokenizer is not None:
            inner = own = Prompter(tokenizer)
            self.parity = Parity(fleet.name, own, session)
        else:
            inner = OraclePrompter(lambda: self.workers, session, mode=model.oracle)
            self.parity = Parity(fleet.name, None, session)
        self.maker = GuardedPrompter(inner, self.parity)
        self.passing = TokenPassing(model.pass_token_ids, self.parity, session)

    @staticmethod
    def source(model: "Model") -> tuple[str | None, str, str]:
        """What of the configuration decides how prompts are made and sent."""
        return model.tokenizer, model.oracle, model.pass_token_ids

    async def stop(self) -> None:
        await self.passing.stop()
        await self.parity.stop()
        self.maker.close()


class Matching:
    """The matchers of all fleets whose policy reads matches, and what feeds them.

    Attributes:
        matchers: by fleet name; fleets whose policy does not care have none, and cost nothing.
        feeds: the workers' KV events; None as long as no fleet wants them.
        chains: the memory of chains.
        truth: predicted against actual cached tokens.
        hot: the prefixes that are asked for most.
    """

    def __init__(self, config: "Config", session: "aiohttp.ClientSession") -> None:
        """Nothing is loaded or opened before `prepare` and `start`. `session` as of `gateway.fleet.asking.open_session`."""
        self._session = session
        self._tokenizers = Tokenizers()
        self._budget = config.prefix.budget
        self._running = False
        self._prompts: dict[str, _Prompts] = {}
        self._tasks = TaskGroup("matching")
        self.matchers: Mapping[str, Matcher] = {}
        self.feeds: Feeds | None = None
        self.chains = ChainCache(Hasher(secrets.randbits(32)))
        self.truth = Truth()
        self.hot = HotPrefixes()

    def prepare(self, config: "Config", build_policy: Callable[[str], Policy]) -> "dict[str, PromptTokenizer]":
        """Load the tokenizers of the models whose policy reads matches. Blocks: call it in a thread.

        Raises:
            TokenizerError: one can't be loaded.
        """
        return self._tokenizers.load(
            {
                model.tokenizer
                for model in config.models
                if model.tokenizer and any(knowledge_of(build_policy(name)) != "none" for name in policies_of(model))
            }
        )

    def use(self, config: "Config", fleets: "Fleets", tokenizers: "Mapping[str, PromptTokenizer]") -> None:
        """Take over a configuration, with the tokenizers that `prepare` loaded for it."""
        models = {model.name: model for model in config.models}
        wanted = [fleet for fleet in fleets if fleet.knowledge != "none"]
        if wanted and self.feeds is None:
            index = PrefixIndex(self.chains.hasher, budget=self._budget)
            self.feeds = Feeds(index, fleets, self._session)
            if self._running:
                self.feeds.start()
        elif self.feeds is not None:
            self.feeds.update(fleets)
        before, self._prompts = self._prompts, {}
        matchers: dict[str, Matcher] = {}
        for fleet in wanted:
            assert self.feeds is not None
            model = models[fleet.name]
            prompts = before.get(fleet.name)
            if prompts is None or prompts.made_from != _Prompts.source(model):
                tokenizer = tokenizers[model.tokenizer] if model.tokenizer else None
                prompts = _Prompts(fleet, model, tokenizer, self._session)
                if self._running:
                    prompts.parity.start(fleet.workers)
            else:
                del before[fleet.name]
                prompts.workers = fleet.workers
                prompts.parity.update(fleet.workers)
                prompts.passing.keep(set(fleet.workers))
            self._prompts[fleet.name] = prompts
            matchers[fleet.name] = Matcher(
                fleet.name,
                prompts.maker,
                aliases=fleet.aliases,
                parity=prompts.parity,
                passing=prompts.passing,
                chains=self.chains,
                feeds=self.feeds,
                truth=self.truth,
                hot=self.hot,
            )
        self.truth.keep({worker.id for worker in fleets.workers()})
        for name, prompts in before.items():
            self._tasks.spawn(f"stop {name}", prompts.stop())
        self.matchers = matchers

    def start(self) -> None:
        """Begin to follow the workers' events and to compare tokens with them."""
        self._running = True
        if self.feeds is not None:
            self.feeds.start()
        for prompts in self._prompts.values():
            prompts.parity.start(prompts.workers)

    async def stop(self) -> None:
        """Let go of sockets and threads."""
        self._running = False
        if self.feeds is not None:
            await self.feeds.stop()
        for prompts in self._prompts.values():
            await prompts.stop()
        await self._tasks.cancel()

    def degraded(self, fleet: str) -> list[str]:
        """What works less well than it should in a fleet's matching, in sentences."""
        prompts = self._prompts.get(fleet)
        if prompts is None or self.feeds is None:
            return []
        return [*self.feeds.degraded(fleet), *prompts.parity.degraded()]

    def parity(self) -> "Iterable[tuple[str, ParityStatus]]":
        """How every worker's tokens agree with ours, each with its fleet's name."""
        return [(name, status) for name, prompts in self._prompts.items() for status in prompts.parity.snapshot()]
