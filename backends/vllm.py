"""vLLM's own API server, on any accelerator."""

from backends.openai import OpenAIDriver


class VLLMDriver(OpenAIDriver):
    """vLLM answers `/health` with an empty 200, or 503 once its engine is dead.

    The socket opens only when the model is loaded, so a starting worker refuses connections. `start_up` is three times
    vLLM's own `VLLM_ENGINE_READY_TIMEOUT_S` default (600 s): weights from a slow disk and graph capture come on top.
    """

    name = "vllm"
    health_path = "/health"
    start_up = 1800.0
