"""Workloads: what a replay replays, read from recordings or made up, equal for equal seeds.

* `workload`: `Workload` and `WorkRequest`, what flows; `WorkloadError`, what goes wrong.
* `registry`: `load(path, format)` and `generate(name)`, and which names there are.
* `formats`: one module for each kind of recording.
* `generators`: one module for each kind of made-up traffic.
* `runs`: sequences of content ids in little memory. `arrivals`: Poisson processes.

A prompt's content is a sequence of ids, one for each run of `Workload.block_tokens` tokens: equal ids, equal tokens.
"""

from simulator.workloads.registry import FORMATS, GENERATORS, Parameter, generate, load, parameters
from simulator.workloads.workload import Workload, WorkloadError, WorkRequest

__all__ = [
    "FORMATS",
    "GENERATORS",
    "Parameter",
    "WorkRequest",
    "Workload",
    "WorkloadError",
    "generate",
    "load",
    "parameters",
]
