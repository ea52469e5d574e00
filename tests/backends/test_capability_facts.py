"""What each driver reads of what its workers tell about themselves."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.capability_facts import MAX_ADAPTERS, CapabilityFacts
from backends.registry import DRIVERS, driver_named

RECORDED = (Path(__file__).parent / "fixtures" / "vllm_metrics.txt").read_bytes()
NEURON = "".join(
    f'vllm_neuron:num_batched_tokens_padding_bucket{{bucket_name="prefill_s{size}",model_name="m",le="0.0"}} 0.0\n'
    for size in (2048, 512, 1024)
) + "".join(
    f'vllm_neuron:neff_execution_count_total{{bucket_name="decode_b{size}",model_name="m"}} 0.0\n' for size in (1, 2, 4)
)
CACHE = 'vllm:cache_config_info{block_size="128",enable_prefix_caching="True",engine="%d",num_gpu_blocks="64"} 1.0\n'


def told(driver, path, body, model="m"):
    body = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return driver_named(driver).capability_facts(path, body, model)


def drafts(accepted, steps, engine=0):
    labels = f'{{engine="{engine}",model_name="m"}}'
    return (
        f"vllm:spec_decode_num_drafts_total{labels} {float(steps)}\n"
        f"vllm:spec_decode_num_draft_tokens_total{labels} {float(steps * 5)}\n"
        f"vllm:spec_decode_num_accepted_tokens_total{labels} {float(accepted)}\n"
    )


def test_recorded_metrics_of_vllm_tell_the_cache():
    assert told("vllm", "/metrics", RECORDED) == CapabilityFacts(
        block_size=32, kv_capacity_tokens=2560, prefix_caching=True, started=1796097507.23
    )


def test_several_ranks_have_their_caches_together():
    facts = told("vllm", "/metrics", CACHE % 0 + CACHE % 1)
    assert (facts.block_size, facts.kv_capacity_tokens) == (128, 2 * 64 * 128)


def test_speculation_is_measured_once_there_is_enough_of_it():
    assert told("vllm", "/metrics", drafts(150, 99)).tokens_per_step is None
    assert told("vllm", "/metrics", drafts(150, 100)).tokens_per_step == 2.5
    assert told("vllm", "/metrics", drafts(300, 100) + drafts(0, 100, engine=1)).tokens_per_step == 2.5
    assert told("vllm", "/metrics", drafts(150, 100)).decoder == "speculative"


def test_buckets_of_neuron_are_read_from_labels_and_the_largest_batch_is_its_slots():
    facts = told("neuron", "/metrics", NEURON + CACHE % 0)
    assert facts.prefill_buckets == (512, 1024, 2048)
    assert facts.decode_batch_buckets == (1, 2, 4)
    assert facts.slots == 4
    assert facts.segment_size is None
    assert told("vllm", "/metrics", NEURON).prefill_buckets is None


def test_a_single_prefill_size_with_prefix_caching_is_a_segment():
    one = NEURON.replace("prefill_s512", "prefill_s1024").replace("prefill_s2048", "prefill_s1024")
    assert told("neuron", "/metrics", one + CACHE % 0).segment_size == 1024
    assert told("neuron", "/metrics", one + (CACHE % 0).replace("True", "False")).segment_size is None
    assert told("neuron", "/metrics", one + (CACHE % 0).replace("128", "96")).segment_size is None
    assert told("neuron", "/metrics", one).segment_size is None


@pytest.mark.parametrize("driver", sorted(DRIVERS))
def test_cards_tell_the_longest_request_and_the_adapters_of_the_model(driver):
    cards = [
        {"id": "other", "max_model_len": 1},
        {"id": "m", "max_model_len": 8192, "parent": None},
        {"id": "support", "parent": "m", "max_model_len": 8192},
        {"id": "stranger", "parent": "other"},
    ]
    facts = told(driver, "/v1/models", {"data": cards})
    assert facts == CapabilityFacts(max_model_len=8192, lora_adapters=("support",))
    assert told(driver, "/v1/models", {"data": cards}, "absent") == CapabilityFacts()


def test_adapters_are_bounded():
    cards = [{"id": "m"}, {"id": "x" * 1000, "parent": "m"}]
    cards += [{"id": f"a{n}", "parent": "m"} for n in range(3 * MAX_ADAPTERS)]
    assert len(told("vllm", "/v1/models", {"data": cards}).lora_adapters) == MAX_ADAPTERS


def test_sglang_tells_almost_everything_itself():
    info = {
        "max_running_requests": 64,
        "context_length": 32768,
        "page_size": 64,
        "max_total_num_tokens": 400_000,
        "chunked_prefill_size": 8192,
        "disable_radix_cache": False,
        "disaggregation_mode": "prefill",
        "speculative_algorithm": "EAGLE3",
        "internal_states": [{"avg_spec_accept_length": 2.75}],
    }
    assert told("sglang", "/server_info", info) == CapabilityFacts(
        block_size=64,
        kv_capacity_tokens=400_000,
        max_model_len=32768,
        slots=64,
        prefill="chunked",
        max_num_batched_tokens=8192,
        prefix_caching=True,
        tokens_per_step=2.75,
        decoder="speculative",
        role="prefill",
    )
    off = told("sglang", "/server_info", info | {"chunked_prefill_size": -1, "disable_radix_cache": True})
    assert (off.prefill, off.max_num_batched_tokens, off.prefix_caching) == ("exclusive", None, False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        "max_running_requests",
        "context_length",
        "page_size",
        "max_total_num_tokens",
        "chunked_prefill_size",
        "disable_radix_cache",
        "disaggregation_mode",
        "speculative_algorithm",
        "internal_states",
        "data",
        "id",
        "parent",
        "max_model_len",
    ]
)
GARBAGE = st.one_of(
    st.binary(max_size=200),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(KEYS, JSON, max_size=6).map(lambda value: json.dumps(value).encode()),
    st.lists(st.sampled_from((NEURON + CACHE + drafts(1, 500)).splitlines()), max_size=20).flatmap(
        lambda lines: st.tuples(st.permutations(list("\n".join(lines))[:60]), st.just("\n".join(lines))).map(
            lambda pair: (pair[1] + "\n" + "".join(pair[0])).encode()
        )
    ),
)


@given(
    driver=st.sampled_from(sorted(DRIVERS)),
    path=st.sampled_from(["/metrics", "/v1/models", "/server_info"]),
    body=GARBAGE,
)
def test_garbage_is_nothing_or_sane(driver, path, body):
    facts = driver_named(driver).capability_facts(path, body, "m")
    for name, value in facts.known().items():
        if isinstance(value, int) and not isinstance(value, bool):
            assert value > 0, name
    if facts.prefill_buckets is not None:
        assert list(facts.prefill_buckets) == sorted(set(facts.prefill_buckets))


def test_a_thousand_buckets_are_none_that_we_understand():
    many = "".join(f'vllm_neuron:x{{bucket_name="prefill_s{n}"}} 1\n' for n in range(1, 1001))
    assert told("neuron", "/metrics", many).prefill_buckets is None
