"""SGLang's server."""

from backends.openai import OpenAIDriver


class SGLangDriver(OpenAIDriver):
    """SGLang answers `/health` with 200 when it serves, 503 while it starts or shuts down.

    `/health_generate` would run a token through the engine at each check: on a busy worker it queues behind real
    prefills and times out, so it is not asked.
    """

    name = "sglang"
    health_path = "/health"
    start_up = 1800.0
