"""The fleet that a replay runs on: its workers, and how well the gateway hears of their caches."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from backends.profiles import Profile
from gateway.config.residency import ResidencyConfig
from simulator.fleet.admission import AdmissionOptions

GENEROUS_SLOTS = 256
"""Of the explicit worker: as many requests as vLLM runs at once by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """One kind of worker, so many of them, and the way of their KV events.

    Attributes:
        profile: every worker. Its `l2_blocks` are one memory that all share.
        workers: how many, at least 1.
        speed: arrivals come so many times as fast; pauses between turns are so many times as short.
        event_lag: seconds from a change in a worker's cache to the gateway's knowing of it.
        event_loss: share of event batches that never arrive, in [0, 1].
        seed: of everything random but the workload: the policy's ties, what is lost, decoding in parallel.
        speed_told: whether the gateway is told how fast the workers prefill; if not, it starts from what it assumes and learns.
        others: workers that are of another profile than all, by id (``w0``, ``w1``, ...); with blocks of the same size.
        admission: requests wait in the gateway, and may be refused; None: they go to a worker at once.
        residency: what the workers are told about what to keep and fetch; None: nothing.
    """

    profile: Profile
    workers: int = 8
    speed: float = 1.0
    event_lag: float = 0.005
    event_loss: float = 0.0
    seed: int = 0
    speed_told: bool = True
    others: Mapping[str, Profile] = field(default_factory=dict)
    admission: AdmissionOptions | None = None
    residency: ResidencyConfig | None = None

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: says which.
        """
        if self.workers < 1:
            raise ValueError("workers must be at least 1")
        if not 0 < self.speed < float("inf"):
            raise ValueError("speed must be a positive number")
        if not 0 <= self.event_lag < float("inf"):
            raise ValueError("event_lag must be a number of seconds from 0 on")
        if not 0 <= self.event_loss <= 1:
            raise ValueError("event_loss must be between 0 and 1")
        if any(other.block_size != self.profile.block_size for other in self.others.values()):
            raise ValueError("all workers must have blocks of the same size")

    def profile_of(self, index: int) -> Profile:
        """The profile of one worker."""
        return self.others.get(f"w{index}", self.profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """A memory below the device.

    Attributes:
        tokens: that it holds; of one worker for l1, of the whole fleet for l2.
        bandwidth: bytes per second into the device.
    """

    tokens: int
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What the command line may say about the workers; None is as in the profile.

    Without a profile it is the worker of our policy study: one prefill at a time in order of arrival, without buckets; room for
    any prompt that its cache holds; the same time per token however many decode.

    Attributes:
        block_tokens: tokens per KV block.
        kv_tokens: tokens that the device's memory holds.
        prefill_rate: tokens per second.
        overhead: seconds per prefill.
        itl: seconds per decode step.
        slots: requests that run at once.
        max_model_len: prompt and answer together.
        tiers: by name, ``l1`` or ``l2``.
        kv_bytes_per_token: size of one token's keys and values, for the time that loading from tiers takes.
    """

    block_tokens: int | None = None
    kv_tokens: int | None = None
    prefill_rate: float | None = None
    overhead: float | None = None
    itl: float | None = None
    slots: int | None = None
    max_model_len: int | None = None
    tiers: dict[str, TierOptions] = field(default_factory=dict)
    kv_bytes_per_token: int | None = None

    def apply(self, profile: Profile | None) -> Profile:
        """The workers' profile: `profile` with what is said here in place, or the explicit worker.

        Raises:
            ValueError: the numbers contradict each other; the message says which.
        """
        if profile is None:
            profile = explicit_worker(block_tokens=self.block_tokens or 512, kv_tokens=self.kv_tokens or 1_228_800)
        block_size = self.block_tokens or profile.block_size
        if block_size < 1:
            raise ValueError("block_tokens must be at least 1")
        kv_tokens = self.kv_tokens or profile.kv_blocks * profile.block_size
        said = {
            "prefill_rate": self.prefill_rate,
            "overhead": self.overhead,
            "slots": self.slots,
            "max_model_len": self.max_model_len,
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }
        changes: dict[str, object] = {name: value for name, value in said.items() if value is not None}
        changes.update(block_size=block_size, kv_blocks=kv_tokens // block_size)
        if self.itl is not None:
            changes.update(itl_base=self.itl, itl_per_stream=0.0, itl_per_context_token=0.0)
        for name in ("l1", "l2"):
            tier = self.tiers.get(name)
            blocks = getattr(profile, f"{name}_blocks") * profile.block_size if tier is None else tier.tokens
            changes[f"{name}_blocks"] = blocks // block_size
            if tier is not None:
                changes[f"{name}_bandwidth"] = tier.bandwidth
        return replace(profile, **changes)  # type: ignore[arg-type]  # the values' types are those of the options above


def explicit_worker(*, block_tokens: int, kv_tokens: int) -> Profile:
    """The study's worker: 8,000 tokens per second after 30 ms, 20 ms per decode step.

    Raises:
        ValueError: it holds not even one block.
    """
    if kv_tokens < block_tokens:
        raise ValueError(f"kv_tokens is {kv_tokens}, less than one block of {block_tokens} tokens")
    return Profile(
        name="explicit",
        description="one prefill at a time, first come first served, no buckets",
        block_size=block_tokens,
        kv_blocks=kv_tokens // block_tokens,
        slots=GENEROUS_SLOTS,
        max_model_len=kv_tokens // block_tokens * block_tokens,
        prefill="exclusive",
        admission="paged",
        prefill_rate=8000.0,
        overhead=0.030,
        itl_base=0.020,
    )
