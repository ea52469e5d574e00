# ruff: noqa: T201, RUF001  # a script that prints; the odd characters are the point
"""Random bodies through warmroute's prompts and through vLLM's own code: the ids must be the same.

    python tests/prompt/engine/compare.py --engine-python PATH --model DIRECTORY [--count N] [--seed N]

Outside the test suite, because it needs an environment with vLLM. Prints how many bodies of each path agreed, how many
the worker would refuse, and the first ones that differ. Exit status 1 if any differs.
"""

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from gateway.prompt.prompt import How
from gateway.prompt.prompter import Prompter, PromptLimits
from gateway.prompt.tokenizer import PromptTokenizer

WORDS = (
    "the cache", "東京", "naïve café", "👩‍👩‍👧", "e\u0301", "  ", "\n\n", "\t", "1234567", "def f(x):\n    return x", "<|im_end|>", "<|im_start|>",
    "<|eot_id|>", "<｜User｜>", "<think>", "</think>", "\n</think>\n\n", "<tool_call>", "</tool_response>", "<tool_response>", "'s", "%%", '{"a": [1, 2]}', "—", "\u200b", "مرحبا",
    "\r\n", " x", "<|", "<", "|>", "<｜begin▁of▁sentence｜>", "_", "A" * 40, "x-anthropic-billing-header: y", "\u00a0", "ﬁ", "Å",
)  # fmt: skip


class Bodies:
    """A source of random bodies of many shapes."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def text(self, most=8):
        return "".join(
            self.random.choice(WORDS) + self.random.choice(("", " ", "")) for _ in range(self.random.randint(0, most))
        )

    def maybe(self, share=0.3):
        return self.random.random() < share

    def value(self, depth=0):
        kind = self.random.randint(0, 7 if depth < 3 else 4)
        if kind == 5:
            return [self.value(depth + 1) for _ in range(self.random.randint(0, 3))]
        if kind >= 6:
            return {self.text(1) or "k": self.value(depth + 1) for _ in range(self.random.randint(0, 3))}
        return (
            self.text(2),
            self.random.randint(-(10**6), 10**12),
            self.random.random() * 10 ** self.random.randint(-9, 20),
            None,
            True,
        )[kind]

    def content(self, share=0.3, null=False):
        if null and self.maybe(0.2):
            return None
        if not self.maybe(share):
            return self.text()
        parts = []
        for _ in range(self.random.randint(0, 3)):
            part = {"type": "text", "text": self.text(4)}
            if self.maybe(0.2):
                part["cache_control"] = {"type": "ephemeral"}
            if self.maybe(0.3):
                part = dict(reversed(list(part.items())))
            parts.append(self.text(3) if self.maybe(0.05) else part)
        return parts

    def tool(self):
        function = {"name": "f" + str(self.random.randint(0, 9))}
        if self.maybe(0.7):
            function["description"] = self.random.choice([self.text(3), None])
        if self.maybe(0.8):
            function["parameters"] = {
                "type": "object",
                "properties": {"a": {"type": "string", "enum": [self.text(1)]}},
                "x": self.value(),
            }
        if self.maybe(0.2):
            function["strict"] = self.random.choice([True, False, None])
        if self.maybe(0.2):
            function["unknown"] = 1
        items = list(function.items())
        self.random.shuffle(items)
        tool = {"function": dict(items)}
        if self.maybe(0.9):
            tool["type"] = "function"
        if self.maybe(0.1):
            tool["defer_loading"] = self.random.choice([True, False])
        return tool

    def call(self):
        arguments = self.random.choice(
            [
                json.dumps({"a": self.value(), "b": self.text(2)}),
                json.dumps(self.value()),
                "",
                "{}",
                "not json",
                '{"a": 1e400}',
                '{"a":1,"a":2}',
            ]
        )
        call = {"id": "call_1", "type": "function", "function": {"name": "f1", "arguments": arguments}}
        if self.maybe(0.3):
            call["function"] = dict(reversed(list(call["function"].items())))
        if self.maybe(0.2):
            call["index"] = 0
        return call

    def message(self, role):
        message = {"role": role, "content": self.content(null=role == "assistant" or self.maybe(0.02))}
        if role == "assistant":
            if self.maybe(0.4):
                message["tool_calls"] = [self.call() for _ in range(self.random.randint(0, 2))]
            if self.maybe(0.2):
                message[self.random.choice(["reasoning", "reasoning_content"])] = self.text(3)
            if self.maybe(0.1):
                message |= {"refusal": None, "audio": None, "function_call": None}
            if self.maybe(0.1):
                del message["content"]
        if role == "tool":
            message["tool_call_id"] = "call_1"
        if self.maybe(0.1):
            message["name"] = "bob"
        if self.maybe(0.05):
            message["extra"] = self.value()
        if self.maybe(0.3):
            message = dict(reversed(list(message.items())))
        return message

    def chat(self):
        roles = self.random.choices(
            ["user", "assistant", "tool", "system", "developer", "critic"],
            [8, 8, 3, 1, 0.5, 0.1],
            k=self.random.randint(0, 6),
        )
        if self.maybe(0.6):
            roles.insert(0, "system")
        if self.maybe(0.7):
            roles.append("user")
        body = {"model": "m", "messages": [self.message(role) for role in roles]}
        if self.maybe(0.35):
            body["tools"] = [self.tool() for _ in range(self.random.randint(0 if self.maybe(0.1) else 1, 3))]
        if self.maybe(0.1) and body.get("tools"):
            body["tool_choice"] = self.random.choice(["auto", "none", "required"])
        if self.maybe(0.2):
            body["chat_template_kwargs"] = {
                self.random.choice(
                    [
                        "enable_thinking",
                        "foo",
                        "bos_token",
                        "tools",
                        "documents",
                        "add_generation_prompt",
                        "date_string",
                        "thinking",
                        "custom_tools",
                        "builtin_tools",
                    ]
                ): self.random.choice([True, False, None, "auto", self.text(2)])
            }
        if self.maybe(0.15):
            body["reasoning_effort"] = self.random.choice(["none", "low", "high", None, "silly"])
        if self.maybe(0.15):
            body["add_generation_prompt"] = False
            if self.maybe(0.6):
                body["continue_final_message"] = True
        if self.maybe(0.1):
            body["add_special_tokens"] = self.random.choice([True, False])
        if self.maybe(0.05):
            body["documents"] = [{"title": self.text(1), "text": self.text(3)}]
        if self.maybe(0.05):
            body["truncate_prompt_tokens"] = self.random.randint(1, 30)
            if self.maybe(0.5):
                body["truncation_side"] = self.random.choice(["left", "right"])
        return body

    def completion(self):
        ids = [self.random.randint(0, 50_000) for _ in range(self.random.randint(1, 5))]
        prompt = self.random.choice(
            [self.text(20), [self.text(5) for _ in range(2)], ids, [ids, ids[:1]], self.text(3)]
        )
        body = {"model": "m", "prompt": prompt or "x"}
        if self.maybe(0.3):
            body["add_special_tokens"] = self.maybe(0.5)
        return body

    def block(self, role):
        kind = self.random.choice(["text", "text", "thinking", "tool_use", "tool_result", "redacted_thinking"])
        if kind == "tool_use":
            return {"type": kind, "id": "t1", "name": "f1", "input": {"q": self.value()}}
        if kind == "tool_result":
            content = self.random.choice(
                [self.text(3), [{"type": "text", "text": self.text(3)}, {"type": "text", "text": self.text(1)}], None]
            )
            return {"type": kind, "tool_use_id": "t1", "content": content}
        if kind == "redacted_thinking":
            return {"type": kind, "data": "abc"}
        if kind == "thinking":
            return {"type": kind, "thinking": self.text(3), "signature": "s"}
        return {"type": "text", "text": self.text(4), "cache_control": {"type": "ephemeral"}}

    def anthropic(self):
        messages = []
        for _ in range(self.random.randint(1, 5)):
            role = self.random.choices(["user", "assistant", "system"], [5, 5, 1])[0]
            content = self.text() if self.maybe(0.5) else [self.block(role) for _ in range(self.random.randint(0, 3))]
            messages.append({"role": role, "content": content})
        body = {"model": "m", "max_tokens": 10, "messages": messages}
        if self.maybe(0.6):
            body["system"] = (
                self.text() if self.maybe(0.5) else [{"type": "text", "text": self.text(3)} for _ in range(2)]
            )
        if self.maybe(0.3):
            body["tools"] = [
                {
                    "name": "f1",
                    "description": self.text(2),
                    "input_schema": {"properties": {"q": self.value()}}
                    | ({"type": "object"} if self.maybe(0.5) else {}),
                }
            ]
        if self.maybe(0.2):
            body["thinking"] = self.random.choice([{"type": "disabled"}, {"type": "adaptive"}])
        if self.maybe(0.2):
            body["output_config"] = {"effort": self.random.choice(["low", "high", "max"])}
        return body

    def responses(self):
        items = self.text()
        if self.maybe(0.7):
            items = []
            for _ in range(self.random.randint(1, 5)):
                role = self.random.choice(["user", "assistant", "system", "developer"])
                kind = "output_text" if role == "assistant" else "input_text"
                content = (
                    self.text()
                    if self.maybe(0.6)
                    else [
                        {"type": kind, "text": self.text(4)}
                        for _ in range(1 if role == "assistant" else self.random.randint(1, 2))
                    ]
                )
                item = {"role": role, "content": content}
                if self.maybe(0.3):
                    item["type"] = "message"
                items.append(item)
                if self.maybe(0.2):
                    items.append(
                        {
                            "type": "function_call",
                            "call_id": "1",
                            "name": "f1",
                            "arguments": json.dumps({"a": self.value()}),
                        }
                    )
                    items.append({"type": "function_call_output", "call_id": "1", "output": self.text(3)})
        body = {"model": "m", "input": items}
        if self.maybe(0.4):
            body["instructions"] = self.text(4)
        if self.maybe(0.2):
            body["tools"] = [
                {
                    "type": "function",
                    "name": "f",
                    "description": self.text(1),
                    "parameters": {"type": "object", "properties": {"a": self.value()}},
                }
            ]
        if self.maybe(0.2):
            body["reasoning"] = {"effort": self.random.choice(["none", "low", "high"])}
        return body

    def case(self):
        path = self.random.choices(
            ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"], [6, 1, 2, 1]
        )[0]
        make = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completion,
            "/v1/messages": self.anthropic,
            "/v1/responses": self.responses,
        }[path]
        return {"path": path, "body": make()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=5)
    arguments = parser.parse_args()
    bodies = Bodies(arguments.seed)
    cases = [bodies.case() for _ in range(arguments.count)]
    oracle = Path(__file__).with_name("oracle.py")
    done = subprocess.run(
        [arguments.engine_python, str(oracle), arguments.model],
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(answers) != len(cases):
        sys.exit(f"the oracle answered {len(answers)} of {len(cases)}\n{done.stderr[-3000:]}")
    prompter = Prompter(PromptTokenizer.from_directory(arguments.model), limits=PromptLimits(inline_new=10**9))
    outcome = Counter()
    reasons = Counter()
    for case, answer in zip(cases, answers, strict=True):
        prompt = prompter.now(case["path"], json.loads(json.dumps(case["body"])))
        got = [list(one.ids) for one in (prompt, *prompt.also)] if prompt.how is How.EXACT else None
        if "error" in answer:
            kind = "refused by both" if got is None else "exact, though the worker refuses"
        elif got is None:
            kind = "approximate"
            reasons[case["path"], prompt.reason] += 1
        else:
            kind = "equal" if got == answer["ids"] else "DIFFERENT"
        outcome[case["path"], kind] += 1
        if kind in ("DIFFERENT", "exact, though the worker refuses") and outcome[case["path"], kind] <= arguments.show:
            print(kind, json.dumps(case, ensure_ascii=False))
            print("   ", answer if "error" in answer else "")
            if kind == "DIFFERENT":
                print("    ours  ", prompter._tokenizer.decode(prompt.ids))
                print("    theirs", prompter._tokenizer.decode(answer["ids"][0]))
    for (path, kind), count in sorted(outcome.items()):
        print(f"{path:24} {kind:36} {count:6}")
    for (path, reason), count in sorted(reasons.items()):
        print(f"  approximate: {path} {reason}: {count}")
    sys.exit(1 if any(kind == "DIFFERENT" for _, kind in outcome) else 0)


if __name__ == "__main__":
    main()
