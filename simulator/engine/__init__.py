"""A model of one inference worker, as vLLM runs it on Neuron or on a GPU, that knows no clock and does no I/O.

`Engine` takes requests and hands back what happened up to a given moment: tokens, ends, and changes of the KV cache. Time is
whatever the caller says it is, so the same object serves a simulated worker in real time and a fleet in virtual time.

* `outputs`: what goes in and what comes out.
* `backends.profiles`: what a kind of worker can do, and the built-in kinds.
* `cache`, `claims` and `memory`: blocks on the device, what they are worth, the tiers below, and the events about them.
* `request` and `work`: one request, and what the device is busy with.
* `engine`: the scheduler.

What it leaves out: speculation that fails, attention's growth with the context during prefill, transfers that overlap with
computing, several workers on one host, beam search.
"""

from backends.profiles.builtin import PROFILES, profile_named
from backends.profiles.profile import Profile
from simulator.engine.cache import Tier
from simulator.engine.engine import Engine
from simulator.engine.outputs import (
    BlockKey,
    BucketStats,
    Cleared,
    EngineRequest,
    EngineStats,
    Finished,
    FirstToken,
    Output,
    Removed,
    Retention,
    Stored,
    TierName,
    TokenOut,
)

__all__ = [
    "PROFILES",
    "BlockKey",
    "BucketStats",
    "Cleared",
    "Engine",
    "EngineRequest",
    "EngineStats",
    "Finished",
    "FirstToken",
    "Output",
    "Profile",
    "Removed",
    "Retention",
    "Stored",
    "Tier",
    "TierName",
    "TokenOut",
    "profile_named",
]
