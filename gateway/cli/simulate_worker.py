"""``warmroute simulate-worker``: one worker that looks like vLLM from outside and needs no accelerator."""

import argparse
import asyncio
import difflib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.server import WorkerOptions

DESCRIPTION = """\
Serve one simulated worker: vLLM's HTTP API with streaming, /metrics and KV events, timed like the accelerator
of a profile. What it says is made of words and depends on the prompt alone.

  warmroute simulate-worker --port 9001 --kv-events 'tcp://*:5557' --kv-events-replay 'tcp://*:5657'
  curl localhost:9001/v1/chat/completions -H 'content-type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "hello"}]}'

Faults can also be set while it runs: POST /simulator/faults with {"error_rate": 0.1}, {"slow_factor": 5},
{"refuse": true}, {"clear": true} ...; GET /simulator/state tells what is going on.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "simulate-worker",
        help="serve one simulated worker",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port, 0 for a free one (default: %(default)s)")
    parser.add_argument("--profile", default="trn1-8b", metavar="NAME", help=_profiles_help())
    parser.add_argument(
        "--model", default="simulated", metavar="NAME", help="the model it claims to be (default: %(default)s)"
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names for requests (default: that of --model)",
    )
    parser.add_argument(
        "--lora-module", action="append", default=[], metavar="NAME", help="also serve this adapter; repeatable"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder with tokenizer.json and a chat template (default: a small one)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="what /v1 asks for as a bearer token (default: nothing)")
    parser.add_argument("--enable-request-id-headers", action="store_true", help="send X-Request-Id back")
    parser.add_argument(
        "--seed", type=int, default=0, help="of ids and faults; text does not depend on it (default: %(default)s)"
    )

    time = parser.add_argument_group("time and size")
    time.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X", help="simulated seconds per real second (default: 1)"
    )
    time.add_argument(
        "--warm-up",
        type=_not_negative,
        default=0.0,
        metavar="S",
        help="simulated seconds of 503 after the start (default: 0)",
    )
    time.add_argument(
        "--max-model-len",
        type=_count,
        metavar="N",
        help="prompt and answer together, in tokens (default: the profile's)",
    )
    time.add_argument("--kv-blocks", type=_count, metavar="N", help="KV blocks on the device (default: the profile's)")
    time.add_argument("--block-size", type=_count, metavar="N", help="tokens per block (default: the profile's)")
    time.add_argument("--slots", type=_count, metavar="N", help="requests in the batch (default: the profile's)")

    time.add_argument("--l1-blocks", type=_bytes, metavar="N", help="blocks in CPU memory (default: the profile's)")
    time.add_argument("--l2-blocks", type=_bytes, metavar="N", help="blocks in shared storage (default: the profile's)")

    hints = parser.add_argument_group("hints")
    hints.add_argument("--kv-hints", action="store_true", help="requests may carry kv_hints, and they have an effect")
    hints.add_argument(
        "--lmcache-port", type=_bytes, metavar="PORT", help="serve an LMCache multiprocess server here (0: a free port)"
    )
    hints.add_argument(
        "--lmcache-coordinator-port", type=_bytes, metavar="PORT", help="the same for an LMCache coordinator"
    )
    hints.add_argument(
        "--lmcache-chunk", type=_count, default=256, metavar="N", help="tokens in LMCache's chunks (default: 256)"
    )

    events = parser.add_argument_group("KV events")
    events.add_argument("--kv-events", metavar="ADDRESS", help="publish here, e.g. 'tcp://*:5557' (default: no events)")
    events.add_argument(
        "--kv-events-replay", metavar="ADDRESS", help="answer replay requests here (default: no replay)"
    )
    events.add_argument(
        "--kv-events-encoding",
        choices=("map", "array"),
        default="map",
        help="array: as vLLM before 0.24 (default: %(default)s)",
    )
    events.add_argument("--topic", help="first frame of each message (default: kv@HOST:PORT@MODEL)")

    faults = parser.add_argument_group("faults from the start")
    faults.add_argument(
        "--error-rate", type=_share, default=0.0, metavar="P", help="share of requests that fail, 0 to 1 (default: 0)"
    )
    faults.add_argument(
        "--error-status", type=int, default=500, metavar="CODE", help="the status of those (default: %(default)s)"
    )
    faults.add_argument(
        "--slow-factor",
        type=_positive,
        default=1.0,
        metavar="X",
        help="everything takes so many times longer (default: 1)",
    )
    faults.add_argument("--hang", action="store_true", help="read requests and never answer")
    faults.add_argument(
        "--refuse", action="store_true", help="refuse connections, until POST /simulator/faults is no way in either"
    )
    faults.add_argument(
        "--reset-after-bytes", type=_bytes, metavar="N", help="reset each connection after N bytes of an answer"
    )
    faults.add_argument(
        "--stop-after-tokens", type=_bytes, metavar="N", help="end streams after N chunks, without [DONE]"
    )
    faults.add_argument(
        "--cut-after-tokens", type=_bytes, metavar="N", help="close the connection after N chunks of a stream"
    )
    faults.add_argument(
        "--malformed-after-tokens", type=_bytes, metavar="N", help="send what is no chunk after N chunks"
    )
    faults.add_argument(
        "--drop-events-share",
        type=_share,
        default=0.0,
        metavar="P",
        help="share of KV event batches lost, 0 to 1 (default: 0)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; 0 then, 1 when it could not start, 2 for wrong use."""
    from simulator.engine import PROFILES  # noqa: PLC0415  # the other commands start faster without

    if arguments.profile not in PROFILES:
        nearest = difflib.get_close_matches(arguments.profile, PROFILES, n=1, cutoff=0.0)
        print(f"no profile {arguments.profile!r}; did you mean {nearest[0]}?", file=sys.stderr)
        return 2
    try:
        options = _options(arguments)
        options.resolved_profile()
    except ValueError as error:
        print(f"simulate-worker: {error}", file=sys.stderr)
        return 2
    try:
        import uvloop  # noqa: PLC0415

        return uvloop.run(_serve(options))
    except ImportError:
        return asyncio.run(_serve(options))


def _options(arguments: argparse.Namespace) -> "WorkerOptions":
    """What the worker is told.

    Raises:
        ValueError: a value is out of its range.
    """
    from simulator.server import Faults, WorkerOptions  # noqa: PLC0415
    from simulator.tokenizer import DATA  # noqa: PLC0415

    names = (
        *("refuse", "hang", "reset_after_bytes", "error_rate", "error_status", "slow_factor"),
        *("stop_after_tokens", "cut_after_tokens", "malformed_after_tokens", "drop_events_share"),
    )
    return WorkerOptions(
        host=arguments.host,
        port=arguments.port,
        profile=arguments.profile,
        model=arguments.model,
        served_model_names=tuple(arguments.served_model_name),
        lora_modules=tuple(arguments.lora_module),
        kv_events=arguments.kv_events,
        kv_events_replay=arguments.kv_events_replay,
        kv_events_encoding=arguments.kv_events_encoding,
        topic=arguments.topic,
        speed=arguments.speed,
        warm_up=arguments.warm_up,
        max_model_len=arguments.max_model_len,
        kv_blocks=arguments.kv_blocks,
        block_size=arguments.block_size,
        slots=arguments.slots,
        l1_blocks=arguments.l1_blocks,
        l2_blocks=arguments.l2_blocks,
        kv_hints=arguments.kv_hints,
        lmcache_port=arguments.lmcache_port,
        lmcache_coordinator_port=arguments.lmcache_coordinator_port,
        lmcache_chunk=arguments.lmcache_chunk,
        api_key=arguments.api_key,
        request_id_headers=arguments.enable_request_id_headers,
        tokenizer=arguments.tokenizer or DATA,
        faults=Faults(**{name: getattr(arguments, name) for name in names}),
        seed=arguments.seed,
    )


async def _serve(options: "WorkerOptions") -> int:
    """Run the worker until a signal; the exit status."""
    import zmq  # noqa: PLC0415

    from simulator.server import SimulatedWorker  # noqa: PLC0415

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        worker = SimulatedWorker(options)
    except (OSError, ValueError) as error:
        print(f"simulate-worker: {error}", file=sys.stderr)
        return 2
    try:
        await worker.start()
    except zmq.ZMQError as error:
        print(f"simulate-worker: can't publish KV events: {error}", file=sys.stderr)
        return 1
    except (OSError, OverflowError) as error:
        print(f"simulate-worker: can't listen on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    print(f"{worker.profile.name} worker on {worker.url}, model {options.served_names[0]}", flush=True)
    if worker.publisher is not None:
        print(f"KV events on {worker.publisher.endpoint}, topic {worker.publisher.topic}", flush=True)
    for name, server in (("server", worker.lmcache), ("coordinator", worker.lmcache_coordinator)):
        if server is not None:
            print(f"LMCache {name} on {server.url}", flush=True)
    await stop.wait()
    await worker.stop()
    return 0


def _profiles_help() -> str:
    return "what it is timed like: trn2-70b, trn1-8b, inf2-8b, h100-8b, h100x2-32b (default: %(default)s)"


def _positive(text: str) -> float:
    """A number above 0, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be greater than 0")
    return value


def _not_negative(text: str) -> float:
    """A number from 0 on, for argparse."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def _share(text: str) -> float:
    """A number between 0 and 1, for argparse."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be between 0 and 1")
    return value


def _count(text: str) -> int:
    """A whole number above 0, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _bytes(text: str) -> int:
    """A whole number from 0 on, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value
