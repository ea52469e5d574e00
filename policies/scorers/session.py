"""A session's requests to the worker that holds its cache."""

from collections.abc import Sequence
from typing import Literal

from policies.base import Candidate, RouteRequest
from policies.hashing import Rendezvous, bounded_costs, load_shares
from policies.keys import SESSION_COOKIE, SESSION_FIELDS, SESSION_HEADER, session_key


class Session:
    """Cost: a share in [0, 1): 0 for the session's worker, 0.5 or more for the others, in the order of the key's hash.

    The key is the first that is there of a header, body fields and a cookie. A worker holds at most
    ``ceil(max_load_factor · (requests in flight + 1) / n)`` requests (see `policies.hashing.bounded_costs`); what is above
    goes to the next in hash order, always the same one for a session. Stateless: gateways agree without talking.
    """

    __slots__ = ("_by_load", "_cookie", "_factor", "_fields", "_header", "_rendezvous")

    def __init__(
        self,
        *,
        header: str | None = SESSION_HEADER,
        body_field: str | Sequence[str] | None = SESSION_FIELDS,
        cookie: str | None = SESSION_COOKIE,
        max_load_factor: float = 1.25,
        without_key: Literal["nothing", "load"] = "nothing",
    ) -> None:
        """A request's key is looked for in `header`, then in each `body_field` (``a.b`` is b inside a), then in `cookie`.

        Requests without a key cost the same everywhere, or, with `without_key` ``load``, their share of the load.

        Raises:
            ValueError: `max_load_factor` is below 1, so that there would not be room for everything.
        """
        if not max_load_factor >= 1:
            raise ValueError("max_load_factor must be at least 1")
        fields = (body_field,) if isinstance(body_field, str) else body_field or ()
        self._header = header.lower() if header else None
        self._fields = tuple(tuple(field.split(".")) for field in fields)
        self._cookie = cookie or None
        self._factor = max_load_factor
        self._by_load = without_key == "load"
        self._rendezvous = Rendezvous()

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The share for each."""
        key = session_key(request, self._header, self._fields, self._cookie)
        if key is not None:
            return bounded_costs(self._rendezvous.order(key, candidates), candidates, self._factor)
        return load_shares(candidates) if self._by_load else [0.0] * len(candidates)
