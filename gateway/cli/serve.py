"""`warmroute serve`: run the gateway."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cli.running import complain, run, stop_signals

if TYPE_CHECKING:
    from gateway.config.schema import Config

_LOG_FLUSH = 0.2


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "serve",
        help="run the gateway",
        description="Run the gateway until SIGTERM or Ctrl-C. SIGHUP, or a change of the file, reloads the configuration.",
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the YAML configuration")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from gateway.config.load import load  # noqa: PLC0415 - keeps `warmroute --help` quick
    from gateway.config.problems import ConfigError  # noqa: PLC0415

    try:
        config = load(arguments.config)
    except ConfigError as error:
        complain(f"the configuration has mistakes\n{error}")
        return 2
    return run(_serve(config, arguments.config))


async def _serve(config: "Config", path: Path) -> int:
    import structlog  # noqa: PLC0415

    from gateway.admission.keys import KeysError  # noqa: PLC0415
    from gateway.app import Gateway  # noqa: PLC0415
    from gateway.prompt.tokenizer import TokenizerError  # noqa: PLC0415
    from gateway.telemetry import logs  # noqa: PLC0415

    logging = logs.configure(config.telemetry.logs)
    lost = 0
    written = config.telemetry.logs

    def follow(reloaded: "Config") -> None:
        """Take over level and format of the log lines; `requests` is the gateway's own business."""
        nonlocal logging, lost, written
        before, written = written, reloaded.telemetry.logs
        if (before.level, before.format) != (written.level, written.format):
            logging.stop(_LOG_FLUSH)  # this blocks the event loop
            lost += logging.dropped
            logging = logs.configure(written)

    log = structlog.get_logger("warmroute")
    try:
        gateway = Gateway(config, config_path=path, logs_dropped=lambda: lost + logging.dropped, on_reload=follow)
        with stop_signals(gateway.request_reload) as stop:
            try:
                await gateway.start()
            except OSError as error:
                complain(f"can't listen: {error}")
                return 1
            except KeysError as error:
                complain(f"a tenant's keys can't be used: {error}")
                return 2
            except TokenizerError as error:
                complain(f"a model's tokenizer can't be loaded: {error}")
                return 2
            log.info(
                "serving",
                listen=f"{config.listen.host}:{gateway.port}",
                admin=f"{config.admin.host}:{gateway.admin_port}",
                models=[model.name for model in config.models],
                workers=sum(len(model.workers) for model in config.models),
            )
            await stop.wait()
            log.info("stopping", grace_s=config.grace)
            await gateway.stop()
            log.info("stopped")
    finally:
        logging.stop()
    return 0
