import asyncio
import json
import os
import pty

import pytest

from gateway.cli import main
from simulator.tokenizer import DATA

BODY = {"model": "sim", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def body(tmp_path):
    path = tmp_path / "body.json"
    path.write_text(json.dumps(BODY))
    return str(path)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        f"models: [{{name: sim, policy: ttft, tokenizer: {DATA}, workers: [{{url: 'http://a:1'}}, {{url: 'http://b:2'}}]}}]\n"
    )
    return str(path)


def test_explain_needs_no_worker_only_the_configuration(config, body, capsys):
    assert main(["explain", "--config", config, "--request", body, "--policy", "ttft", "--policy", "session"]) == 0
    text = capsys.readouterr().out
    assert "ttft  (in use)" in text
    assert "session" in text
    assert "prompt tokens (exact)" in text


def test_explain_prints_json_for_programs(config, body, capsys):
    assert main(["explain", "--config", config, "--request", body, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"ttft", "leastload"} <= {each["policy"] for each in document["policies"]}


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["--request", "BODY"], 2, "either --config or --admin"),
        (["--config", "CONFIG", "--request", "/nowhere"], 2, "No such file"),
        (["--config", "/nowhere", "--request", "BODY"], 2, "mistakes"),
        (["--config", "CONFIG", "--request", "BODY", "--path", "/v1/models"], 1, "/v1/models"),
        (["--config", "CONFIG", "--request", "BODY", "--policy", "no-such"], 1, "no-such"),
        (["--admin", "http://127.0.0.1:9", "--request", "BODY"], 1, "does not answer"),
        (["--admin", "file:///etc/passwd", "--request", "BODY"], 1, "must begin with http"),
    ],
)
def test_explain_says_what_is_wrong(config, body, capsys, arguments, status, complaint):
    given = [{"BODY": body, "CONFIG": config}.get(each, each) for each in arguments]
    assert main(["explain", *given]) == status
    assert complaint in capsys.readouterr().err


async def test_explain_and_top_ask_a_running_gateway(scene, body, capsys, monkeypatch):
    async with scene(1, policy="leastload", admin=", token: 0123456789abcdef") as found:
        await found.chat("hello")
        asked = ["explain", "--admin", found.admin, "--request", body, "--policy", "leastload"]
        assert await asyncio.to_thread(main, asked) == 1
        assert "WARMROUTE_ADMIN_TOKEN" in capsys.readouterr().err
        monkeypatch.setenv("WARMROUTE_ADMIN_TOKEN", "0123456789abcdef")
        assert await asyncio.to_thread(main, asked) == 0
        assert found.ids[0] in capsys.readouterr().out
        monkeypatch.setenv("COLUMNS", "160")
        assert await asyncio.to_thread(main, ["top", "--admin", found.admin, "--once"]) == 0
        text = capsys.readouterr().out
        assert "1 of 1 ready, policy leastload" in text
        assert found.ids[0] in text


async def test_top_is_live_in_a_terminal_and_ends_with_q(scene):
    async with scene(1, policy="leastload") as found:
        ours, theirs = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            ".venv/bin/warmroute" if os.path.exists(".venv/bin/warmroute") else "warmroute",  # noqa: ASYNC240, PTH110
            *("top", "--admin", found.admin, "--interval", "0.1"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"},
        )
        os.close(theirs)
        seen = b""
        while b"policy leastload" not in seen:
            seen += await asyncio.to_thread(os.read, ours, 65536)
        os.write(ours, b"q")
        assert await process.wait() == 0
        os.close(ours)
