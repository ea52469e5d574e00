"""The section `models[].l2`: who knows what is in the storage below the workers' own memories."""

from typing import Annotated, Literal

import msgspec

from gateway.config.base import Name, Positive, Struct


class L2(Struct, frozen=True, kw_only=True):
    """Storage that the model's workers load KV from, and who is asked what is in it."""

    secrets = frozenset({"api_key"})

    driver: Literal["lmcache-coordinator"] = "lmcache-coordinator"
    """Who is asked: LMCache's coordinator, whose servers report to it (`--coordinator-event-reporting`)."""
    url: Name
    """Of the coordinator."""
    model: Name | None = None
    """What LMCache calls the model: what the engine was started with, a path or a Hugging Face id. Default: as a worker says (`root` in its `/v1/models`)."""
    world_size: Positive = 1
    """Over so many devices each worker spreads the model."""
    chunk: Positive | None = None
    """Tokens in each chunk that LMCache stores; default: as its servers say."""
    shared: bool = True
    """All workers reach all of it, as with Redis or a common folder. LMCache marks only some kinds of storage as shared; false: the others are each worker's own."""
    keys_per_second: Annotated[float, msgspec.Meta(gt=0)] = 500.0
    """How many chunks the coordinator is asked about at most; each costs it about 0.1 ms."""
    api_key: str | None = None
    """Sent as a bearer token; write it as ``${NAME_OF_A_VARIABLE}``."""
