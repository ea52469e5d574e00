"""``warmroute replay``: recorded or made-up traffic through policies and a simulated fleet, in virtual time."""

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gateway.cli.running import complain
from gateway.config.schema import DEFAULT_POLICY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.config.residency import ResidencyConfig
    from policies.registry import PolicySection
    from simulator.fleet import FleetOptions, ReplayResult, TierOptions
    from simulator.fleet.admission import AdmissionOptions
    from simulator.workloads import Workload

_DESCRIPTION = """\
Try policies on your own traffic before production does: hours of it through the very policies, prefix map and
load counters of the gateway, against simulated workers, in seconds.

  warmroute replay trace.jsonl --format mooncake --policy roundrobin --policy ttft --workers 8
  warmroute replay requests.jsonl --format warmroute --profile trn2-70b --html report.html   (the gateway's own request log)
  warmroute replay --generate chat --set users=200 --policy session --policy ttft
"""
_EPILOG = """\
Without --profile the workers are those of the explicit numbers: one prefill at a time, first come first served, no
buckets. With --profile, each number given takes the place of the profile's.
Exit status: 0 when all was replayed, 2 for wrong use or a file that cannot be read (with its line).
"""
_DEFAULT_POLICIES: Final = ("roundrobin", "leastload", DEFAULT_POLICY)
_COLUMNS: Final = (
    ("hit_rate", "hit rate", "{:.3f}"),
    ("ttft_mean_s", "TTFT mean", "{:.3f} s"),
    ("ttft_p50_s", "p50", "{:.3f} s"),
    ("ttft_p90_s", "p90", "{:.3f} s"),
    ("ttft_p99_s", "p99", "{:.3f} s"),
    ("e2e_mean_s", "end to end", "{:.2f} s"),
    ("output_tokens_per_s", "output tok/s", "{:,.0f}"),
    ("load_max_over_mean", "max/mean load", "{:.2f}"),
    ("refused", "refused", "{}"),
    ("failed", "failed", "{}"),
    ("wall_s", "took", "{:.1f} s"),
)

_FATES: Final = ("skipped", "refused", "failed", "accepted", "confirmed", "useful", "wasted")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "replay",
        help="try policies on recorded traffic, in virtual time",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="recorded traffic, plain or gzip")
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--format", metavar="NAME", help="of FILE: mooncake, weka, azure, vidur, warmroute (its request log)"
    )
    traffic.add_argument(
        "--generate", metavar="NAME", help="make it up instead: groups, chat, documents, rufus, unique"
    )
    traffic.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="a parameter of the format or the generator; repeatable",
    )
    traffic.add_argument("--limit", type=_count, metavar="N", help="only the first N requests")
    traffic.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X", help="arrivals come X times as fast (default: 1)"
    )
    traffic.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random (default: 0)")
    choice = parser.add_argument_group("policies")
    choice.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help=f"to try; repeatable (default: {', '.join(_DEFAULT_POLICIES)})",
    )
    choice.add_argument("--config", type=Path, metavar="FILE", help="take policies of your own from a configuration")
    choice.add_argument(
        "--learn-speed",
        action="store_true",
        help="do not tell the policies how fast the workers prefill: they find out",
    )
    choice.add_argument(
        "--event-lag", type=_seconds, default=0.005, metavar="S", help="until a KV event is known (default: 0.005)"
    )
    choice.add_argument(
        "--event-loss", type=_share, default=0.0, metavar="P", help="share of KV event batches lost (default: 0)"
    )
    choice.add_argument(
        "--admission",
        choices=("on", "off"),
        default="off",
        help="requests wait for their turn in the gateway, by the stages and the admission of --config (default: off)",
    )
    choice.add_argument(
        "--hints",
        default="off",
        metavar="on|off|RULE,...",
        help="tell the workers what to keep and fetch: by the residency of --config or its defaults, or by these rules (default: off)",
    )
    fleet = parser.add_argument_group("workers")
    fleet.add_argument("--workers", type=_count, default=8, metavar="N", help="how many (default: 8)")
    fleet.add_argument("--profile", metavar="NAME", help="trn2-70b, trn1-8b, inf2-8b, h100-8b, h100x2-32b")
    fleet.add_argument("--block-tokens", type=_count, metavar="N", help="tokens per KV block (default: 512)")
    fleet.add_argument("--kv-tokens", type=_count, metavar="N", help="tokens in the KV cache (default: 1228800)")
    fleet.add_argument("--prefill-rate", type=_positive, metavar="R", help="tokens per second (default: 8000)")
    fleet.add_argument("--overhead-ms", type=_seconds, metavar="MS", help="of each prefill (default: 30)")
    fleet.add_argument("--itl-ms", type=_positive, metavar="MS", help="of each output token (default: 20)")
    fleet.add_argument("--slots", type=_count, metavar="N", help="requests that run at once (default: 256)")
    fleet.add_argument("--max-model-len", type=_count, metavar="N", help="prompt and answer (default: the cache)")
    fleet.add_argument(
        "--tier",
        action="append",
        default=[],
        type=_tier,
        metavar="l1=TOKENS:GBPS",
        help="memory below the device's: l1 of each worker, l2 of all together, with gigabytes per second; repeatable",
    )
    fleet.add_argument(
        "--kv-bytes-per-token", type=_count, metavar="N", help="for the time that tiers take (default: 131072)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="OUT", help="write all figures to OUT")
    output.add_argument("--html", type=Path, metavar="OUT", help="write a report with plots to OUT")
    output.add_argument("--jobs", type=_count, metavar="N", help="processes (default: one per policy and core)")
    output.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Replay, and tell what came out; 0, or 2 when something in `arguments` is wrong."""
    from gateway.config.problems import ConfigError  # noqa: PLC0415 - keeps `warmroute --help` quick
    from policies.parameters import PolicyError  # noqa: PLC0415
    from simulator.fleet import side_by_side  # noqa: PLC0415

    policies = list(dict.fromkeys(arguments.policy or _DEFAULT_POLICIES))
    try:
        options = _options(arguments)
        sections = _sections(arguments.config)
        _check_policies(policies, sections)
        workload = _workload(arguments)
        progress = _Bar() if sys.stderr.isatty() and not arguments.quiet else None
        results = side_by_side(
            workload,
            options,
            policies,
            sections=sections,
            jobs=arguments.jobs,
            progress=progress.show if progress else None,
        )
        if progress is not None:
            progress.clear()
    except ConfigError as error:
        complain(f"the configuration has mistakes\n{error}")
        return 2
    except (PolicyError, ValueError) as error:
        complain(str(error))
        return 2
    print(_table(workload, options, results))
    for result in results:
        if result.faults:
            complain(f"{result.policy} misbehaved {result.faults} times, and load decided then: {result.last_fault}")
    return _write(arguments, workload, options, results)


def _write(
    arguments: argparse.Namespace, workload: "Workload", options: "FleetOptions", results: "Sequence[ReplayResult]"
) -> int:
    """The files that were asked for; 0, or 2 when one cannot be written."""
    import orjson  # noqa: PLC0415
    from msgspec import to_builtins  # noqa: PLC0415

    try:
        if arguments.json is not None:
            data = _document(workload, options, results)
            text = orjson.dumps(data, to_builtins, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
            arguments.json.write_bytes(text)
        if arguments.html is not None:
            from simulator.report import write_html  # noqa: PLC0415

            write_html(results, arguments.html, command=_command(), notes=workload.notes)
    except OSError as error:
        complain(f"can't write {error.filename}: {error.strerror}")
        return 2
    return 0


def _workload(arguments: argparse.Namespace) -> "Workload":
    """What arrives.

    Raises:
        ValueError: says what is wrong: with the file and its line, or with the arguments.
    """
    from simulator.workloads import generate, load  # noqa: PLC0415

    settings = dict(arguments.set)
    if arguments.generate is not None:
        if arguments.file is not None or arguments.format is not None:
            raise ValueError("either FILE with --format or --generate, not both")
        workload = generate(arguments.generate, seed=arguments.seed, **settings)
    elif arguments.file is None:
        raise ValueError("nothing to replay: name a FILE with its --format, or --generate traffic")
    elif arguments.format is None:
        raise ValueError(f"what is {arguments.file}? Say it with --format: mooncake, weka, azure, vidur or warmroute")
    else:
        workload = load(arguments.file, arguments.format, seed=arguments.seed, **settings)
    return workload if arguments.limit is None else workload.first(arguments.limit)


def _options(arguments: argparse.Namespace) -> "FleetOptions":
    """The fleet.

    Raises:
        ValueError: the numbers make no sense together.
    """
    from simulator.engine import profile_named  # noqa: PLC0415
    from simulator.fleet import FleetOptions, WorkerOptions  # noqa: PLC0415

    worker = WorkerOptions(
        block_tokens=arguments.block_tokens,
        kv_tokens=arguments.kv_tokens,
        prefill_rate=arguments.prefill_rate,
        overhead=None if arguments.overhead_ms is None else arguments.overhead_ms / 1000,
        itl=None if arguments.itl_ms is None else arguments.itl_ms / 1000,
        slots=arguments.slots,
        max_model_len=arguments.max_model_len,
        tiers=dict(arguments.tier),
        kv_bytes_per_token=arguments.kv_bytes_per_token,
    )
    return FleetOptions(
        profile=worker.apply(None if arguments.profile is None else profile_named(arguments.profile)),
        workers=arguments.workers,
        speed=arguments.speed,
        event_lag=arguments.event_lag,
        event_loss=arguments.event_loss,
        seed=arguments.seed,
        speed_told=not arguments.learn_speed,
        admission=_admission(arguments.config) if arguments.admission == "on" else None,
        residency=_residency(arguments.hints, arguments.config),
    )


def _residency(words: str, path: Path | None) -> "ResidencyConfig | None":
    """What the workers are told; None: nothing.

    Args:
        words: ``off``, ``on``, or names of rules: only those are on then.
        path: of a configuration, whose section `residency` has the numbers.

    Raises:
        ConfigError: the configuration has mistakes.
        ValueError: there is no such rule.
    """
    from msgspec.structs import replace  # noqa: PLC0415

    from gateway.config.residency import ResidencyConfig  # noqa: PLC0415

    if words == "off":
        return None
    section = None
    if path is not None:
        from gateway.config.load import load  # noqa: PLC0415

        section = load(path).residency
    section = section or ResidencyConfig()
    if words == "on":
        return section
    rules = section.rules
    fields = {name.replace("_", "-"): name for name in rules.__struct_fields__}
    wanted = [word.strip() for word in words.split(",")]
    unknown = [word for word in wanted if word not in fields]
    if unknown:
        raise ValueError(f"--hints: no rule {unknown[0]!r}; on, off, or some of {', '.join(fields)}")
    chosen = {field: (getattr(rules, field) or True) if name in wanted else False for name, field in fields.items()}
    return replace(section, rules=replace(rules, **chosen))


def _admission(path: Path | None) -> "AdmissionOptions":
    """Stages and admission as a configuration has them: that of its first model which has any; else the defaults.

    Raises:
        ConfigError: it has mistakes.
    """
    from gateway.config.schema import Admission  # noqa: PLC0415
    from simulator.fleet.admission import AdmissionOptions  # noqa: PLC0415

    if path is None:
        return AdmissionOptions()
    from gateway.config.load import load  # noqa: PLC0415

    config = load(path)
    return AdmissionOptions(
        settings=next((model.admission for model in config.models if model.admission is not None), Admission()),
        stages=config.stages,
        weights={name: tenant.weight for name, tenant in config.tenants.items()},
    )


def _sections(path: Path | None) -> "Mapping[str, PolicySection]":
    """The policies of a configuration.

    Raises:
        ConfigError: it has mistakes.
    """
    if path is None:
        return {}
    from gateway.config.load import load  # noqa: PLC0415

    return load(path).policies


def _check_policies(policies: "Sequence[str]", sections: "Mapping[str, PolicySection]") -> None:
    """Build each once, so that mistakes show before the file is read.

    Raises:
        PolicyError: one makes no sense.
    """
    from policies.registry import Registry  # noqa: PLC0415

    for policy in policies:
        Registry.default().build(policy, sections)


def _document(workload: "Workload", options: "FleetOptions", results: "Sequence[ReplayResult]") -> "dict[str, Any]":
    """All figures and what they hold for."""
    from dataclasses import asdict  # noqa: PLC0415

    from gateway import __version__  # noqa: PLC0415

    return {
        "version": __version__,
        "command": _command(),
        "workload": {
            "name": workload.name,
            "requests": len(workload.requests),
            "block_tokens": workload.block_tokens,
            "prompt_tokens": sum(request.prompt_tokens for request in workload.requests),
            "output_tokens": sum(request.output_tokens for request in workload.requests),
            "seed": workload.seed,
            "notes": list(workload.notes),
        },
        "fleet": asdict(options),
        "policies": {result.policy: result.summary() for result in results},
    }


def _command() -> str:
    """How the replay can be done again."""
    return shlex.join(["warmroute", *sys.argv[1:]])


def _table(workload: "Workload", options: "FleetOptions", results: "Sequence[ReplayResult]") -> str:
    """The results for people."""
    profile = options.profile
    count = len(workload.requests)
    tokens = sum(request.prompt_tokens for request in workload.requests)
    head = (
        f"{workload.name}: {count:,} requests, {tokens:,} prompt tokens, over {options.workers} x {profile.name} "
        f"({profile.kv_blocks * profile.block_size:,} tokens of KV cache, {profile.prefill_rate:,.0f} tokens/s)"
    )
    rows = [["policy", *(title for _, title, _ in _COLUMNS)]]
    for result in results:
        figures = result.summary()
        rows.append(
            [
                result.policy,
                *("-" if figures[key] is None else pattern.format(figures[key]) for key, _, pattern in _COLUMNS),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    first = results[0]
    bounds = (
        f"Hit rates are shares of prompt tokens. One cache of all workers' size would reach {first.pooled_lru_hit_rate:.3f}, "
        f"an endless one {first.infinite_hit_rate:.3f}."
    )
    return "\n".join([head, *workload.notes, "", *lines, "", bounds, *_hints(results)])


def _hints(results: "Sequence[ReplayResult]") -> list[str]:
    """What became of the hints, a line for each policy and rule that gave some."""
    lines = []
    for result in results:
        for rule, row in (result.hints or {}).items():
            if row.get("offered"):
                counts = ", ".join(f"{row[fate]:,} {fate}" for fate in _FATES if row.get(fate))
                held = f"; held back: {row['held_back']:,}" if row.get("held_back") else ""
                lines.append(f"{result.policy}, hints of {rule}: {row['offered']:,} offered, {counts}{held}.")
    return ["", *lines] if lines else []


class _Bar:
    """A line on standard error. By hand: it is these few lines, and no dependency for one command."""

    _WIDTH: Final = 30
    _PAUSE: Final = 0.1

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = 0.0

    def show(self, done: int, total: int) -> None:
        """So many of so many requests have ended."""
        now = time.monotonic()
        if now - self._shown < self._PAUSE:
            return
        self._shown = now
        share = done / max(1, total)
        filled = round(share * self._WIDTH)
        left = (now - self._start) * (1 - share) / share if share else 0.0
        bar = "█" * filled + "░" * (self._WIDTH - filled)
        sys.stderr.write(f"\r{bar} {share:4.0%}  {done:,} of {total:,} requests, {left:.0f} s left\x1b[K")
        sys.stderr.flush()

    def clear(self) -> None:
        """Take it away."""
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.replace("-", "_"), value


def _tier(text: str) -> "tuple[str, TierOptions]":
    """``l1=TOKENS:GBPS``."""
    from simulator.fleet import TierOptions  # noqa: PLC0415

    name, _, rest = text.partition("=")
    tokens, _, rate = rest.partition(":")
    try:
        tier = TierOptions(tokens=int(tokens), bandwidth=float(rate) * 1e9)
    except ValueError:
        tier = TierOptions(tokens=0, bandwidth=0.0)
    if name not in {"l1", "l2"} or tier.tokens < 1 or not 0 < tier.bandwidth < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not like l1=1000000:40 (tokens, gigabytes per second)")
    return name, tier


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("must be greater than 0")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError("must be at least 0")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError("must be between 0 and 1")
    return number
