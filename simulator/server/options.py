"""What a simulated worker can be told."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from simulator.engine import Profile, profile_named
from simulator.server.faults import Faults
from simulator.tokenizer import DATA

DEFAULT_PROFILE = "trn1-8b"
DEFAULT_MODEL = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How one simulated worker is set up.

    Attributes:
        host: address to listen on; `port`: 0 takes a free one.
        profile: name of a built-in profile, or a profile of one's own.
        model: what `root` says in the model card.
        served_model_names: names that requests may use; default: `model`. The first one is in the answers.
        lora_modules: names of adapters that requests may use, too.
        kv_events: ZMQ address for KV events, None for none; ``tcp://127.0.0.1:*`` takes a free port.
        kv_events_replay: ZMQ address for replays.
        kv_events_encoding: ``map`` as vLLM does since 0.24, or ``array`` as before.
        kv_events_replay_topic: replies to replays carry the topic frame.
        topic: default: vLLM's convention, ``kv@HOST:PORT@MODEL``.
        speed: seconds that pass in the worker in one real second.
        warm_up: seconds (the worker's) from start to ready, in which it answers 503 everywhere.
        max_model_len, kv_blocks, block_size, slots, l1_blocks, l2_blocks: instead of the profile's, where given.
        api_key: what ``/v1`` asks for.
        request_id_headers: send X-Request-Id back (``--enable-request-id-headers``).
        prompt_tokens_details: `usage` tells cached tokens (``--enable-prompt-tokens-details``).
        tokenizer: folder with tokenizer.json and a chat template.
        faults: what goes wrong from the start.
        seed: of everything random, which is only faults and ids.
        version: vLLM's version to name.
        kv_hints: requests may carry ``kv_hints``, and ``/openapi.json`` says so.
        lmcache_port: of an LMCache multiprocess server beside it; 0: a free one; None: there is none.
        lmcache_coordinator_port: the same, of an LMCache coordinator, which implies the server.
        lmcache_chunk: tokens in each of LMCache's chunks, whole blocks.
    """

    host: str = "127.0.0.1"
    port: int = 0
    profile: str | Profile = DEFAULT_PROFILE
    model: str = DEFAULT_MODEL
    served_model_names: tuple[str, ...] = ()
    lora_modules: tuple[str, ...] = ()
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_encoding: Literal["map", "array"] = "map"
    kv_events_replay_topic: bool = True
    topic: str | None = None
    speed: float = 1.0
    warm_up: float = 0.0
    max_model_len: int | None = None
    kv_blocks: int | None = None
    block_size: int | None = None
    slots: int | None = None
    l1_blocks: int | None = None
    l2_blocks: int | None = None
    api_key: str | None = field(default=None, repr=False)
    request_id_headers: bool = False
    prompt_tokens_details: bool = True
    tokenizer: Path = DATA
    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    version: str = "0.32.0"
    kv_hints: bool = False
    lmcache_port: int | None = None
    lmcache_coordinator_port: int | None = None
    lmcache_chunk: int = 256

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of the base model, at least one."""
        return self.served_model_names or (self.model,)

    def resolved_profile(self) -> Profile:
        """The profile with the options' own numbers in it.

        Raises:
            ValueError: there is no such profile, or the numbers do not fit together.
        """
        profile = self.profile if isinstance(self.profile, Profile) else profile_named(self.profile)
        given = {
            name: value
            for name in ("max_model_len", "kv_blocks", "block_size", "slots", "l1_blocks", "l2_blocks")
            if (value := getattr(self, name)) is not None
        }
        if self.block_size and profile.segment_size and profile.segment_size % self.block_size:
            given["segment_size"] = -(-profile.segment_size // self.block_size) * self.block_size
        return dataclasses.replace(profile, **given) if given else profile
