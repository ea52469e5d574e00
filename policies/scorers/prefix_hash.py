"""Prompts that begin alike to one worker, without knowing any cache."""

from collections.abc import Sequence

from policies.base import Candidate, RouteRequest
from policies.hashing import Rendezvous, bounded_costs, load_shares
from policies.keys import prefix_key


class PrefixHash:
    """Cost: a share in [0, 1): 0 for the worker of the prompt's beginning, 0.5 or more for the others in hash order.

    The key is the beginning of the system prompt and of the first user message (see `policies.keys.prefix_key`), so the
    turns of a conversation stay together. Loads are bounded as for sessions: ``ceil(load_factor · (requests in flight + 1)
    / n)``. KubeAI does the same on a ring of 256 virtual nodes; here it is rendezvous hashing, for the reasons given in
    `policies.hashing`. Requests without text cost their share of the load.
    """

    __slots__ = ("_factor", "_length", "_rendezvous")

    def __init__(self, *, prefix_length: int = 256, load_factor: float = 1.25) -> None:
        """`prefix_length`: characters that count; a prompt that comes as token ids: ids.

        Raises:
            ValueError: `prefix_length` or `load_factor` is below 1.
        """
        if prefix_length < 1:
            raise ValueError("prefix_length must be at least 1")
        if not load_factor >= 1:
            raise ValueError("load_factor must be at least 1")
        self._length = prefix_length
        self._factor = load_factor
        self._rendezvous = Rendezvous()

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The share for each."""
        key = prefix_key(request, self._length)
        if key is None:
            return load_shares(candidates)
        return bounded_costs(self._rendezvous.order(key, candidates), candidates, self._factor)
