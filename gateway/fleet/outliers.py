"""Who fails far more often than its peers: Envoy's success-rate outlier detection. Numbers in, indices out.

What never fails several times in a row, or fails every other request, is found by no count of consecutive failures. Envoy's rule (docs:
"Outlier detection", success rate): of all hosts with enough requests in an interval the mean of the success rates and their standard deviation
(of the population) are taken; ejected is who is below ``mean - factor x deviation``.

Where nearly all rates are 1 the deviation is nearly 0, and a single failure would be an outlier. So a rate must also be `min_gap` below the mean.
With fewer than five workers the rule cannot find one that fails always: the worst of n is sqrt(n - 1) deviations below the mean.
"""

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gateway.config.schema import Outliers


class Outlier(NamedTuple):
    """One that was found.

    Attributes:
        place: its index in what was given.
        rate: its share of successes.
        mean: of all that were compared, itself included.
    """

    place: int
    rate: float
    mean: float


def outliers(counts: Sequence[tuple[int, int]], rules: "Outliers") -> list[Outlier]:
    """Those whose success rate is far below the others', the worst first.

    Args:
        counts: per worker, requests that succeeded and that failed within the interval.
        rules: what counts as far, and who is compared at all.
    """
    rates = [
        (good / (good + bad), index)
        for index, (good, bad) in enumerate(counts)
        if good + bad >= max(1, rules.min_requests)
    ]
    if len(rates) < rules.min_workers:
        return []
    mean = sum(rate for rate, _ in rates) / len(rates)
    deviation = sqrt(sum((rate - mean) ** 2 for rate, _ in rates) / len(rates))
    threshold = min(mean - rules.deviations * deviation, mean - rules.min_gap)
    return [Outlier(index, rate, mean) for rate, index in sorted(rates) if rate < threshold]
