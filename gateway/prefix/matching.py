"""Everything that prefix-aware routing needs, for all fleets that want it: built from the configuration, started, reloaded, stopped."""

import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gateway.prefix.feed import Feeds
from gateway.prefix.index import PrefixIndex
from gateway.prefix.lookup import Matcher
from gateway.prompt import hub
from gateway.prompt.blocks import Hasher
from gateway.prompt.chain_cache import ChainCache
from gateway.prompt.prompter import Prompter
from policies.base import Policy, knowledge_of

if TYPE_CHECKING:
    import aiohttp

    from gateway.config.schema import Config
    from gateway.fleet.fleet import Fleets
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


class Matching:
    """The matchers of all fleets whose policy reads matches, and what feeds them.

    Attributes:
        matchers: by fleet name; fleets whose policy does not care have none, and cost nothing.
        feeds: the workers' KV events; None as long as no fleet wants them.
        chains: the memory of chains.
    """

    def __init__(self, config: "Config", session: "aiohttp.ClientSession") -> None:
        """Nothing is loaded or opened before `prepare` and `start`. `session` as of `gateway.fleet.asking.open_session`."""
        self._session = session
        self._tokenizers = Tokenizers()
        self._budget = config.prefix.budget
        self._running = False
        self._prompters: dict[tuple[str, str | None], Prompter] = {}
        self.matchers: Mapping[str, Matcher] = {}
        self.feeds: Feeds | None = None
        self.chains = ChainCache(Hasher(secrets.randbits(32)))

    def prepare(self, config: "Config", build_policy: Callable[[str], Policy]) -> "dict[str, PromptTokenizer]":
        """Load the tokenizers of the models whose policy reads matches. Blocks: call it in a thread.

        Raises:
            TokenizerError: one can't be loaded.
        """
        return self._tokenizers.load(
            {
                model.tokenizer
                for model in config.models
                if model.tokenizer and knowledge_of(build_policy(model.policy)) != "none"
            }
        )

    def use(self, config: "Config", fleets: "Fleets", tokenizers: "Mapping[str, PromptTokenizer]") -> None:
        """Take over a configuration, with the tokenizers that `prepare` loaded for it."""
        models = {model.name: model for model in config.models}
        wanted = [fleet for fleet in fleets if knowledge_of(fleet.policy) != "none"]
        if wanted and self.feeds is None:
            index = PrefixIndex(self.chains.hasher, budget=self._budget)
            self.feeds = Feeds(index, fleets, self._session)
            if self._running:
                self.feeds.start()
        elif self.feeds is not None:
            self.feeds.update(fleets)
        prompters: dict[tuple[str, str | None], Prompter] = {}
        matchers: dict[str, Matcher] = {}
        for fleet in wanted:
            assert self.feeds is not None
            name = models[fleet.name].tokenizer
            key = fleet.name, name
            prompters[key] = self._prompters.get(key) or Prompter(tokenizers[name] if name else None)
            matchers[fleet.name] = Matcher(fleet.name, prompters[key], self.chains, self.feeds)
        for key, prompter in self._prompters.items():
            if key not in prompters:
                prompter.close()
        self._prompters = prompters
        self.matchers = matchers

    def start(self) -> None:
        """Begin to follow the workers' events."""
        self._running = True
        if self.feeds is not None:
            self.feeds.start()

    async def stop(self) -> None:
        """Let go of sockets and threads."""
        self._running = False
        if self.feeds is not None:
            await self.feeds.stop()
        for prompter in self._prompters.values():
            prompter.close()

    def degraded(self, fleet: str) -> list[str]:
        """What works less well than it should in a fleet's matching, in sentences."""
        matcher = self.matchers.get(fleet)
        if matcher is None or self.feeds is None:
            return []
        return self.feeds.degraded(fleet)
