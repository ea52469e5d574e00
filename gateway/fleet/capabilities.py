"""What one worker can do: every number filled, each with its origin.

A record is immutable. `WorkerCapabilities.of` makes the first one from the configuration; `configured` and `heard` make
the next ones from a reload and from what the worker tells. Whoever holds the worker replaces its record.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import structlog

from backends.capability_facts import CapabilityFacts
from backends.profiles import PROFILES, Profile
from backends.profiles.assumed import ASSUMED_GPU
from gateway.config.schema import Capabilities, TierMemory

if TYPE_CHECKING:
    from backends.base import Driver
    from gateway.fleet.worker import Worker

_log = structlog.get_logger(__name__)

Origin = Literal["configured", "profile", "discovered", "assumed"]

_PLAIN = (
    "block_size",
    "max_model_len",
    "slots",
    "prefill",
    "max_num_batched_tokens",
    "prefill_buckets",
    "segments",
    "segment_size",
    "max_prefix_bucket",
    "decode_batch_buckets",
    "decode_context_buckets",
    "prefill_rate",
    "overhead",
    "tokens_per_step",
    "prefix_caching",
    "kv_bytes_per_token",
    "l1_bandwidth",
    "l1_latency",
    "l2_bandwidth",
    "l2_latency",
)
"""Fields of a `Profile` that are called the same everywhere."""
_POOLS = {"kv_capacity_tokens": "kv_blocks", "l1_capacity_tokens": "l1_blocks", "l2_capacity_tokens": "l2_blocks"}
"""Fields that are in tokens here and in blocks there."""
_OTHERS: Mapping[str, Any] = {"role": "both", "lora_adapters": (), "decoder": "plain"}
"""Fields that no profile has, with what is assumed."""
_DEFAULTS = {it.name: it.default for it in fields(Profile) if it.default is not MISSING}
_STRENGTH: tuple[Origin, ...] = ("assumed", "discovered", "profile", "configured")


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer of the worker, and when it came."""

    facts: CapabilityFacts
    at: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory behind the device's: tokens that it holds (0: not known), bytes per second, seconds per transfer."""

    capacity_tokens: int
    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCapabilities:
    """One worker's record; what a policy sees as `worker.capabilities`.

    Attributes:
        profile: the numbers and their formulas, every one filled.
        origins: where each value is from, by the names that `describe` lists.
        block_size, kv_capacity_tokens, max_model_len: None where they would only be assumed.
        slots: requests that run at once, None where that would only be assumed. On stacks that reserve memory for the
            longest request: min(max_num_seqs, KV capacity / max_model_len). 1 for Medusa on Neuron.
        prefill: one prompt at a time, or in chunks that share each step with decodes.
        prefill_rate: tokens per second, padding counted: the starting point and floor of what is learned.
        overhead: seconds per prefill, the same.
        tokens_per_step: output tokens per request and decode step.
        prefix_caching: whether prefixes are reused at all.
        role: its part where prefill and decode are done by different workers.
        lora_adapters: names of those that it serves.
        decoder: how it decodes.
        tiers: the memories behind the device's that are known, by ``l1`` and ``l2``.
        shaped: whether `padded`, `credit` and `takes` do more than hand their argument back.
        doubts: sentences about values that contradict each other, as far as the configuration could not be blamed.
        answers: what the worker told, by path.
        section, driver_assumes, medusa_alone: what else the record was made from.
    """

    profile: Profile
    origins: Mapping[str, Origin]
    block_size: int | None
    kv_capacity_tokens: int | None
    max_model_len: int | None
    slots: int | None
    prefill: Literal["exclusive", "chunked"]
    prefill_rate: float
    overhead: float
    tokens_per_step: float
    prefix_caching: bool
    role: Literal["both", "prefill", "decode"]
    lora_adapters: tuple[str, ...]
    decoder: Literal["plain", "speculative", "medusa"]
    tiers: Mapping[str, Tier]
    shaped: bool
    doubts: tuple[str, ...] = ()
    answers: Mapping[str, Heard] = field(default_factory=lambda: MappingProxyType({}))
    section: Capabilities
    driver_assumes: Profile
    medusa_alone: bool

    @classmethod
    def of(cls, section: Capabilities | None = None, driver: "Driver | None" = None) -> "WorkerCapabilities":
        """The record of a worker that has told nothing yet.

        Args:
            section: what is configured; None: nothing.
            driver: of the worker; None: assumes what holds for GPUs.
        """
        assumes, alone = (driver.assumed, driver.runs_medusa_alone) if driver is not None else (ASSUMED_GPU, False)
        return _resolved(section or Capabilities(), assumes, {}, medusa_alone=alone)

    def configured(self, section: Capabilities) -> "WorkerCapabilities":
        """The record with another section; itself when that says the same."""
        if section == self.section:
            return self
        return _resolved(section, self.driver_assumes, self.answers, medusa_alone=self.medusa_alone)

    def heard(self, path: str, facts: CapabilityFacts, now: float) -> "WorkerCapabilities":
        """The record with what the worker just told; it replaces what the same path said before.

        Args:
            path: that was asked.
            facts: what the answer says.
            now: seconds, for `heard_at`.
        """
        answers = {**self.answers, path: Heard(facts, now)}
        before = self.answers.get(path)
        if before is not None and before.facts == facts:
            return replace(self, answers=MappingProxyType(answers))
        return _resolved(self.section, self.driver_assumes, answers, medusa_alone=self.medusa_alone)

    def heard_at(self, path: str) -> float | None:
        """When the worker last told something there; None: never."""
        answer = self.answers.get(path)
        return answer.at if answer is not None else None

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Sizes that a prefill is padded to, ascending; empty: no padding."""
        return self.profile.prefill_buckets

    @property
    def segment_size(self) -> int | None:
        """Cached tokens count in whole segments of this many; None: in blocks."""
        return self.profile.segment_size

    @property
    def max_prefix_bucket(self) -> int | None:
        """The longest cached prefix that it can use; None: no such cap."""
        return self.profile.max_prefix_bucket

    @property
    def decode_context_buckets(self) -> tuple[int, ...]:
        """Sizes that a decode step pads its longest context to, ascending; empty: none known."""
        return self.profile.decode_context_buckets

    def padded(self, uncached: int) -> int:
        """Tokens that the device computes for so many uncached ones, all chunks together."""
        buckets = self.profile.prefill_buckets
        if not buckets:
            return uncached
        whole, rest = divmod(uncached, buckets[-1])
        return whole * buckets[-1] + (buckets[bisect_left(buckets, rest)] if rest else 0)

    def credit(self, tokens: int, held: int) -> int:
        """How many of `held` cached tokens a prefill of `tokens` tokens really saves; see `Profile.credit`."""
        return self.profile.credit(tokens, held) if self.prefix_caching else 0

    def takes(self, uncached: int, credit: int) -> bool:
        """Whether a compiled shape exists for so many uncached tokens after so many credited ones."""
        return self.profile.takes(uncached, credit)

    def load_seconds(self, l1: int, l2: int) -> float:
        """Seconds to bring so many tokens from the tiers into the device."""
        return self.profile.load_seconds(l1, l2)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Every value with its origin, ready for JSON: ``{"slots": {"value": 4, "origin": "discovered"}, ...}``."""
        return {
            name: {"value": list(value) if isinstance(value, tuple) else value, "origin": self.origins[name]}
            for name, value in self._values().items()
        }

    def _values(self) -> dict[str, Any]:
        profile = self.profile
        values = {name: getattr(profile, name) for name in _PLAIN}
        values |= {name: getattr(profile, blocks) * profile.block_size for name, blocks in _POOLS.items()}
        values |= {name: getattr(self, name) for name in _OTHERS}
        values["slots"] = profile.effective_slots
        if self.kv_capacity_tokens is not None:
            values["kv_capacity_tokens"] = self.kv_capacity_tokens
        return values


def learn(worker: "Worker", path: str, body: bytes, now: float) -> None:
    """Give `worker` the record that follows from its answer; what was learned of its speed is forgotten if it is a new process.

    Whoever asks a worker calls this, so that nobody asks the same twice.

    Args:
        worker: who answered, with status 200.
        path: `models_path` or `facts_path` of its driver.
        body: of the answer.
        now: seconds on the loop's clock.
    """
    before = worker.capabilities
    after = before.heard(path, worker.driver.capability_facts(path, body, worker.model), now)
    was, started = (
        record.answers[path].facts.started if path in record.answers else None for record in (before, after)
    )
    worker.adopt(after)
    if was is not None and started is not None and started != was:
        worker.restarted()
    if after.doubts and after.doubts != before.doubts:
        _log.warning(
            "what the worker can do contradicts itself", worker=worker.id, model=worker.model, doubts=after.doubts
        )


def _resolved(
    section: Capabilities, assumed: Profile, answers: Mapping[str, Heard], *, medusa_alone: bool
) -> WorkerCapabilities:
    """Join what is configured, what a named profile states, what was heard, and what is assumed, in this order."""
    named = PROFILES.get(section.profile or "")  # the configuration's check knows the names
    base = named or assumed
    said = _said(section)
    discovered: dict[str, Any] = {}
    for answer in answers.values():
        discovered |= answer.facts.known()
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}

    def choose(name: str, fallback: Any, default: Any) -> None:
        # A named profile states what differs from every profile's default; where it only follows, the worker knows better.
        stated = named is not None and name not in _OTHERS and fallback != default
        if said.get(name) is not None:
            values[name], origins[name] = said[name], "configured"
        elif stated:
            values[name], origins[name] = fallback, "profile"
        elif discovered.get(name) is not None:
            values[name], origins[name] = discovered[name], "discovered"
        else:
            values[name] = fallback
            origins[name] = "profile" if named is not None and name not in _OTHERS else "assumed"

    for name in _PLAIN:
        choose(name, getattr(base, name), _DEFAULTS.get(name, MISSING))
    _tiers_in_tokens(section, said, values["kv_bytes_per_token"])
    for name, blocks in _POOLS.items():
        choose(name, getattr(base, blocks) * base.block_size, 0)
    for name, fallback in _OTHERS.items():
        choose(name, fallback, MISSING)
    doubts = _reconcile(values, origins, reserves=base.admission == "reserve")
    if values["decoder"] == "medusa" and medusa_alone:
        values["slots"], origins["slots"] = 1, origins["decoder"]
    size = values["block_size"]
    profile = replace(
        base,
        **{name: values[name] for name in _PLAIN},
        **{blocks: max(name == "kv_capacity_tokens", values[name] // size) for name, blocks in _POOLS.items()},
    )
    if profile.admission == "reserve" and origins["slots"] != "assumed" and profile.effective_slots < profile.slots:
        weaker = _weaker(origins["kv_capacity_tokens"], origins["max_model_len"])
        # What bounds them may only be assumed, but that there are no more than was said is known.
        origins["slots"] = origins["slots"] if weaker == "assumed" else weaker

    def known(name: str, value: int) -> int | None:
        return value if origins[name] != "assumed" else None

    return WorkerCapabilities(
        profile=profile,
        origins=MappingProxyType(origins),
        block_size=known("block_size", size),
        kv_capacity_tokens=known("kv_capacity_tokens", values["kv_capacity_tokens"]),
        max_model_len=known("max_model_len", values["max_model_len"]),
        slots=known("slots", profile.effective_slots),
        prefill=profile.prefill,
        prefill_rate=profile.prefill_rate,
        overhead=profile.overhead,
        tokens_per_step=profile.tokens_per_step,
        prefix_caching=profile.prefix_caching,
        **{name: values[name] for name in _OTHERS},
        tiers=MappingProxyType(_tiers(section, profile)),
        shaped=bool(profile.prefill_buckets)
        or profile.segment_size is not None
        or profile.max_prefix_bucket is not None
        or not profile.prefix_caching,
        doubts=tuple(doubts),
        answers=MappingProxyType(dict(answers)),
        section=section,
        driver_assumes=assumed,
        medusa_alone=medusa_alone,
    )


def _reconcile(values: dict[str, Any], origins: dict[str, Origin], *, reserves: bool) -> list[str]:
    """Make values fit together that come from several places: what is assumed gives way, else the record says so.

    Returns:
        A sentence for each contradiction of values that are all known.
    """
    doubts: list[str] = []
    size = values["block_size"]
    if values["segment_size"] is not None and values["segment_size"] % size:
        doubts.append(f"segments of {values['segment_size']} tokens are no multiple of the block of {size}")
        values["segment_size"] += -values["segment_size"] % size
    longest = -(-values["max_model_len"] // size) * size
    if values["kv_capacity_tokens"] < longest:
        if origins["max_model_len"] == "assumed" and values["kv_capacity_tokens"] >= size:
            values["max_model_len"] = values["kv_capacity_tokens"] // size * size
        else:
            if origins["kv_capacity_tokens"] != "assumed":
                doubts.append(
                    f"the KV cache of {values['kv_capacity_tokens']} tokens is smaller than a request of {longest}"
                )
            values["kv_capacity_tokens"] = longest
    if reserves and origins["slots"] == "assumed":
        weakest = _weaker(origins["kv_capacity_tokens"], origins["max_model_len"])
        if weakest != "assumed":  # such a stack's memory is made for its slots
            longest = -(-values["max_model_len"] // size) * size
            values["slots"], origins["slots"] = values["kv_capacity_tokens"] // longest, weakest
    elif reserves and origins["kv_capacity_tokens"] == "assumed":
        values["kv_capacity_tokens"] = values["slots"] * longest
    if values["prefill"] == "chunked" and values["max_num_batched_tokens"] <= values["slots"]:
        values["max_num_batched_tokens"] = values["slots"] + 1
    return doubts


def _weaker(one: Origin, other: Origin) -> Origin:
    return min(one, other, key=_STRENGTH.index)


def _said(section: Capabilities) -> dict[str, Any]:
    """What is configured, by the names of `describe`; the tiers' capacities come later, once a token's size is known."""
    said = {name: getattr(section, name, None) for name in (*_PLAIN, *_OTHERS, "kv_capacity_tokens")}
    for tier, memory in _memories(section):
        said[f"{tier}_bandwidth"], said[f"{tier}_latency"] = memory.bandwidth, memory.latency
    return said


def _tiers_in_tokens(section: Capabilities, said: dict[str, Any], kv_bytes_per_token: int) -> None:
    for tier, memory in _memories(section):
        if memory.capacity is not None:
            said[f"{tier}_capacity_tokens"] = memory.capacity // kv_bytes_per_token


def _memories(section: Capabilities) -> list[tuple[str, TierMemory]]:
    tiers = section.tiers
    return [(name, memory) for name, memory in (("l1", tiers.l1), ("l2", tiers.l2)) if memory is not None]


def _tiers(section: Capabilities, profile: Profile) -> dict[str, Tier]:
    """The tiers that are configured, or known to hold something."""
    size = profile.block_size
    every = {
        "l1": Tier(profile.l1_blocks * size, profile.l1_bandwidth, profile.l1_latency),
        "l2": Tier(profile.l2_blocks * size, profile.l2_bandwidth, profile.l2_latency),
    }
    configured = {name for name, _ in _memories(section)}
    return {name: tier for name, tier in every.items() if tier.capacity_tokens or name in configured}
