"""`warmroute top`: fleets and requests of a running gateway, live in a terminal."""

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from gateway.cli.running import complain

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from gateway.inspector.asking import AdminClient

_EPILOG = "Keys: q quits, p pauses. A token is taken from WARMROUTE_ADMIN_TOKEN."
_STATES: Final[Mapping[str, str]] = {"ready": "green", "warming": "yellow", "draining": "yellow", "ejected": "red"}
_FEEDS: Final[Mapping[str, str]] = {"events": "green", "gap": "yellow", "connecting": "red"}
_HEAD: Final = 8
"""Lines that are neither a worker's nor a request's."""


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "top",
        help="watch a running gateway in the terminal",
        description="Fleets and requests of a running gateway, live in the terminal.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--admin", default="http://127.0.0.1:8081", metavar="URL", help="its admin listener (default: %(default)s)"
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="print once and end; so does output that is no terminal")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console  # noqa: PLC0415 - keeps `warmroute --help` quick

    from gateway.inspector.asking import AdminClient, AdminError  # noqa: PLC0415

    console = Console(highlight=False)
    try:
        client = AdminClient(arguments.admin)
        if arguments.once or not (console.is_terminal and sys.stdin.isatty()):
            console.print(_screen(*_look(client, 20), None, 20))
            return 0
        _watch(client, console, max(0.1, arguments.interval))
    except AdminError as error:
        complain(str(error))
        return 1
    return 0


def _look(client: "AdminClient", requests: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = client.get(f"/api/requests?limit={requests}&running=true")
    return client.get("/api/fleet"), [*found["running"], *found["requests"]]


def _watch(client: "AdminClient", console: Any, interval: float) -> None:
    """Until q is pressed."""
    from rich.live import Live  # noqa: PLC0415

    before: dict[str, Any] | None = None
    paused = False
    with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if not paused:
                fleet, requests = _look(client, console.height)
                workers = sum(len(each["workers"]) + 4 for each in fleet["fleets"])
                live.update(_screen(fleet, requests, before, max(3, console.height - workers - _HEAD)), refresh=True)
                before = fleet
            match _key(interval):
                case "q" | "Q" | "\x03":
                    return
                case "p":
                    paused = not paused


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """The terminal gives each key at once, and does not show it."""
    import termios  # noqa: PLC0415 - there is none on Windows
    import tty  # noqa: PLC0415

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _key(seconds: float) -> str:
    """The next key, or nothing when that time is over. A closed terminal is the same as q."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") or "q" if ready else ""


def _screen(
    fleet: Mapping[str, Any], requests: list[dict[str, Any]], before: Mapping[str, Any] | None, room: int
) -> "Group":
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    totals = fleet["totals"]
    rate = ""
    if before is not None and fleet["time"] > before["time"]:
        ended = sum(totals[name] - before["totals"][name] for name in ("completed", "failed", "client_gone"))
        rate = f"{ended / (fleet['time'] - before['time']):.1f} requests/s   "
    cached = totals["cached_tokens"] / totals["prompt_tokens"] if totals["prompt_tokens"] else 0.0
    head = Text.assemble(
        ("warmroute ", "bold"),
        fleet["version"],
        f"   {rate}{totals['in_flight']} in flight   {totals['accepted']} accepted   {totals['failed']} failed"
        f"   {cached:.0%} of prompt tokens from cache   {time.strftime('%H:%M:%S', time.localtime(fleet['time']))}",
    )
    parts: list[Any] = [head]
    for each in fleet["fleets"]:
        parts += [Text(), _workers(each), *(Text(text, "yellow") for text in each["degraded"])]
    return Group(*parts, Text(), _requests(requests[:room]))


def _workers(fleet: Mapping[str, Any]) -> "Table":
    from rich.text import Text  # noqa: PLC0415

    title = f"{fleet['model']}: {fleet['ready']} of {fleet['total']} ready, policy {fleet['policy']}"
    table = _table(title, "worker", "state", "slots>", "queue>", "KV>", "hits>", "first token>", "prefill>", "events")
    for worker in fleet["workers"]:
        feed, kv, tokens = worker["feed"], worker["kv"], worker["tokens"]
        status = feed["status"] if feed else "-"
        full = kv["device"] / kv["capacity"] if kv["device"] is not None and kv["capacity"] else None
        table.add_row(
            Text(worker["id"]),
            Text(worker["state"], _STATES.get(worker["state"], "")),
            f"{worker['in_flight']}" + ("" if worker["slots"] is None else f"/{worker['slots']}"),
            f"{worker['pending']} {_seconds(worker['backlog'])}" if worker["pending"] else "-",
            "-" if full is None else f"{full:.0%}",
            f"{tokens['cached'] / tokens['prompt']:.0%}" if tokens["prompt"] else "-",
            _seconds(worker["ttft"]),
            f"{worker['learned']['rate']:,.0f}/s",
            Text(status, _FEEDS.get(status, "")),
        )
    return table


def _requests(requests: list[dict[str, Any]]) -> "Table":
    from rich.text import Text  # noqa: PLC0415

    table = _table(
        "requests", "began", "status", "model", "worker", "first byte>", "total>", "prompt>", "cached>", "output>"
    )
    for each in requests:
        bad = each["outcome"] == "failed"
        status = "running" if each["outcome"] == "running" else f"{each['status'] or '-'} {each['error'] or ''}".strip()
        prompt, cached = each["prompt_tokens"], each["cached_tokens"]
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(each["time"])),
            Text(status, "red" if bad else "yellow" if each["error"] else ""),
            Text(each["model"] or "-"),
            Text(each["worker"] or "-"),
            _seconds(each["ttft"]),
            _seconds(each["total"]),
            "-" if prompt is None else f"{prompt:,}",
            f"{cached / prompt:.0%}" if prompt and cached is not None else "-",
            "-" if each["output_tokens"] is None else f"{each['output_tokens']:,}",
        )
    return table


def _table(title: str, *columns: str) -> "Table":
    """Column names that end with > are of numbers."""
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(
        title=Text(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        header_style="dim",
        expand=True,
        pad_edge=False,
    )
    for name in columns:
        right = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 0.0995:
        return f"{value * 1000:.1f} ms"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"
