"""What Dynamo's own offline replay reached on the study's Mooncake files, measured by `bench.dynamo_replay` (see there for its installation)."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of `bench.dynamo_replay`: reuse as shares of prompt tokens, times in seconds.

    Attributes:
        trace: Mooncake's.
        blocks: of 512 tokens in each of 8 workers.
        arrivals: ``as recorded``, ``spread`` inside their steps, or as recorded ``once more``.
        round_robin: its reuse.
        kv_router: mean, least and most reuse of five runs.
        kv_router_ttft: mean.
        ours_8k: the same for `ttft` at 30 ms and 8,000 tokens/s, seeds 0 to 4.
        ours_50k: at 15 ms and 50,000 tokens/s, about the default timing of Dynamo's engine.
        ours_ttft: mean of the latter.
    """

    trace: str
    blocks: int
    arrivals: str
    round_robin: float
    kv_router: tuple[float, float, float]
    kv_router_ttft: float
    ours_8k: tuple[float, float, float]
    ours_50k: tuple[float, float, float]
    ours_ttft: float


VERSION: Final = "1.6.1"
MEASURED: Final = (
    Measured(
        "synthetic",
        2400,
        "as recorded",
        0.125,
        (0.531, 0.518, 0.54),
        0.163,
        (0.571, 0.569, 0.574),
        (0.578, 0.577, 0.581),
        0.148,
    ),
    Measured(
        "synthetic",
        2400,
        "once more",
        0.125,
        (0.538, 0.53, 0.543),
        0.161,
        (0.571, 0.569, 0.574),
        (0.578, 0.577, 0.581),
        0.148,
    ),
    Measured(
        "synthetic",
        600,
        "as recorded",
        0.046,
        (0.239, 0.233, 0.243),
        0.255,
        (0.262, 0.257, 0.265),
        (0.274, 0.269, 0.279),
        0.241,
    ),
    Measured(
        "synthetic",
        600,
        "once more",
        0.046,
        (0.241, 0.233, 0.247),
        0.254,
        (0.262, 0.257, 0.265),
        (0.274, 0.269, 0.279),
        0.241,
    ),
    Measured(
        "conversation",
        2400,
        "as recorded",
        0.087,
        (0.216, 0.213, 0.218),
        0.272,
        (0.28, 0.279, 0.282),
        (0.282, 0.282, 0.284),
        0.216,
    ),
    Measured(
        "conversation",
        2400,
        "spread",
        0.085,
        (0.221, 0.219, 0.223),
        0.207,
        (0.278, 0.277, 0.279),
        (0.269, 0.255, 0.283),
        0.195,
    ),
    Measured(
        "conversation",
        600,
        "as recorded",
        0.052,
        (0.086, 0.084, 0.086),
        0.34,
        (0.105, 0.104, 0.106),
        (0.108, 0.106, 0.111),
        0.255,
    ),
    Measured(
        "conversation",
        600,
        "spread",
        0.051,
        (0.085, 0.083, 0.086),
        0.247,
        (0.104, 0.102, 0.106),
        (0.097, 0.091, 0.103),
        0.234,
    ),
)
"""2026-12-01. `synthetic` was not recorded in steps, so nothing is spread there: the same again."""


def most_reuse(trace: str, blocks: int) -> float:
    """The most that any run of Dynamo's `kv_router` reached, whichever the arrivals."""
    return max(each.kv_router[2] for each in MEASURED if (each.trace, each.blocks) == (trace, blocks))


def table() -> list[str]:
    """The measurements in Markdown."""
    lines = [
        "| trace, blocks, arrivals | `round_robin` | `kv_router` | its mean TTFT | `ttft` at P 8k | at P 50k | its mean TTFT there |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines.extend(
        f"| {each.trace}, {each.blocks}, {each.arrivals} | {each.round_robin:.3f} | {_range(each.kv_router)} | {each.kv_router_ttft:.3f} s | "
        f"{_range(each.ours_8k)} | {_range(each.ours_50k)} | {each.ours_ttft:.3f} s |"
        for each in MEASURED
    )
    return lines


def _range(values: tuple[float, float, float]) -> str:
    mean, least, most = values
    return f"**{mean:.3f}** ({least:.3f} to {most:.3f})"
