"""What `bench.study` runs: the rows of its table, and what is expected of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from backends.profiles import profile_named
from bench.study_dynamo import VERSION, most_reuse
from gateway.config.schema import Policy, Step
from simulator.fleet import FleetOptions, TierOptions, WorkerOptions

Figures: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By policy, a replay's summary."""
Tables: TypeAlias = dict[tuple[str, str], Figures]
"""By row and run."""

POLICIES: Final = ("roundrobin", "leastload", "session", "prefixaware", "kvaware", "lmetric", "dynamo-cost", "ttft")
SECTIONS: Final[dict[str, Policy]] = {"random": Policy(scorers=(Step(type="random"),))}
"""Policies that are no presets."""

LARGE, SMALL = 2400 * 512, 600 * 512
"""Tokens of a worker's KV cache in the study that the issue refers to."""
LADDER: Final = "15x50 3x20 10x20 15x20 20x38 22x34 25x30 30x25 35x21 40x38 43x36 46x33 49x30 52x29 55x27 57x26 60x25"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One workload on one fleet.

    Attributes:
        name: unique in its row.
        source: a format, with a `file`, or a generator.
        traffic: its parameters.
        limit: only so many requests.
        profile: of the workers; None: the explicit worker.
        worker: what differs from that.
        stages: (requests per second, seconds) by which figures are told apart.
    """

    name: str
    source: str
    file: str | None = None
    traffic: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    workers: int = 8
    profile: str | None = None
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    speed: float = 1.0
    policies: Sequence[str] = POLICIES
    stages: Sequence[tuple[float, float]] = ()

    def options(self, seed: int) -> FleetOptions:
        """The fleet."""
        profile = None if self.profile is None else profile_named(self.profile)
        return FleetOptions(profile=self.worker.apply(profile), workers=self.workers, speed=self.speed, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table, or, with several runs, a comparison of its own.

    Attributes:
        kind: what is expected of it: ``mooncake``, ``thrash``, ``neuron``, ``unshared``, ``groups``, ``documents`` or nothing.
    """

    name: str
    title: str
    note: str
    kind: frozenset[str] = frozenset()
    runs: Sequence[Run]

    @property
    def recorded(self) -> bool:
        """Whether it needs a trace."""
        return any(run.file is not None for run in self.runs)


def _mooncake(trace: str, tokens: int, rate: int, kinds: str) -> Row:
    name = f"{trace}-{tokens // 512}-{rate // 1000}k"
    return Row(
        name=name,
        title=f"Mooncake {trace}, {tokens // 512} blocks, P {rate // 1000}k",
        note=f"8 workers with {tokens:,} tokens; arrivals spread inside their 3 s steps; no sessions, so `session` is by chance",
        kind=frozenset({"mooncake", *kinds.split()}),
        runs=(
            Run(
                name=name,
                source="mooncake",
                file=f"{trace}_trace.jsonl",
                worker=WorkerOptions(kv_tokens=tokens, prefill_rate=rate),
            ),
        ),
    )


def _weka(tokens: int, rate: int, kinds: str = "") -> Row:
    name = f"weka-{tokens // 512}-{rate // 1000}k"
    return Row(
        name=name,
        title=f"Weka, {tokens // 512} blocks, P {rate // 1000}k",
        note=f"120 Claude Code sessions, prompts up to 180,000 tokens, requests of seconds 600 to 2,400, open loop; 8 workers with {tokens:,} tokens",
        kind=frozenset(kinds.split()),
        runs=(
            Run(
                name=name,
                source="weka",
                file="weka_claude_code_ranges.jsonl",
                traffic={"loop": "open"},
                worker=WorkerOptions(kv_tokens=tokens, prefill_rate=rate),
            ),
        ),
    )


def _azure(load: float) -> Row:
    # 19,366 prompts of 1,154.7 tokens in 3,502 s at 30 ms + tokens / 8,000 are 0.963 busy workers.
    name = f"azure-{load * 100:.0f}"
    return Row(
        name=name,
        title=f"Azure 2023 conversation, {load:.0%} load",
        note="reuse-free; 8 workers; recorded arrivals, sped up until prefills keep the fleet that busy on average",
        kind=frozenset({"unshared"}),
        runs=(
            Run(
                name=name,
                source="azure",
                file="AzureLLMInferenceTrace_conv.csv",
                traffic={"block_tokens": 512},
                speed=load * 8 / 0.963,
            ),
        ),
    )


def _documents(thousands: int, rate: float, readers: int) -> Row:
    name = f"documents-{thousands}k"
    return Row(
        name=name,
        title=f"documents of {thousands}k tokens",
        note=f"7 workers of `h100x2-32b` (`max_model_len` 100,000); {readers} readers of 100 documents, 5 questions each, {rate:g} readers/s",
        runs=(_document_run(name, thousands, rate, readers),),
    )


def _document_run(
    name: str, thousands: int, rate: float, readers: int, *, tiers: bool = False, policies: Sequence[str] = POLICIES
) -> Run:
    memory = {
        "l1": TierOptions(tokens=2_000_000, bandwidth=40e9),
        "l2": TierOptions(tokens=20_000_000, bandwidth=10e9),
    }
    return Run(
        name=name,
        source="documents",
        traffic={"document_tokens": thousands * 1024, "rate": rate, "readers": readers, "block_tokens": 64},
        workers=7,
        profile="h100x2-32b",
        worker=WorkerOptions(block_tokens=64, max_model_len=100_000, tiers=memory if tiers else {}),
        policies=policies,
    )


ROWS: Final[Sequence[Row]] = (
    *(
        _mooncake("synthetic", tokens, rate, "thrash" if tokens == SMALL else "")
        for tokens in (LARGE, SMALL)
        for rate in (8000, 6000)
    ),
    _weka(LARGE, 20_000),
    _weka(LARGE, 8000),
    _weka(SMALL, 8000, "thrash"),
    _documents(8, 4.0, 300),
    _documents(64, 0.5, 160),
    Row(
        name="neuron-chat",
        title="Neuron `trn2-70b`, chat",
        note="multi-turn users of the generator `chat` (8 turns), 0.5 conversations/s; buckets and segments on",
        kind=frozenset({"neuron"}),
        runs=(Run(name="neuron-chat", source="chat", traffic={"rate": 0.5, "block_tokens": 32}, profile="trn2-70b"),),
    ),
    Row(
        name="neuron-weka",
        title="Neuron `trn2-70b`, Weka",
        note="prompts up to 30,000 tokens of all sessions, from their beginnings, closed loop, twice as fast; buckets and segments on",
        kind=frozenset({"neuron"}),
        runs=(
            Run(
                name="neuron-weka",
                source="weka",
                file="weka_claude_code_ranges.jsonl",
                traffic={"sessions": 0, "max_prompt_tokens": 30_000, "begin": 0.0, "end": 3600.0, "spread": 1200.0},
                profile="trn2-70b",
                speed=2.0,
            ),
        ),
    ),
    _azure(0.70),
    _azure(0.95),
    *(
        _mooncake("conversation", tokens, rate, "thrash" if tokens == SMALL else "")
        for tokens in (LARGE, SMALL)
        for rate in (8000, 6000)
    ),
    Row(
        name="groups",
        title="llm-d's 150 groups, 3 to 60 req/s",
        note="6,000 tokens in common, 5 questions of 1,200, 1,000 output tokens; 8 workers of `h100x2-32b`; all stages as one figure",
        kind=frozenset({"groups"}),
        runs=(
            Run(
                name="groups",
                source="groups",
                traffic={"rates": LADDER, "block_tokens": 64},
                profile="h100x2-32b",
                worker=WorkerOptions(block_tokens=64),
                policies=(*POLICIES, "random"),
                stages=tuple((float(rate), float(seconds)) for rate, seconds in (s.split("x") for s in LADDER.split())),
            ),
        ),
    ),
)


def _hyperpod(thousands: int, rate: float, overload: float, readers: int) -> Row:
    name = f"hyperpod-{thousands}k"
    runs = []
    for load, each in (("steady", rate), ("overload", overload)):
        for tiers, policy in ((False, "roundrobin"), (True, "ttft")):
            run = f"{name}-{load}-{policy}"
            crowd = readers if load == "steady" else 4 * readers
            runs.append(_document_run(run, thousands, each, crowd, tiers=tiers, policies=(policy,)))
    return Row(
        name=name,
        title=f"documents of {thousands}k tokens, tiers",
        note=f"as above at {rate:g} readers/s (steady) and, four times as many, {overload:g} (overload): `ttft` with 2 M tokens of l1 per worker at 40 GB/s and 20 M "
        "of l2 at 10 GB/s against `roundrobin` without either",
        kind=frozenset({"hyperpod"}),
        runs=runs,
    )


COMPARISONS: Final[Sequence[Row]] = (_hyperpod(8, 6.0, 20.0, 300), _hyperpod(64, 0.6, 3.0, 160))
"""What is not in the table."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that is expected of the rows of a kind.

    Attributes:
        text: with ``{row}`` for the row's title.
        applies: to which rows.
        check: whether it holds, and what was found.
    """

    text: str
    applies: Callable[[Row], bool]
    check: Callable[[Row, Mapping[str, Figures]], tuple[bool, str]]


def _only(figures: Mapping[str, Figures]) -> Figures:
    return next(iter(figures.values()))


def _near_best(key: str) -> Callable[[Row, Mapping[str, Figures]], tuple[bool, str]]:
    def check(row: Row, runs: Mapping[str, Figures]) -> tuple[bool, str]:  # noqa: ARG001
        figures = _only(runs)
        others = {name: each[key] for name, each in figures.items() if name != "ttft"}
        best = min(others, key=lambda name: others[name])
        ratio = figures["ttft"][key] / others[best] - 1
        return ratio <= 0.02, f"{ratio:+.1%} against `{best}`"

    return check


def _ahead(row: Row, runs: Mapping[str, Figures]) -> tuple[bool, str]:  # noqa: ARG001
    figures = _only(runs)
    others = {name: each["ttft_mean_s"] for name, each in figures.items() if name != "ttft"}
    best = min(others, key=lambda name: others[name])
    ratio = figures["ttft"]["ttft_mean_s"] / others[best] - 1
    return ratio <= -0.15, f"{ratio:+.1%} against `{best}`"


def _hits(row: Row, runs: Mapping[str, Figures]) -> tuple[bool, str]:  # noqa: ARG001
    each = _only(runs)["ttft"]
    ratio = each["hit_rate"] / each["pooled_lru_hit_rate"]
    return ratio >= 0.98, f"{ratio:.3f} of the bound"


def _like_least_load(row: Row, runs: Mapping[str, Figures]) -> tuple[bool, str]:  # noqa: ARG001
    figures = _only(runs)
    found = {key: figures["ttft"][key] / figures["leastload"][key] - 1 for key in ("ttft_mean_s", "ttft_p90_s")}
    return max(found.values()) <= 0.01, f"mean {found['ttft_mean_s']:+.1%}, p90 {found['ttft_p90_s']:+.1%}"


def _dynamo(row: Row, runs: Mapping[str, Figures]) -> tuple[bool, str]:
    trace, blocks, _ = row.name.split("-")
    target = most_reuse(trace, int(blocks))
    found = _only(runs)["ttft"]["hit_rate"]
    return found >= target, f"{found:.3f} against {target:.3f}"


AFTER_WARM_UP: Final = 2
"""Stages left out: the warm-up is faster than the stage that follows, which has to wait for what is left of it."""
SATURATED_S: Final = 10.0
"""p90 TTFT in seconds from which on a stage counts as saturated."""


def _groups(row: Row, runs: Mapping[str, Figures]) -> tuple[bool, str]:  # noqa: ARG001
    figures = _only(runs)
    ours, random = figures["ttft"]["stages"], figures["random"]["stages"]
    index = next(
        (at for at, stage in enumerate(random) if at >= AFTER_WARM_UP and (stage["ttft_p90_s"] or 0) > SATURATED_S),
        None,
    )
    if index is None:
        return False, "random never saturates"
    ratio = random[index]["ttft_p90_s"] / ours[index]["ttft_p90_s"]
    return ratio >= 100, (
        f"at {random[index]['rate']:g} req/s {random[index]['ttft_p90_s']:.3g} s against {ours[index]['ttft_p90_s']:.3g} s: {ratio:.0f} x"
    )


PUBLISHED: Final = {"hyperpod-8k": (-0.72, -0.40, 0.24), "hyperpod-64k": (-0.94, -0.35, 0.38)}
"""HyperPod's figures: change of P50 and P90 TTFT, and of throughput."""


def _against_round_robin(row: Row, runs: Mapping[str, Figures]) -> tuple[bool, str]:
    def change(load: str, key: str) -> float:
        ours, theirs = (runs[f"{row.name}-{load}-{policy}"][policy][key] for policy in ("ttft", "roundrobin"))
        return float(ours / theirs - 1)

    p50, p90, through = PUBLISHED[row.name]
    found = (
        change("steady", "ttft_p50_s"),
        change("steady", "ttft_p90_s"),
        change("overload", "output_tokens_per_s"),
    )
    met = found[0] <= p50 and found[1] <= p90 and found[2] >= through
    return met, f"P50 {found[0]:+.0%}, P90 {found[1]:+.0%}, output tokens/s when overloaded {found[2]:+.0%}"


CLAIMS: Final[Sequence[Claim]] = (
    Claim("{row}: mean TTFT within 2 % of the best other", lambda row: len(row.runs) == 1, _near_best("ttft_mean_s")),
    Claim("{row}: p90 TTFT within 2 % of the best other", lambda row: len(row.runs) == 1, _near_best("ttft_p90_s")),
    Claim(
        "{row}: mean TTFT at least 15 % below the best other", lambda row: bool({"thrash", "neuron"} & row.kind), _ahead
    ),
    Claim("{row}: at least 0.98 of the pooled LRU cache's hits", lambda row: "mooncake" in row.kind, _hits),
    Claim("{row}: within 1 % of `leastload`", lambda row: "unshared" in row.kind, _like_least_load),
    Claim(
        f"{{row}}: at least the best run's reuse of Dynamo {VERSION}'s `kv_router`",
        lambda row: (
            "mooncake" in row.kind and row.name.endswith("-8k")
        ),  # at 6k fleets are overloaded, Dynamo's engine is not
        _dynamo,
    ),
    Claim("{row}: p90 100 times better than random where that saturates", lambda row: "groups" in row.kind, _groups),
    Claim(
        "{row}: HyperPod's P50 -72 % / -94 %, P90 -40 % / -35 %, throughput +24 % / +38 % (8k / 64k)",
        lambda row: "hyperpod" in row.kind,
        _against_round_robin,
    ),
)

SOURCES: Final = (
    "| file | from | licence |",
    "| --- | --- | --- |",
    "| `synthetic_trace.jsonl`, `conversation_trace.jsonl` | github.com/kvcache-ai/Mooncake, `FAST25-release/traces` | Apache-2.0 |",
    "| `weka_claude_code_ranges.jsonl` | github.com/callanjfox/kv-cache-tester, sessions with ids written as ranges | Apache-2.0 |",
    "| `AzureLLMInferenceTrace_conv.csv` | github.com/Azure/AzurePublicDataset | CC BY 4.0 |",
)
