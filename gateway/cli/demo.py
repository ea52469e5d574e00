"""`warmroute demo`: a gateway with a fleet of simulated workers, all in this process."""

import argparse
import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cli.running import complain, run, stop_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.app import Gateway
    from gateway.config.residency import WorkerHints
    from gateway.config.schema import Config
    from simulator.server import SharedMemory
    from simulator.server.worker import SimulatedWorker

_MODEL = "sim"
_ALIASES = ("gpt-4o-mini", "claude")
_FIRST_WORKER_PORT = 9001
_READY = 30.0
_MEMORY, _STORAGE = 2, 20
"""With ``--tiers``: times as many blocks as the device holds, of each worker and of all together."""
_CHUNK = 256


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "demo",
        help="run the gateway with simulated Neuron workers: nothing else needed",
        description="Run the gateway with simulated workers in one process. They keep a KV cache, queue, prefill in buckets and take the time "
        "that real ones take; what they say is nonsense. Ctrl-C stops everything.",
    )
    parser.add_argument("--workers", type=_positive, default=4, metavar="N", help="simulated workers (default: 4)")
    parser.add_argument("--port", type=int, metavar="P", help="the gateway's port (default: config.yaml's, else 8080)")
    parser.add_argument("--profile", default="trn1-8b", metavar="NAME", help="what a worker is like (default: trn1-8b)")
    parser.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="the workers' time runs X times as fast (default: 1)"
    )
    parser.add_argument(
        "--tiers",
        action="store_true",
        help="give workers CPU memory and shared storage behind their device's, LMCache's servers to fetch from it, and hints",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="take policies, time limits and the rest from FILE (default: ./config.yaml if there is one); its models are replaced",
    )
    parser.set_defaults(run=_run)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _run(arguments: argparse.Namespace) -> int:
    from gateway.config.problems import ConfigError  # noqa: PLC0415 - keeps `warmroute --help` quick
    from simulator.engine import profile_named  # noqa: PLC0415

    try:
        profile_named(arguments.profile)
    except ValueError as error:
        complain(str(error))
        return 2
    try:
        base = _base(arguments.config)
    except ConfigError as error:
        complain(f"the configuration has mistakes\n{error}")
        return 2
    return run(_demo(arguments, base))


def _base(path: Path | None) -> "Config | None":
    """The configuration that the demo starts from; None for the defaults."""
    from gateway.config.load import load  # noqa: PLC0415

    if path is None:
        path = Path("config.yaml")
        if not path.exists():
            return None
    return load(path)


async def _demo(arguments: argparse.Namespace, base: "Config | None") -> int:
    import structlog  # noqa: PLC0415

    from gateway.app import Gateway  # noqa: PLC0415
    from gateway.config.schema import Logs  # noqa: PLC0415
    from gateway.telemetry import logs  # noqa: PLC0415
    from simulator.server.lmcache_coordinator import LMCacheCoordinator  # noqa: PLC0415

    logging = logs.configure(Logs(level="warning", format="console"))
    workers: list[SimulatedWorker] = []
    coordinator: LMCacheCoordinator | None = None
    try:
        workers = await _start_workers(arguments)
        servers = [worker.lmcache for worker in workers if worker.lmcache is not None]
        if servers:
            coordinator = LMCacheCoordinator(servers, "127.0.0.1", 0)
            await coordinator.start()
        config = _config(arguments, base, workers, coordinator.url if coordinator is not None else "")
        gateway = Gateway(config, logs_dropped=lambda: logging.dropped)
        with stop_signals() as stop:
            try:
                await gateway.start()
            except OSError as error:
                complain(f"can't listen: {error.strerror or error}; choose another port with --port or in config.yaml")
                return 1
            if not await gateway.wait_ready(_READY):
                structlog.get_logger("warmroute").warning("the simulated workers are not ready yet")
            print(_welcome(config, gateway, workers), flush=True)
            await stop.wait()
            print("\nstopping", flush=True)
            await gateway.stop(min(config.grace, 2.0))
    finally:
        if coordinator is not None:
            await coordinator.stop()
        for worker in workers:
            await worker.stop()
        logging.stop()
    return 0


async def _start_workers(arguments: argparse.Namespace) -> "list[SimulatedWorker]":
    from simulator.server import SimulatedWorker, WorkerOptions  # noqa: PLC0415
    from simulator.tokenizer import WorkerTokenizer  # noqa: PLC0415

    tokenizer = WorkerTokenizer()
    shared, tiers = _tiers(arguments)
    workers = []
    for number in range(arguments.workers):
        for port in (_FIRST_WORKER_PORT + number, 0):
            options = WorkerOptions(
                port=port,
                profile=arguments.profile,
                model=_MODEL,
                speed=arguments.speed,
                seed=number,
                kv_events="tcp://127.0.0.1:*",
                kv_events_replay="tcp://127.0.0.1:*",
                **tiers,
            )
            worker = SimulatedWorker(options, tokenizer=tokenizer, shared=shared)
            try:
                await worker.start()
            except OSError as error:
                if port and error.errno == errno.EADDRINUSE:
                    continue
                raise
            workers.append(worker)
            break
    return workers


def _tiers(arguments: argparse.Namespace) -> "tuple[SharedMemory | None, dict[str, Any]]":
    """What the workers have in common, and their options; nothing without ``--tiers``."""
    from simulator.engine import profile_named  # noqa: PLC0415
    from simulator.server import SharedMemory  # noqa: PLC0415

    if not arguments.tiers:
        return None, {}
    profile = profile_named(arguments.profile)
    shared = SharedMemory(_STORAGE * profile.kv_blocks * arguments.workers)
    return shared, {
        "l1_blocks": _MEMORY * profile.kv_blocks,
        "kv_hints": True,
        "lmcache_port": 0,
        "lmcache_chunk": _chunk(profile.block_size),
    }


def _chunk(block_size: int) -> int:
    """Tokens in LMCache's chunks: its own default where that is whole blocks."""
    return -(-_CHUNK // block_size) * block_size


def _hints(worker: "SimulatedWorker") -> "WorkerHints":
    """How the gateway tells a worker what to keep and fetch."""
    from gateway.config.residency import WorkerHints  # noqa: PLC0415

    if worker.lmcache is None:
        return WorkerHints()
    return WorkerHints(driver=("kv-hints", "lmcache"), url=worker.lmcache.url, chunk=worker.options.lmcache_chunk)


def _config(
    arguments: argparse.Namespace, base: "Config | None", workers: "Sequence[SimulatedWorker]", coordinator: str
) -> "Config":
    """The configuration; `coordinator` is the URL of LMCache's, empty where there is none."""
    import msgspec  # noqa: PLC0415

    from gateway.config.directory import L2  # noqa: PLC0415
    from gateway.config.residency import ResidencyConfig  # noqa: PLC0415
    from gateway.config.schema import Capabilities, Config, Model, Worker  # noqa: PLC0415
    from simulator.tokenizer import DATA  # noqa: PLC0415

    policy = base.models[0].policy if base is not None and base.models else "ttft"
    model = Model(
        name=_MODEL,
        aliases=_ALIASES,
        policy=policy,
        tokenizer=str(DATA),
        workers=tuple(
            Worker(
                url=worker.url,
                driver="neuron",
                capabilities=Capabilities(profile=arguments.profile),
                hints=_hints(worker),
            )
            for worker in workers
        ),
        l2=L2(url=coordinator, chunk=workers[0].options.lmcache_chunk) if coordinator else None,
    )
    config = Config(models=(model,)) if base is None else msgspec.structs.replace(base, models=(model,))
    if coordinator and config.residency is None:
        config = msgspec.structs.replace(config, residency=ResidencyConfig())
    if arguments.port is not None:
        config = msgspec.structs.replace(config, listen=msgspec.structs.replace(config.listen, port=arguments.port))
    return config


def _welcome(config: "Config", gateway: "Gateway", workers: "Sequence[SimulatedWorker]") -> str:
    host = "127.0.0.1" if config.listen.host in {"0.0.0.0", "::", ""} else config.listen.host  # noqa: S104 - compared, not bound
    url = f"http://{host}:{gateway.port}"
    admin = f"http://{config.admin.host}:{gateway.admin_port}"
    return f"""\
warmroute is running with {len(workers)} simulated workers ({workers[0].profile.name}).

  OpenAI base URL   {url}/v1      (model {_MODEL}, also known as {" and ".join(_ALIASES)}; any API key)
  Anthropic URL     {url}
  inspector         {admin}         where each request went and why; /readyz  /metrics
  workers           {"  ".join(worker.url for worker in workers)}

Try it:

  curl -N {url}{"/v1/chat/completions"} -H 'content-type: application/json' \\
    -d '{{"model": "{_MODEL}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'

Ctrl-C stops everything."""
