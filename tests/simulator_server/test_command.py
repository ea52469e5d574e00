import argparse
import asyncio
import os
import signal
import socket
import sys

import pytest

from gateway.cli.simulate_worker import add_parser
from simulator.engine import PROFILES

COMMAND = (
    "import argparse, sys\n"
    "from gateway.cli import simulate_worker\n"
    "parser = argparse.ArgumentParser(prog='warmroute')\n"
    "simulate_worker.add_parser(parser.add_subparsers())\n"
    "arguments = parser.parse_args(['simulate-worker', *sys.argv[1:]])\n"
    "sys.exit(arguments.run(arguments))\n"
)


async def command(*arguments):
    """The command in a process of its own; only this one command, so that the others may be broken."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "error", "-c", COMMAND),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "100"},
    )


async def finished(*arguments):
    """(status, stdout, stderr) of a command that ends by itself."""
    process = await command(*arguments)
    async with asyncio.timeout(20):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_serves_until_a_signal_and_ends_with_0(http, chat, number):
    process = await command(
        "--port", "0", "--profile", "h100-8b", "--speed", "100", "--model", "m", "--kv-events", "tcp://127.0.0.1:*"
    )
    async with asyncio.timeout(20):
        line = (await process.stdout.readline()).decode()
        assert line.startswith("h100-8b worker on http://127.0.0.1:")
        assert (await process.stdout.readline()).startswith(b"KV events on tcp://127.0.0.1:")
        url = line.split()[3].rstrip(",")
        async with http.post(url + "/v1/chat/completions", json=chat(max_tokens=3, model="m")) as response:
            assert response.status == 200
        async with http.post(url + "/v1/chat/completions", json=chat(max_tokens=100_000 // 2, model="m", stream=True)):
            process.send_signal(number)
            out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"", b"")


async def test_a_port_in_use_ends_it_with_1_and_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = await finished("--port", str(port))
    assert status == 1
    assert f"can't listen on 127.0.0.1:{port}" in err
    assert "Traceback" not in err


async def test_an_unknown_profile_ends_it_with_2_and_the_nearest_name():
    status, _, err = await finished("--profile", "trn1-8")
    assert (status, err) == (2, "no profile 'trn1-8'; did you mean trn1-8b?\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--speed", "0"),
        ("--error-rate", "2"),
        ("--kv-blocks", "none"),
        ("--kv-blocks", "1"),  # holds no request of the profile's length
        ("--error-status", "200"),
        ("--tokenizer", "/nowhere"),
    ],
)
async def test_wrong_use_ends_it_with_2_and_one_message(arguments):
    status, out, err = await finished("--port", "0", *arguments)
    assert (status, out) == (2, "")
    assert err
    assert "Traceback" not in err


async def test_a_malformed_address_for_events_ends_it_with_1():
    status, _, err = await finished("--port", "0", "--kv-events", "nonsense*")
    assert status == 1
    assert "can't publish KV events" in err


async def test_help_names_every_flag_with_its_default():
    status, out, _ = await finished("--help")
    assert status == 0
    for flag in ("--profile", "--kv-events-replay", "--speed", "--warm-up", "--error-rate", "--seed"):
        assert flag in out
    assert "default" in out


def test_help_lists_the_profiles_that_exist():
    commands = argparse.ArgumentParser().add_subparsers()
    add_parser(commands)
    text = commands.choices["simulate-worker"].format_help()
    assert all(name in text for name in PROFILES)
