"""Keep the workers whose context the request fits into."""

from collections.abc import Sequence
from typing import ClassVar

from policies.base import Candidate, RouteRequest
from policies.keys import wanted_tokens


class FitsContext:
    """Drops workers whose `max_model_len` is below prompt and `max_tokens` together; those that do not tell theirs stay.

    If no worker takes both, those that take the prompt stay: the worker says what it thinks of `max_tokens`. If no worker takes even
    the prompt, the request is refused. It does nothing when the prompt's length is not known.
    """

    __slots__ = ("_refuse",)
    needs_match: ClassVar[bool] = True  # what knows matches knows the prompt's length

    def __init__(self, *, refuse: bool = True) -> None:
        """With `refuse` false all stay where no worker takes the prompt: a worker's own error then goes to the client."""
        self._refuse = refuse

    def filter(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates that are long enough."""
        prompt = request.prompt_tokens
        if prompt <= 0:
            return candidates
        whole = prompt + max(1, wanted_tokens(request))
        for candidate in candidates:
            limit = candidate.worker.capabilities.max_model_len
            if limit is not None and limit < whole:
                break
        else:
            return candidates
        limits = [candidate.worker.capabilities.max_model_len for candidate in candidates]
        for tokens in (whole, prompt + 1):
            fitting = [
                candidate
                for candidate, limit in zip(candidates, limits, strict=True)
                if limit is None or tokens <= limit
            ]
            if fitting:
                return fitting
        return [] if self._refuse else candidates
