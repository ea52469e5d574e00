"""Rendezvous hashing and bounded loads: which worker a key belongs to, and who takes what that one cannot.

Rendezvous (highest random weight; Thaler and Ravishankar, IEEE/ACM ToN 6(1), 1998) instead of a ring of virtual nodes:
each worker's share is exactly 1/n whatever the number of replicas would be, one worker that comes or goes moves 1/n of the
keys, what a full worker cannot take spreads over all others, and there is no ring to keep up to date while workers change.
It costs one hash per worker and decision; costs for all candidates are wanted anyway.

Gateways that see the same workers agree without talking: the order depends on the key and the workers' ids only.
"""

from collections.abc import Sequence
from typing import Final

import mmh3

from policies.base import Candidate

REMEMBERED: Final = 1024
"""Worker digests kept beside four times the candidates of a decision."""


class Rendezvous:
    """Orders candidates by their hash with a key. Keeps each worker id's digest, in a bounded number."""

    __slots__ = ("_digests",)

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def order(self, key: bytes, candidates: Sequence[Candidate]) -> list[int]:
        """The indices of `candidates`, the key's own worker first, then who takes over, in order."""
        digest = mmh3.mmh3_x64_128_digest
        digests = self._digests
        prefix = digest(key)
        try:
            hashes = [digest(prefix + digests[candidate.worker.id]) for candidate in candidates]
        except KeyError:
            if len(digests) > 4 * len(candidates) + REMEMBERED:
                digests.clear()  # only a cache: what is still needed comes back below
            for candidate in candidates:
                worker_id = candidate.worker.id
                digests[worker_id] = digest(worker_id.encode("utf-8", "surrogatepass"))
            hashes = [digest(prefix + digests[candidate.worker.id]) for candidate in candidates]
        return sorted(range(len(hashes)), key=hashes.__getitem__)


def bounded_costs(order: list[int], candidates: Sequence[Candidate], factor: float) -> list[float]:
    """Costs that make the cheapest candidate the first in `order` whose load stays within the bound.

    A worker may hold at most ``ceil(factor · (total + 1) · weight / sum of weights)`` requests, this one included (Mirrokni,
    Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016, with capacities in proportion to the weights).

    Returns one share in [0, 1) per candidate: 0 for the chosen one, and between 0.5 and 1 for the others by their place in
    the order, those that are full last. The gap is what makes a key stick when the costs are summed up with others.
    """
    loads = [candidate.worker.in_flight for candidate in candidates]
    weights = [candidate.worker.weight for candidate in candidates]
    share = factor * (sum(loads) + 1) / sum(weights)
    full = [index for index in order if loads[index] >= share * weights[index]]  # as loads are whole, no ceil is needed
    if full:
        left_out = set(full)
        order = [index for index in order if index not in left_out] + full
    costs = [0.0] * len(loads)
    step = 0.5 / len(loads)
    cost = 0.5
    for index in order:
        costs[index] = cost
        cost += step
    costs[order[0]] = 0.0
    return costs


def load_shares(candidates: Sequence[Candidate]) -> list[float]:
    """Requests in flight by weight, as a share in [0, 1) of one more than the largest: what stands in for a missing key."""
    loads = [candidate.worker.in_flight / candidate.worker.weight for candidate in candidates]
    scale = 1 / (1 + max(loads))
    return [load * scale for load in loads]
