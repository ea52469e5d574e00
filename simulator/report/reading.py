"""What each figure says, in a sentence for somebody who does not want to read axes."""

from collections.abc import Mapping, Sequence
from typing import Any

from simulator.report.result import Result, last_arrival
from simulator.report.words import count, listed, percent, seconds, times

Figures = Sequence[tuple[Result, Mapping[str, Any]]]
"""Results with their summaries."""

_CLOSE = 1.02


def lead(figures: Figures) -> str:
    """The outcome in one or two sentences."""
    ranked = _by(figures, "ttft_mean_s")
    if not ranked:
        return "No request had an answer."
    best, least = ranked[0]
    said = f"The first token came soonest under {best}: after {seconds(least)} on average"
    if len(ranked) > 1:
        worst, most = ranked[-1]
        equal = [name for name, value in ranked[1:] if value <= _CLOSE * least]
        if equal:
            said += f", and within 2 % of that under {listed(equal)}"
        if most > _CLOSE * least:
            said += f"; {times(most / least)} that, {seconds(most)}, under {worst}"
    return f"{said}. {lost(figures)}"


def distribution(figures: Figures) -> str:
    """Of the distribution of times to first token."""
    half, tail = _by(figures, "ttft_p50_s"), _by(figures, "ttft_p90_s")
    if not half:
        return "No request had an answer."
    said = f"Half of the requests had their first token within {seconds(half[0][1])} under {half[0][0]}"
    if len(half) > 1:
        said += f" and {seconds(half[-1][1])} under {half[-1][0]}"
    said += f"; nine of ten within {seconds(tail[0][1])} under {tail[0][0]}"
    if len(tail) > 1:
        said += f" and {seconds(tail[-1][1])} under {tail[-1][0]}"
    return f"{said}. Further left is sooner; the steeper a line, the more alike are the requests."


def reuse(figures: Figures) -> str:
    """Of the hit rates."""
    ranked = _by(figures, "hit_rate", best_is_most=True)
    if not ranked:
        return "No prompt was computed."
    name, rate = ranked[0]
    summary = next(summary for run, summary in figures if run.policy == name)
    said = f"{name} reused most: {percent(rate)} of all prompt tokens"
    pooled, endless = summary.get("pooled_lru_hit_rate"), summary.get("infinite_hit_rate")
    if pooled:
        said += f", {percent(rate / pooled)} of what one cache of the whole fleet's size would ({percent(pooled)}, solid mark)"
    if endless:
        said += f"; an endless cache would reach {percent(endless)} (dashed mark)"
    if any(summary.get("hit_rate_l1") or summary.get("hit_rate_l2") for _, summary in figures):
        said += ". Lighter parts of a bar were loaded from a slower memory (l1, then l2)"
    return f"{said}."


def balance(figures: Figures) -> str:
    """Of the load per worker."""
    ranked = _by(figures, "load_max_over_mean")
    if not ranked:
        return "No worker computed anything."
    shown = ranked if len(ranked) <= 3 else [ranked[0], ranked[-1]]
    first, *others = [f"{value:.2f} times" for _, value in shown]
    each = [f"{first} the mean of all under {shown[0][0]}"]
    each += [f"{value} under {name}" for value, (name, _) in zip(others, shown[1:], strict=True)]
    return (
        f"The busiest worker computed {listed(each)}. A row is a worker, the stronger its colour the more requests it has; a strong row "
        "among faint ones is a hot spot."
    )


def waiting(figures: Figures) -> str:
    """Of the queue."""
    tops = sorted(((max((sum(sample) for sample in run.series.pending), default=0), run.policy) for run, _ in figures))
    if not tops:
        return ""
    said = f"At most {count(tops[0][0])} requests waited for their first token under {tops[0][1]}"
    if len(tops) > 1:
        said += f", {count(tops[-1][0])} under {tops[-1][1]}"
    growing = [run.policy for run, _ in figures if _still_growing(run)]
    if growing:
        said += (
            f". Under {listed(growing)} the queue still grew when the last request came: more arrives than this fleet "
            "computes that way, and its figures would be worse, the longer the recording"
        )
    return f"{said}."


def lost(figures: Figures) -> str:
    """Of requests that got no answer."""
    parts = []
    for key, word in (("refused", "refused"), ("failed", "failed")):
        counts = {run.policy: int(summary.get(key) or 0) for run, summary in figures}
        if len(counts) > 1 and len(set(counts.values())) == 1 and any(counts.values()):
            parts.append(f"{word}: {count(next(iter(counts.values())))} under each policy")
        elif any(counts.values()):
            parts.append(
                f"{word}: {listed([f'{count(number)} under {name}' for name, number in counts.items() if number])}"
            )
    if not parts:
        return "No request was refused, and none failed."
    total = max(int(summary.get("requests") or 0) for _, summary in figures)
    return f"{'; '.join(parts).capitalize()}, of {count(total)} requests."


def _still_growing(run: Result) -> bool:
    """Whether the queue at the last arrival is near its maximum, far above that of the first half, and long."""
    end = last_arrival([run])
    before = [
        (time, sum(sample)) for time, sample in zip(run.series.times, run.series.pending, strict=True) if time <= end
    ]
    if len(before) < 10:
        return False
    most = max(queue for _, queue in before)
    first_half = max(queue for time, queue in before if time <= end / 2)
    late = [queue for time, queue in before if time >= 0.95 * end]
    return bool(late) and most > 4 * len(run.workers) and max(late) >= 0.8 * most and most > 1.5 * first_half


def _by(figures: Figures, key: str, *, best_is_most: bool = False) -> list[tuple[str, float]]:
    """Policies with this figure, the best first."""
    known = [(run.policy, float(summary[key])) for run, summary in figures if summary.get(key) is not None]
    return sorted(known, key=lambda pair: pair[1], reverse=best_is_most)
