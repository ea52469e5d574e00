# ruff: noqa: T201, BLE001  # a script that prints; whatever vLLM raises is its answer
"""What vLLM's own code makes of request bodies: one JSON line in, one out. Runs in vLLM's environment, without an engine.

    python oracle.py MODEL_DIRECTORY < bodies.jsonl > answers.jsonl

Each line in is ``{"path": ..., "body": ...}``; each line out is ``{"ids": [[...], ...]}`` or ``{"error": ...}``.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

from transformers import AutoTokenizer
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.renderers import hf, merge_kwargs
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.tokenizers.hf import get_cached_tokenizer


class Oracle:
    def __init__(self, directory):
        self.tokenizer = get_cached_tokenizer(AutoTokenizer.from_pretrained(directory))
        # The engine truncates on the left for models that generate.
        self.tokenizer.truncation_side = "left"
        path = Path(directory, "config.json")
        kind = json.loads(path.read_text())["model_type"] if path.exists() else "none"
        self.config = SimpleNamespace(
            multimodal_config=None,
            enable_prompt_embeds=False,
            max_model_len=10**7,
            tokenizer_revision=None,
            revision=None,
            code_revision=None,
            trust_remote_code=False,
            tokenizer=directory,
            model=directory,
            hf_config=SimpleNamespace(model_type=kind),
        )
        templates = [
            hf.resolve_chat_template(self.tokenizer, None, tools, model_config=self.config) for tools in (None, [])
        ]
        self.merge = any(map(AnthropicServingMessages._detect_merge_inline_system, templates))
        self.disabled = self.probe_disabled()

    def probe_disabled(self):
        def rendered(effort):
            try:
                request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort)
                return self.chat_text(request)
            except Exception:
                return None

        none = rendered("none")
        efforts = ("low", "medium", "high", "xhigh", "max")
        return "low" if none is None or any(rendered(effort) == none for effort in efforts) else "none"

    def chat_text(self, request, messages=None, tools=None):
        if isinstance(request, ChatCompletionRequest):
            messages = request.messages
            tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        kwargs = request.chat_template_kwargs or {}
        if kwargs.get("chat_template") is not None or getattr(request, "chat_template", None) is not None:
            raise ValueError("refused")
        params = request.build_chat_params(None, "auto").with_defaults(
            merge_kwargs(None, {"tools": tools, "tokenize": False})
        )
        form = hf.resolve_chat_template_content_format(
            None, params.chat_template_kwargs.get("tools"), "auto", self.tokenizer, model_config=self.config
        )
        conversation, _, _ = parse_chat_messages(messages, self.config, form)
        return hf.safe_apply_chat_template(
            self.config, self.tokenizer, conversation, **params.get_apply_chat_template_kwargs()
        )

    def encode(self, request, text):
        params = request.build_tok_params(self.config)
        ids = self.tokenizer(text, **params.get_encode_kwargs())["input_ids"]
        return params._validate_tokens(self.tokenizer, ids)

    def answer(self, path, body):
        if path == "/v1/completions":
            request = CompletionRequest.model_validate(body)
            prompts = request.prompt
            if isinstance(prompts, str) or isinstance(prompts[0], int):
                prompts = [prompts]
            return [self.encode(request, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        if path == "/v1/messages":
            request = AnthropicServingMessages.to_chat_completion_request(
                AnthropicMessagesRequest.model_validate(body),
                merge_inline_system=self.merge,
                disabled_thinking_effort=self.disabled,
            )
            return [self.encode(request, self.chat_text(request))]
        if path == "/v1/responses":
            request = ResponsesRequest.model_validate(body)
            messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
            tools = construct_tool_dicts(request.tools, request.tool_choice)
            return [self.encode(request, self.chat_text(request, messages, tools))]
        request = ChatCompletionRequest.model_validate(body)
        return [self.encode(request, self.chat_text(request))]


def main():
    oracle = Oracle(sys.argv[1])
    for line in sys.stdin:
        case = json.loads(line)
        try:
            answer = {"ids": oracle.answer(case["path"], case["body"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
