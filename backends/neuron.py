"""vLLM on AWS Neuron (Trainium, Inferentia)."""

from backends.profiles.assumed import ASSUMED_NEURON
from backends.vllm import VLLMDriver


class NeuronDriver(VLLMDriver):
    """vLLM's API server above the Neuron plug-in; the wire is vLLM's, the start is not.

    Every bucket is compiled ahead of time when the compile cache is cold: about a quarter of an hour for an 8B model,
    and Neuron's documentation sets `VLLM_ENGINE_READY_TIMEOUT_S=5400` for a 120B one. The answers are those of vLLM
    0.11 to 0.24, so cards may lack `root`, `parent` and `max_model_len`.
    """

    name = "neuron"
    credits_blocks = False
    assumed = ASSUMED_NEURON
    runs_medusa_alone = True
    start_up = 5400.0
