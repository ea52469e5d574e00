"""Why a decision fell as it did, in one word: the label of a counter, not the explanation of one request.

The explanation, with every candidate and its costs, is in the request's decision record.
"""

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from policies.base import Decision, Match


class Reason(enum.StrEnum):
    """What a decision's winner has to do with the prompt."""

    RETRY = "retry"
    """An attempt failed before: it was chosen among those that are left."""
    HEDGE = "hedge"
    """An attempt has waited long for its first byte: it was chosen to try beside it."""
    ONLY_ONE = "only_one"
    """The filters left one candidate."""
    UNMATCHED = "unmatched"
    """No worker was known to hold a part of the prompt (or none was asked for): load decided."""
    HOLDS_MOST = "holds_most"
    """It holds the most of the prompt; others may hold as much."""
    HOLDS_LESS = "holds_less"
    """It holds a part of the prompt, and another one more: that one's load cost more than the difference."""
    HOLDS_NONE = "holds_none"
    """It holds nothing of the prompt though others do: they are busier, or were filtered out."""


_RETRY, _HEDGE, _ONLY_ONE, _UNMATCHED, _HOLDS_MOST, _HOLDS_LESS, _HOLDS_NONE = Reason


def reason_of(decision: "Decision", matches: "Mapping[str, Match]", attempt: int) -> Reason:
    """The word for `decision`.

    Args:
        decision: what the policy decided.
        matches: what each worker holds of the prompt, those with nothing left out; empty when nobody looked.
        attempt: 0 for the first.
    """
    if attempt:
        return _RETRY
    if len(decision.candidates) == 1:
        return _ONLY_ONE
    if not matches:
        return _UNMATCHED
    # `Match.tokens` written out, and no `max`: this runs for every decision.
    match = decision.chosen.match
    held = match.device + match.l1 + match.l2
    if not held:
        return _HOLDS_NONE
    for match in matches.values():
        if match.device + match.l1 + match.l2 > held:
            return _HOLDS_LESS
    return _HOLDS_MOST
