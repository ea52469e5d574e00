"""What residency costs a request: ``python -m bench.residency_cost``.

Microseconds of CPU for `Residency.sent` and `Residency.answered`, over a day of conversations of some turns each, each the best of many
short rounds with the collector off: on a busy machine some of them are left alone. What a call of an empty function costs is there to
compare machines by (0.03 to 0.05 us on an idle one).

======================  ===================================================================================
nothing to say          every rule on but `retain`: conversations are followed, nothing is wished
retain                  each turn wishes that its prompt is kept
named, by chain         conversations that name themselves, and those that are known by their prompts
======================  ===================================================================================
"""

import argparse
import gc
import json
import timeit
from time import process_time

from backends.hints.model import Fate, Subject
from backends.registry import driver_named
from gateway.config.residency import ResidencyConfig, ResidencyRules
from gateway.config.schema import Capabilities
from gateway.fleet.worker import Worker
from gateway.residency.residency import Asked, Residency
from policies.base import Match

BLOCK = 16
BATCH = 10


def conversations(count, turns, blocks, grows, named):
    """(subject, tokens held) in the order of arrival: all first turns, all second ones, ..."""
    requests = []
    chains = [[(1 + number) << 20 | index for index in range(blocks + turns * grows)] for number in range(count)]
    for turn in range(turns):
        for number, hashes in enumerate(chains):
            length = blocks + turn * grows
            subject = Subject(
                "m",
                length * BLOCK + 3,
                {BLOCK: hashes[:length]},
                session=f"session-{number}" if named else "",
            )
            requests.append((subject, (length - grows) * BLOCK if turn else 0))
    return requests


def measure(rules, requests, workers, said):
    """Microseconds per `sent` and per `answered`."""
    core = Residency(ResidencyConfig(rules=rules), workers=lambda: workers, holds=lambda _subject: {})
    sent = answered = told = 0.0
    now, hints = 1.0, 0
    gc.collect()
    gc.disable()
    try:
        for first in range(0, len(requests), BATCH):
            batch = []
            for index, (subject, held) in enumerate(requests[first : first + BATCH]):
                now += 0.01
                sum(subject.chains[BLOCK])  # the look-up before has just walked them: they are in the CPU's cache
                batch.append((Asked(subject, now), workers[index % len(workers)], Match(device=held, source="event")))
            start = process_time()
            spoken = [core.sent(asked, worker, match) for asked, worker, match in batch]
            middle = process_time()
            if said:
                for each in spoken:
                    for hint in each:
                        core.ledger.fate(hint, Fate.SENT, "inside the request", now)
                        core.ledger.fate(hint, Fate.ACCEPTED, "the request was answered", now)
            later = process_time()
            for asked, worker, match in batch:
                core.answered(asked, worker.id, match.device, now)
            end = process_time()
            sent, told, answered = sent + middle - start, told + later - middle, answered + end - later
            hints += sum(map(len, spoken))
            core.tick(now)
    finally:
        gc.enable()
    count = len(requests)
    return [1e6 * each / count for each in (sent, told, answered)] + [hints / count]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=125, help="of a first prompt (16 tokens each)")
    parser.add_argument("--grows", type=int, default=20, help="blocks that each turn adds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    workers = [
        Worker(
            url=f"http://127.0.0.1:{9000 + index}",
            driver=driver_named("vllm"),
            model="m",
            capabilities=Capabilities(block_size=BLOCK, kv_capacity_tokens=1_000_000),
        )
        for index in range(8)
    ]
    rows = []
    for title, rules in (("nothing to say", ResidencyRules(retain=False)), ("retain", ResidencyRules())):
        for named in (True, False):
            requests = conversations(arguments.conversations, arguments.turns, arguments.blocks, arguments.grows, named)
            rounds = [measure(rules, requests, workers, title == "retain") for _ in range(arguments.rounds)]
            best = [min(column) for column in zip(*rounds, strict=True)]
            rows.append((title, "named" if named else "by chain", *best))
    empty = 1e6 * min(timeit.repeat(lambda: None, number=10_000, repeat=100)) / 10_000
    if arguments.json:
        names = ("case", "known", "sent_us", "told_us", "answered_us", "hints")
        print(json.dumps({"empty_us": empty, "rows": [dict(zip(names, row, strict=True)) for row in rows]}))
        return
    print(f"a call of an empty function: {empty:.3f} us")
    print(f"{'':16}{'':10}{'sent us':>9}{'told us':>9}{'answered us':>13}{'hints':>7}")
    for title, known, sent, told, answered, hints in rows:
        print(f"{title:16}{known:10}{sent:9.2f}{told:9.2f}{answered:13.2f}{hints:7.2f}")


if __name__ == "__main__":
    main()
