"""`session-end`: what belongs to a conversation that is over goes first, and its pins are taken back.

It is over when its client says so (`x-warmroute-session-end`, the end call of the API), or when it has been silent for long. What others
had brought before its first turn, such as a system prompt, is left alone.
"""

from typing import TYPE_CHECKING

from backends.hints.model import Action
from gateway.residency.rules.base import Asked, Context, Rule

if TYPE_CHECKING:
    from backends.hints.model import Hint, Subject
    from gateway.config.residency import SessionEnd
    from gateway.residency.sessions import Session
    from policies.base import Match, WorkerView


class SessionEndRule(Rule):
    """See the module."""

    name = "session-end"
    needs = "words"

    def __init__(self, context: Context, numbers: "SessionEnd") -> None:
        """`numbers`: as configured."""
        super().__init__(context)
        self._numbers = numbers

    def sent(self, into: "list[Hint]", asked: Asked, worker: "WorkerView", match: "Match") -> None:
        """Where a request says that it is the last one, it says so of its own prompt."""
        words, session = asked.words, asked.session
        if words is None or not words.session_end or session is None:
            return
        shared = session.shared if session.turns else match.tokens
        self._demote(into, session, asked.subject, worker.id, shared, asked.now, "its conversation ends with it")

    def ended(self, into: "list[Hint]", session: "Session", now: float) -> None:
        """About the conversation's latest prompt, at the worker that had it."""
        subject = session.subject
        if subject is None or not session.worker:
            return
        self._demote(into, session, subject, session.worker, session.shared, now, "its conversation is over")

    def tick(self, into: "list[Hint]", now: float) -> None:
        """End those that have been silent for long."""
        idle = self._numbers.idle
        if not idle:
            return
        sessions = self.context.sessions
        over = []
        for session in sessions.silent_first:
            if session.seen > now - idle:
                break
            over.append(session)
        for session in over:
            if not session.ended:
                sessions.silent(session)
                self.ended(into, session, now)
            # What is over needs no memory; its gaps stay known.
            sessions.drop(session)

    def _demote(
        self,
        into: "list[Hint]",
        session: "Session",
        subject: "Subject",
        worker: str,
        shared: int,
        now: float,
        reason: str,
    ) -> None:
        start = min(shared, subject.tokens)
        say = self.context.voice.say
        if subject.tokens - start >= max(1, self._numbers.min_tokens):
            say(
                into,
                self.name,
                Action.DEMOTE,
                worker,
                subject,
                now,
                start=start,
                stop=subject.tokens,
                priority=0,
                reason=reason,
                session=session,
            )
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
                reason=reason,
            )
        session.pinned = 0
