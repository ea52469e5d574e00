"""`warmroute explain`: where a request would go, by several policies side by side, without sending it."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cli.running import complain, run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import aiohttp

    from gateway.config.schema import Config
    from gateway.inspector.sources import InspectorSources
    from policies.base import Policy

_EPILOG = """\
Without --admin nothing is contacted: the configuration's policies decide among its workers, idle and with empty caches.
With --admin the running gateway says what it would do now; a token is taken from WARMROUTE_ADMIN_TOKEN.
"""
_WORKERS = 8


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "explain",
        help="say where a request would go and why, without sending it",
        description="Say where a request would go and why, by the configured policy and others, without sending it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the YAML configuration; needed without --admin")
    parser.add_argument("--request", required=True, metavar="FILE", help="the body, as JSON; - for standard input")
    parser.add_argument("--path", default="/v1/chat/completions", help="the path of the request (default: %(default)s)")
    parser.add_argument("--admin", metavar="URL", help="ask the gateway whose admin listener is there")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="NAME", help="only this policy; may be repeated (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.config is None and arguments.admin is None:
        complain("either --config or --admin is needed")
        return 2
    try:
        raw = sys.stdin.buffer.read() if arguments.request == "-" else Path(arguments.request).read_bytes()
        body = json.loads(raw)
    except (OSError, ValueError) as error:
        complain(f"{arguments.request}: {error}")
        return 2
    if not isinstance(body, dict):
        complain(f"{arguments.request}: a body is a JSON object")
        return 2
    if arguments.admin is not None:
        return _asked(arguments, body)
    from gateway.config.load import load  # noqa: PLC0415 - keeps `warmroute --help` quick
    from gateway.config.problems import ConfigError  # noqa: PLC0415

    try:
        config = load(arguments.config)
    except ConfigError as error:
        complain(f"the configuration has mistakes\n{error}")
        return 2
    return run(_alone(arguments, config, body))


def _asked(arguments: argparse.Namespace, body: dict[str, Any]) -> int:
    from gateway.inspector.asking import AdminClient, AdminError  # noqa: PLC0415

    question = {"path": arguments.path, "body": body, "policies": arguments.policy}
    try:
        document = AdminClient(arguments.admin).post("/api/explain", question)
    except AdminError as error:
        complain(str(error))
        return 1
    _print(document, as_json=arguments.json)
    return 0


async def _alone(arguments: argparse.Namespace, config: "Config", body: dict[str, Any]) -> int:
    """By the configuration alone: fleets, policies and tokenizers are built, and nothing is started."""
    from gateway.fleet.asking import open_session  # noqa: PLC0415
    from gateway.inspector.explaining import Question, UnexplainableError, explain  # noqa: PLC0415
    from gateway.prompt.tokenizer import TokenizerError  # noqa: PLC0415

    session = open_session()
    try:
        sources = _sources(config, session)
        question = Question(path=arguments.path, body=body, headers={}, policies=arguments.policy)
        document = await explain(sources, question)
    except UnexplainableError as error:
        complain(str(error))
        return 1
    except TokenizerError as error:
        complain(f"a model's tokenizer can't be loaded: {error}")
        return 2
    finally:
        await session.close()
    _print(document, as_json=arguments.json)
    return 0


def _sources(config: "Config", session: "aiohttp.ClientSession") -> "InspectorSources":
    """All workers ready, idle and empty; no worker is asked for tokens."""
    import msgspec  # noqa: PLC0415

    from gateway.fleet.fleet import Fleets  # noqa: PLC0415
    from gateway.fleet.worker import WorkerState  # noqa: PLC0415
    from gateway.inspector.sources import InspectorSources  # noqa: PLC0415
    from gateway.prefix.matching import Matching  # noqa: PLC0415
    from gateway.telemetry.decisions import DecisionLog  # noqa: PLC0415
    from gateway.telemetry.metrics import Metrics  # noqa: PLC0415
    from policies.registry import Registry  # noqa: PLC0415

    models = tuple(msgspec.structs.replace(model, oracle="off", pass_token_ids="off") for model in config.models)  # noqa: S106 - tokens of a prompt
    config = msgspec.structs.replace(config, models=models)
    registry = Registry.default()

    def build(name: str) -> "Policy":
        return registry.build(name, config.policies)

    fleets = Fleets.from_config(config, build)
    for worker in fleets.workers():
        worker.state, worker.routable = WorkerState.READY, True
    matching = Matching(config, session)
    matching.use(config, fleets, matching.prepare(config, build))
    return InspectorSources(
        config=lambda: config,
        fleets=lambda: fleets,
        lives=tuple,
        degraded=dict,
        matchers=lambda: matching.matchers,
        index=lambda: None,
        metrics=Metrics(),
        decisions=DecisionLog(config.telemetry.decisions),
        drain=lambda _: False,
        undrain=lambda _: False,
        clock=time.monotonic,
        registry=registry,
    )


def _print(document: "Mapping[str, Any]", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(document, indent=2))
        return
    prompt = document["prompt"]
    tokens = "a prompt that was not looked at" if prompt["tokens"] is None else f"{prompt['tokens']} prompt tokens"
    why = f", {prompt['why']}" if prompt["why"] else ""
    print(f"{document['model']}  {document['path']}  {tokens} ({prompt['how']}{why})")
    for policy in document["policies"]:
        used = "  (in use)" if policy["active"] else ""
        print(f"\n{policy['policy']}{used}: {policy['chosen'] or 'nobody'}\n  {policy['reason']}")
        for note in policy["notes"]:
            print(f"  note: {note}")
        if policy["candidates"]:
            print(_table(policy["candidates"]))


def _table(candidates: "Sequence[Mapping[str, Any]]") -> str:
    rows = [("", "WORKER", "HELD", "IN FLIGHT", "COST", "MADE OF")]
    for each in candidates[:_WORKERS]:
        match, load = each["match"], each["load"]
        slots = "" if load["slots"] is None else f"/{load['slots']}"
        terms = "  ".join(f"{name} {value:.4g}" for name, value in each["terms"].items() if value)
        rows.append(
            (
                ">" if each["chosen"] else " ",
                each["worker"],
                str(match["device"] + match["l1"] + match["l2"]),
                f"{load['in_flight']}{slots}",
                "-" if each["cost"] is None else f"{each['cost']:.4g}",
                f"left out by {each['rejected_by']}" if each["rejected_by"] else terms,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(candidates) > _WORKERS:
        lines.append(f"   and {len(candidates) - _WORKERS} more")
    return "\n".join(f"  {line}" for line in lines)
