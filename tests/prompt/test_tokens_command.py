import argparse
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from gateway.cli import tokens
from gateway.prompt import hub

HELLO = [151644, 872, 198, 14990, 151645, 198, 151644, 77091, 198]
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def run(qwen3, monkeypatch, tmp_path, capsys):
    """A function that runs the command with a body and arguments: exit status, standard output, standard error."""
    monkeypatch.setattr(hub, "load", lambda _: qwen3)
    parser = argparse.ArgumentParser()
    tokens.add_parser(parser.add_subparsers())

    def call(body, *arguments, file=None):
        path = tmp_path / "body.json"
        path.write_text(body if isinstance(body, str) else json.dumps(body))
        parsed = parser.parse_args(["tokens", "--tokenizer", "DIR", *arguments, file or str(path)])
        status = parsed.run(parsed)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def worker():
    """A worker that answers with the object in `answer` and keeps what it was asked."""
    state = SimpleNamespace(answer={}, status=200, asked=[])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.asked.append((self.path, body))
            data = json.dumps(state.answer).encode()
            self.send_response(state.status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_prints_the_ids_of_a_chat(run):
    assert run(BODY) == (0, json.dumps(HELLO) + "\n", "")


def test_it_reads_standard_input(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(BODY).encode())))
    assert run("", file="-")[:2] == (0, json.dumps(HELLO) + "\n")


def test_several_prompts_are_a_list_of_lists(run):
    status, out, _ = run({"prompt": ["hello", "bye"]}, "--path", "/v1/completions")
    assert (status, json.loads(out)) == (0, [[14990], [28374]])


def test_it_prints_the_text_that_the_worker_encodes(run):
    assert run(BODY, "--text") == (0, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n\n", "")


def test_what_cannot_be_known_is_an_error_with_its_reason(run):
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}
    for arguments in ((), ("--text",)):
        status, out, error = run(image, *arguments)
        assert (status, out) == (1, "")
        assert "other than text" in error


def test_wrong_use_has_status_2(run, monkeypatch, tmp_path):
    assert run("{")[0] == 2
    assert run(BODY, file=str(tmp_path / "nothing"))[0] == 2
    monkeypatch.undo()
    assert run(BODY)[0] == 2, "DIR is no directory"


def test_a_worker_that_agrees(run, worker):
    worker.answer = {"prompt_token_ids": HELLO}
    assert run({**BODY, "max_completion_tokens": 9, "stream": True}, "--against", worker.url) == (
        0,
        "equal: 9 tokens\n",
        "",
    )
    ((path, asked),) = worker.asked
    assert path == "/v1/chat/completions"
    assert asked == {**BODY, "max_tokens": 1, "stream": False, "return_token_ids": True}


def test_the_first_difference_is_shown_with_what_is_around_it(run, worker):
    worker.answer = {"prompt_token_ids": [*HELLO[:3], 1, *HELLO[4:]]}
    status, out, _ = run(BODY, "--against", worker.url)
    assert status == 1
    assert out.startswith("token 3 of 9 here and 9 there is the first that differs")
    assert "here:  [14990, " in out
    assert "there: [1, " in out
    worker.answer = {"prompt_token_ids": HELLO[:-1]}
    assert "there: (ends)" in run(BODY, "--against", worker.url)[1]


def test_completions_are_compared_prompt_by_prompt(run, worker):
    worker.answer = {"choices": [{"index": 1, "prompt_token_ids": [5]}, {"index": 0, "prompt_token_ids": [14990]}]}
    status, out, _ = run({"prompt": ["hello", "bye"]}, "--path", "/v1/completions", "--against", worker.url)
    assert status == 1
    assert out.startswith("prompt 1, token 0")
    worker.answer = {"choices": [{"index": 0, "prompt_token_ids": [14990]}]}
    assert (
        run({"prompt": ["hello", "bye"]}, "--path", "/v1/completions", "--against", worker.url)[1]
        == "2 prompts here, 1 there\n"
    )


def test_messages_are_compared_by_their_number(run, worker):
    worker.answer = {"input_tokens": 9}
    status, out, _ = run({**BODY, "max_tokens": 5}, "--path", "/v1/messages", "--against", worker.url)
    assert (status, out) == (0, "9 tokens here, 9 there (this path names no ids)\n")
    assert worker.asked == [("/v1/messages/count_tokens", BODY)]
    worker.answer = {"usage": {"input_tokens": 8}}
    assert run({"input": "hello"}, "--path", "/v1/responses", "--against", worker.url)[0] == 1


def test_a_worker_that_has_no_ids_is_an_error(run, worker):
    assert "no token ids" in run(BODY, "--against", worker.url)[2]
    worker.status = 400
    assert run(BODY, "--against", worker.url)[0] == 1
    assert run(BODY, "--against", "file:///etc/hosts")[0] == 1
