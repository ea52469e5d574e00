"""Workers that are only numbers, and tickets."""

import pytest

from gateway.admission.gate import Gate
from gateway.admission.queue import Ticket
from gateway.admission.stages import Stages
from gateway.config.schema import Admission, Capabilities, Stage, WorkerLimits
from gateway.fleet.worker import Worker, WorkerState
from policies.base import RouteRequest

SPEED = 1000.0
"""Tokens per second of the workers here; no overhead, no buckets."""


@pytest.fixture(scope="session")
def worker():
    """A ready worker of one prefill at a time, with so many slots."""
    from backends.registry import driver_named

    def make(worker_id="w0", slots=1, **capabilities):
        made = Worker(
            url=f"http://{worker_id}",
            driver=driver_named("openai"),
            model="m",
            worker_id=worker_id,
            capabilities=Capabilities(
                **{"slots": slots, "prefill": "exclusive", "prefill_rate": SPEED, "overhead": 0.0} | capabilities
            ),
        )
        made.state = WorkerState.READY
        made.routable = True
        return made

    return make


class Fleet:
    """A gate and its workers, asked as the proxy asks; time is the test's. The emptiest candidate is chosen."""

    def __init__(self, workers, settings=None, *, stages=None, limits=None):
        self.workers = workers
        self.stages = Stages(stages or {})
        self.gate = Gate("m")
        self.gate.configure(workers, settings, limits or {}, self.stages, Admission())
        self.told = []
        self.leases = {}
        self.sent = []
        self.refusals = []

    def ticket(self, now, stage=None, **fields):
        found = self.stages.by_name.get(stage or "")
        fields.setdefault("deadline", now + found.deadline if found else float("inf"))
        fields.setdefault("priority", found.priority if found else 0)
        ticket = Ticket(
            now, stage=found, group=(stage or "", fields.get("tenant", "")), pool=self.gate.pool_of(found), **fields
        )
        ticket.turn = lambda error: self.told.append((ticket, error))
        return ticket

    def ask(self, ticket, now):
        """Whether it was sent; raises when it is refused."""
        request = RouteRequest(model="m", prompt_tokens=ticket.tokens, now=now)
        if not ticket.sequence:
            self.gate.arrive(ticket, now)
        candidates = self.gate.select(ticket, request, [each.candidate for each in self.workers], now)
        if candidates is None:
            return False
        chosen = min(candidates, key=lambda each: (each.worker.in_flight, each.worker.backlog))
        self.gate.started(ticket, request, chosen, now)
        self.leases[ticket] = chosen.worker.acquire(ticket.tokens, now=now)
        self.sent.append(ticket)
        return True

    def comes(self, now, stage=None, **fields):
        """A new request; its ticket, asked about."""
        ticket = self.ticket(now, stage, **fields)
        self.ask(ticket, now)
        return ticket

    def prefilled(self, ticket, now):
        self.leases[ticket].first_byte(now)
        self.gate.opened(now)
        self.turns(now)

    def ends(self, ticket, now, *, completed=True):
        first = ticket.sent
        self.leases.pop(ticket).release(now)
        self.gate.close(ticket, now, first, completed=completed)
        self.turns(now)

    def turns(self, now):
        """Those whose turn it is are sent."""
        while self.told:
            ticket, error = self.told.pop(0)
            if error is not None:
                self.gate.close(ticket, now)
                self.refusals.append((ticket, error))
            else:
                self.ask(ticket, now)


@pytest.fixture(scope="session")
def fleet(worker):
    """A fleet of so many workers with so many slots each."""

    def make(count=1, slots=1, *, settings=None, stages=None, limits=None, **capabilities):
        workers = [worker(f"w{index}", slots, **capabilities) for index in range(count)]
        return Fleet(
            workers,
            Admission(**settings) if settings is not None else Admission(prefill_ahead=1e9),
            stages={name: Stage(**section) for name, section in (stages or {}).items()},
            limits={name: WorkerLimits(**section) for name, section in (limits or {}).items()},
        )

    return make
