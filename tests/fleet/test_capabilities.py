"""What a worker can do: joined from the configuration, a profile, its own words and assumptions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.capability_facts import CapabilityFacts
from backends.profiles import PROFILES
from backends.registry import DRIVERS, driver_named
from gateway.config.schema import Capabilities, TierMemory, Tiers
from gateway.fleet.capabilities import WorkerCapabilities
from gateway.fleet.worker import Worker

NEURON = driver_named("neuron")
VLLM = driver_named("vllm")


def record(driver=VLLM, facts=None, **section):
    made = WorkerCapabilities.of(Capabilities(**section), driver)
    return made if facts is None else made.heard("/metrics", facts, 1.0)


@pytest.mark.parametrize("driver", sorted(DRIVERS))
def test_nothing_is_claimed_of_a_worker_of_which_nothing_is_known(driver):
    it = record(driver_named(driver))
    assert (it.block_size, it.kv_capacity_tokens, it.max_model_len, it.slots) == (None,) * 4
    assert set(it.origins.values()) == {"assumed"}
    assert it.profile.prefill_rate > 0
    assert not it.shaped
    assert it.padded(1000) == 1000
    assert it.credit(1000, 999) == 999
    assert it.takes(10**9, 10**9)
    assert it.tiers == {}


def test_a_neuron_worker_is_taken_to_prefill_one_prompt_at_a_time_and_others_in_chunks():
    assert record(NEURON).prefill == "exclusive"
    assert record(NEURON).profile.admission == "reserve"
    assert record(VLLM).prefill == "chunked"


def test_the_configuration_beats_the_profile_which_beats_the_worker_which_beats_assumptions():
    facts = CapabilityFacts(block_size=64, max_model_len=4096, slots=2, tokens_per_step=1.5)
    it = record(NEURON, facts, profile="trn2-70b", block_size=16)
    assert (it.block_size, it.origins["block_size"]) == (16, "configured")
    assert (it.max_model_len, it.origins["max_model_len"]) == (32_768, "profile")
    assert (it.tokens_per_step, it.origins["tokens_per_step"]) == (1.5, "discovered")
    assert (it.role, it.origins["role"]) == ("both", "assumed")


def test_a_profile_states_nothing_where_it_has_what_every_profile_has():
    it = record(NEURON, CapabilityFacts(prefix_caching=False), profile="trn2-70b")
    assert (it.prefix_caching, it.origins["prefix_caching"]) == (False, "discovered")
    assert record(NEURON, profile="trn2-70b").origins["prefix_caching"] == "profile"


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_named_profile_is_taken_over_number_by_number(name):
    it = record(NEURON, profile=name)
    assert it.profile == PROFILES[name]
    assert it.slots == PROFILES[name].effective_slots
    assert it.kv_capacity_tokens == PROFILES[name].kv_blocks * PROFILES[name].block_size


@pytest.mark.parametrize("name", sorted(PROFILES))
@pytest.mark.parametrize("uncached", [0, 1, 511, 512, 513, 8192, 8193, 9000, 30_000])
def test_padded_tokens_are_all_chunks_together(name, uncached):
    assert record(NEURON, profile=name).padded(uncached) == sum(PROFILES[name].chunks(uncached))


def test_capacity_in_tokens_stays_when_the_block_size_is_another():
    it = record(NEURON, profile="trn2-70b", block_size=128)
    assert it.kv_capacity_tokens == 131_072
    assert it.profile.kv_blocks == 1024


@pytest.mark.parametrize(
    ("seqs", "capacity", "length", "slots"),
    [(8, 65_536, 8192, 8), (8, 65_536, 16_384, 4), (32, 40_000, 8192, 4), (1, 65_536, 8192, 1), (2, 8192, 8192, 1)],
)
def test_on_neuron_memory_bounds_the_slots(seqs, capacity, length, slots):
    fields = {"slots": seqs, "kv_capacity_tokens": capacity, "max_model_len": length}
    assert record(NEURON, block_size=32, **fields).slots == slots
    assert record(NEURON, CapabilityFacts(block_size=32, **fields)).slots == slots
    assert record(VLLM, block_size=32, **fields).slots == seqs


def test_slots_that_only_an_assumption_bounds_are_those_that_were_told():
    assert record(NEURON, CapabilityFacts(slots=16)).slots == 16
    assert record(NEURON, CapabilityFacts(slots=16, max_model_len=100_000)).slots == 16


def test_a_neuron_worker_that_does_not_tell_its_batch_has_as_many_slots_as_its_memory_holds():
    it = record(NEURON, CapabilityFacts(block_size=32, kv_capacity_tokens=65_536, max_model_len=8192))
    assert (it.slots, it.origins["slots"]) == (8, "discovered")
    assert record(VLLM, CapabilityFacts(kv_capacity_tokens=65_536, max_model_len=8192)).slots is None


def test_medusa_on_neuron_is_one_slot_and_elsewhere_is_not():
    assert record(NEURON, profile="trn2-70b", decoder="medusa").slots == 1
    assert record(NEURON, decoder="medusa").slots == 1
    assert record(NEURON, CapabilityFacts(slots=8), decoder="medusa").slots == 1
    assert record(VLLM, slots=8, decoder="medusa").slots == 8


def test_without_prefix_caching_nothing_is_credited():
    it = record(VLLM, CapabilityFacts(prefix_caching=False))
    assert it.shaped
    assert it.credit(1000, 512) == 0


def test_segments_and_caps_are_those_of_the_profile():
    it = record(NEURON, profile="trn2-70b")
    assert it.shaped
    assert it.credit(4000, 1500) == 1024
    assert not record(NEURON, profile="trn1-8b", max_prefix_bucket=1024).takes(512, 2048)


def test_tiers_are_those_that_are_known():
    tiers = Tiers(l1=TierMemory(capacity=131_072 * 640, bandwidth=10**9), l2=TierMemory(latency=0.01))
    it = record(VLLM, block_size=64, kv_bytes_per_token=131_072, tiers=tiers)
    assert it.tiers["l1"].capacity_tokens == 640
    assert it.profile.l1_blocks == 10
    assert it.tiers["l2"].latency == 0.01
    assert it.load_seconds(1000, 0) == pytest.approx(0.0005 + 1000 * 131_072 / 1e9)
    assert record(VLLM, CapabilityFacts(l1_capacity_tokens=4096)).tiers.keys() == {"l1"}


def test_contradictions_between_what_was_told_and_what_is_configured_are_said():
    it = record(NEURON, CapabilityFacts(block_size=128), segment_size=1000)
    assert it.segment_size == 1024
    assert "no multiple of the block of 128" in it.doubts[0]
    it = record(NEURON, CapabilityFacts(block_size=32, kv_capacity_tokens=1024, max_model_len=8192, slots=4))
    assert it.slots == 1
    assert "smaller than a request" in it.doubts[0]
    assert it.kv_capacity_tokens == 8192
    assert record(NEURON, CapabilityFacts(block_size=32, kv_capacity_tokens=1024)).doubts == ()


def test_every_value_is_described_with_its_origin():
    it = record(NEURON, CapabilityFacts(prefill_buckets=(512, 1024), lora_adapters=("a",)), slots=2)
    said = it.describe()
    assert said.keys() == it.origins.keys()
    assert said["slots"] == {"value": 2, "origin": "configured"}
    assert said["prefill_buckets"] == {"value": [512, 1024], "origin": "discovered"}
    assert said["lora_adapters"] == {"value": ["a"], "origin": "discovered"}
    assert said["prefill"] == {"value": "exclusive", "origin": "assumed"}


def test_a_reload_keeps_what_was_heard_and_an_equal_section_keeps_the_record():
    it = record(VLLM, CapabilityFacts(block_size=64))
    assert it.configured(Capabilities()) is it
    changed = it.configured(Capabilities(slots=3))
    assert (changed.slots, changed.block_size) == (3, 64)


def test_an_answer_replaces_what_the_same_path_said_and_notes_when():
    it = record(VLLM, CapabilityFacts(block_size=64, slots=2))
    assert (it.heard_at("/metrics"), it.heard_at("/v1/models")) == (1.0, None)
    again = it.heard("/metrics", CapabilityFacts(block_size=64, slots=2), 9.0)
    assert again.heard_at("/metrics") == 9.0
    assert again == it
    it = it.heard("/v1/models", CapabilityFacts(max_model_len=2048), 2.0).heard(
        "/metrics", CapabilityFacts(block_size=32), 3.0
    )
    assert (it.block_size, it.slots, it.max_model_len) == (32, None, 2048)


def test_a_worker_is_made_with_its_record():
    worker = Worker(url="http://a:1", driver=NEURON, model="m", capabilities=Capabilities(profile="trn2-70b"))
    assert worker.capabilities.slots == 4
    assert Worker(url="http://a:1", driver=NEURON, model="m").capabilities.slots is None


counts = st.integers(1, 300_000)
sizes = st.one_of(st.none(), st.sets(counts, min_size=1, max_size=6).map(sorted).map(tuple))
said = st.fixed_dictionaries(
    {},
    optional={
        "block_size": st.integers(1, 4096),
        "kv_capacity_tokens": counts,
        "max_model_len": counts,
        "slots": st.integers(1, 10_000),
        "max_num_batched_tokens": counts,
        "prefill_buckets": sizes,
        "decode_context_buckets": sizes,
        "segment_size": counts,
        "prefill": st.sampled_from(["exclusive", "chunked"]),
        "tokens_per_step": st.floats(1, 64),
        "decoder": st.sampled_from(["plain", "medusa"]),
        "prefix_caching": st.booleans(),
    },
)


@given(
    driver=st.sampled_from(sorted(DRIVERS)),
    profile=st.one_of(st.none(), st.sampled_from(sorted(PROFILES))),
    configured=said,
    heard=said,
)
def test_whatever_is_said_by_whomever_makes_a_record_by_which_requests_can_run(driver, profile, configured, heard):
    it = record(driver_named(driver), CapabilityFacts(**heard), profile=profile, **configured)
    assert replace(it.profile) == it.profile  # its numbers pass the profile's own checks
    assert it.profile.effective_slots >= 1
    assert it.slots is None or it.slots >= 1
    assert it.padded(5000) >= 5000
    assert 0 <= it.credit(5000, 3000) <= 3000
    for name, value in it.describe().items():
        known = value["origin"] != "assumed"
        assert known or name not in configured or configured[name] is None
