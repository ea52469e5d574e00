"""`client-words`: what clients ask for themselves is passed on to the worker.

=========================================  =======================================================================================
a `cache_control` breakpoint with a TTL    the prompt up to there is retained for so long, above what is only expected to return
`prompt_cache_retention: 24h`              the whole prompt is retained, and once it was answered pinned in the storage behind
`prompt_cache_key`                         what prompts of different conversations with that key begin with is retained
=========================================  =======================================================================================

Pins are bounded by the budget and are renewed as the conversation grows; `session-end` takes them back.
"""

from typing import TYPE_CHECKING, Final

from backends.hints.model import Action
from gateway.residency.common import Commons
from gateway.residency.rules.base import Asked, Context, Rule

if TYPE_CHECKING:
    from backends.hints.model import Hint
    from gateway.config.residency import ClientWordsRule as Numbers
    from policies.base import Match, WorkerView

KEYS: Final = 1_024
KEY_TTL: Final = 600.0
"""Seconds for which what a `prompt_cache_key` stands for is kept after each use: what OpenAI keeps a prefix in memory for, at least."""
GROWN: Final = 1.25
"""A pin is renewed when the prompt has grown by a quarter."""


class ClientWordsRule(Rule):
    """See the module."""

    name = "client-words"
    needs = "words"

    def __init__(self, context: Context, numbers: "Numbers") -> None:
        """`numbers`: as configured."""
        super().__init__(context)
        self._numbers = numbers
        self._commons = Commons(KEYS, subjects=False)

    def sent(self, into: "list[Hint]", asked: Asked, worker: "WorkerView", match: "Match") -> None:  # noqa: ARG002 - a Rule's signature
        """About the request's own prompt."""
        words = asked.words
        if words is None:
            return
        numbers, subject = self._numbers, asked.subject
        wishes = [(min(stop, subject.tokens), ttl, "cache_control") for stop, ttl in words.breakpoints]
        if words.retention_seconds:
            wishes.append((subject.tokens, words.retention_seconds, "prompt_cache_retention"))
        common = self._commons.saw(words.key, subject, asked.session) if words.key is not None else None
        if common is not None:
            if common.entries:
                asked.before = (*asked.before, *common.entries)
                common.entries = []
            if common.tokens:
                wishes.append((common.tokens, KEY_TTL, "prompt_cache_key"))
        for stop, ttl, reason in wishes:
            if stop >= max(1, numbers.min_tokens) and ttl > 0:
                shared = common is not None and reason == "prompt_cache_key"
                entry = self.context.voice.say(
                    into,
                    self.name,
                    Action.RETAIN,
                    worker.id,
                    subject,
                    asked.now,
                    stop=stop,
                    priority=numbers.priority,
                    ttl=min(ttl, numbers.longest),
                    reason=reason,
                    session=None if shared else asked.session,
                )
                if shared and common is not None and entry is not None:
                    common.entries.append(entry)

    def answered(self, into: "list[Hint]", asked: Asked, worker: str, held: int, now: float) -> None:  # noqa: ARG002 - as above
        """What is to be kept for long is pinned where there is room for long."""
        words, session, numbers = asked.words, asked.session, self._numbers
        if words is None or session is None or words.session_end or not numbers.pin:
            return
        subject = asked.subject
        stop, ttl = 0, 0.0
        for at, seconds in words.breakpoints:
            if seconds > numbers.pin:
                stop, ttl = max(stop, min(at, subject.tokens)), max(ttl, seconds)
        if words.retention_seconds and words.retention_seconds > numbers.pin:
            stop, ttl = subject.tokens, max(ttl, words.retention_seconds)
        ttl = min(ttl, numbers.longest)
        if stop < max(1, numbers.min_tokens):
            return
        fresh = session.pinned_until - now > ttl / 2
        if fresh and stop < session.pinned * GROWN:
            return
        say = self.context.voice.say
        if session.pinned and session.pinned_until > now:
            say(
                into,
                self.name,
                Action.UNPIN,
                session.pinned_at,
                subject,
                now,
                stop=session.pinned,
                target="l2",
                reason="its pin is renewed",
            )
        said = say(
            into,
            self.name,
            Action.PIN,
            worker,
            subject,
            now,
            stop=stop,
            target="l2",
            priority=numbers.priority,
            ttl=ttl,
            reason="its client wants it kept for long",
            session=session,
        )
        session.pinned, session.pinned_at = (stop, worker) if said is not None else (0, "")
        session.pinned_until = now + ttl if said is not None else 0.0
