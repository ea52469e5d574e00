"""The face of a simulated worker: what a gateway sees of vLLM, over HTTP and ZMQ.

* `worker`: `SimulatedWorker`, which owns all the rest, and `options`, what it can be told.
* `app`: the routes; `openai`, `anthropic` and `utilities`: what each answers; `service`: what they have in common.
* `parameters`, `conversation`, `errors`: what a request says, and what is wrong with it, in vLLM's words.
* `writing`: what the model says, a pure function of the prompt.
* `pump` and `clock`: the engine in real time.
* `hints`: what requests wish of the caches. `lmcache` and `lmcache_coordinator`: LMCache's servers beside a worker.
* `shared`: what several workers of one process have in common.
* `events` and `hashing`: KV events as vLLM publishes them.
* `metrics`: /metrics. `stream`: server-sent events. `faults`: failures on demand.
"""

from simulator.server.faults import Faults
from simulator.server.options import WorkerOptions
from simulator.server.shared import SharedMemory
from simulator.server.worker import SimulatedWorker
from simulator.server.writing import expected_output

__all__ = ["Faults", "SharedMemory", "SimulatedWorker", "WorkerOptions", "expected_output"]
