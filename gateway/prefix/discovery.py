"""Asks a worker where its KV events come from and how large its cache is, and joins that with what is configured."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from backends.kv_events import CacheFacts, EventSource, facts, merged
from gateway.config.schema import Capabilities, EventSocket
from gateway.fleet.asking import Answer, ask
from gateway.fleet.capabilities import learn

if TYPE_CHECKING:
    import aiohttp

    from gateway.config.schema import Worker as WorkerSection
    from gateway.fleet.worker import Worker

SECONDS = 2.0
"""For each question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is known about how a worker can be followed.

    Attributes:
        sources: where its events come from; empty when it sends none.
        facts: about its cache.
        reason: why there are no sources, in words.
        complete: False when some of it is to be asked again, because the worker did not answer.
    """

    sources: tuple[EventSource, ...] = ()
    facts: CacheFacts = field(default_factory=CacheFacts)
    reason: str = ""
    complete: bool = True


async def discover(session: "aiohttp.ClientSession", worker: "Worker", section: "WorkerSection") -> Found | str:
    """One round of questions. Never raises but for cancellation.

    Args:
        session: see `gateway.fleet.asking.ask`.
        worker: whom to ask.
        section: what is configured about it.

    Returns:
        What was found; or, when the worker is away and nothing can be said, why, in words.
    """
    driver = worker.driver
    answers: dict[str, Answer] = {}

    async def answered(path: str) -> Answer:
        if path not in answers:
            answers[path] = await ask(session, worker, path, SECONDS)
        return answers[path]

    sources: tuple[EventSource, ...] = ()
    reason = ""
    if isinstance(section.kv_events, EventSocket):
        sources = (configured_source(section.kv_events),)
    elif section.kv_events == "off":
        reason = "switched off by kv_events: off"
    elif driver.sources_path is None:
        reason = f"the driver {driver.name} knows none"
    else:
        answer = await answered(driver.sources_path)
        if _away(answer):
            return answer.error or f"GET {driver.sources_path} answered {answer.status}"
        sources = _sources(worker, answer) if answer.status == 200 else ()
        if not sources:
            said = "names no socket" if answer.status == 200 else f"answered {answer.status}"
            reason = f"GET {driver.sources_path} {said}"
    known = configured_facts(section.capabilities)
    complete = True
    if driver.facts_path is not None:
        answer = await answered(driver.facts_path)
        if answer.status == 200:
            known = merged(known, driver.parse_facts(answer.body))
            learn(worker, driver.facts_path, answer.body, asyncio.get_running_loop().time())
        elif _away(answer) and not sources:
            return answer.error or f"GET {driver.facts_path} answered {answer.status}"
        complete = not _away(answer)
    if known.block_size is None and sources and sources[0].block_size is not None:
        known = merged(known, facts("the event source", block_size=sources[0].block_size))
    return Found(sources=sources, facts=_with_blocks(known, section.capabilities), reason=reason, complete=complete)


def configured_source(socket: EventSocket) -> EventSource:
    """The source that the configuration names."""
    return EventSource(endpoint=socket.endpoint, replay_endpoint=socket.replay_endpoint, topic=socket.topic or "")


def configured_facts(capabilities: Capabilities) -> CacheFacts:
    """What the configuration says about the cache."""
    return facts("configured", block_size=capabilities.block_size, prefix_caching=capabilities.prefix_caching)


def _with_blocks(known: CacheFacts, capabilities: Capabilities) -> CacheFacts:
    """The configured capacity, once it is known how many tokens a block has."""
    if capabilities.kv_capacity_tokens is None or known.block_size is None:
        return known
    return merged(facts("configured", blocks=max(1, capabilities.kv_capacity_tokens // known.block_size)), known)


def _away(answer: Answer) -> bool:
    """Whether the worker does not serve (yet)."""
    return answer.error is not None or answer.status >= 500


def _sources(worker: "Worker", answer: Answer) -> tuple[EventSource, ...]:
    try:
        payload = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return ()
    return tuple(worker.driver.parse_sources(payload, worker.host))
