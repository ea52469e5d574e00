"""What drivers read out of their workers' answers about events and caches."""

import msgspec
import pytest

from backends.kv_events import EventSource, merged, reachable
from backends.kv_events import facts as facts_from
from backends.registry import driver_named


def test_vllm_names_its_sockets_by_rank():
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv@a"}
    payload = {
        "0": {**config, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"},
        "1": {**config, "endpoint": "tcp://*:5558", "replay_endpoint": None},
        "2": {**config, "endpoint": "tcp://*:5559", "publisher": "null"},
        "3": {**config, "endpoint": "tcp://*:5559", "enable_kv_cache_events": False},
        "x": {**config, "endpoint": "tcp://*:5559"},
        "4": "?",
        "5": {**config, "endpoint": "inproc://here"},
    }
    assert driver_named("neuron").parse_sources(payload, "10.0.0.7") == [
        EventSource(endpoint="tcp://10.0.0.7:5557", replay_endpoint="tcp://10.0.0.7:5657", topic="kv@a", rank=0),
        EventSource(endpoint="tcp://10.0.0.7:5558", topic="kv@a", rank=1),
    ]


def test_sglang_names_one_port_per_rank():
    block = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "",
        "block_size": 64,
        "dp_size": 2,
    }
    driver = driver_named("sglang")
    assert driver.parse_sources({"kv_events": block}, "w") == [
        EventSource(endpoint=f"tcp://w:{5557 + rank}", rank=rank, block_size=64) for rank in range(2)
    ]
    assert driver.parse_sources({"kv_events": None}, "w") == ()
    facts = driver.parse_facts(b'{"page_size": 64, "max_total_num_tokens": 6400, "disable_radix_cache": false}')
    assert (facts.block_size, facts.blocks, facts.prefix_caching) == (64, 100, True)


@pytest.mark.parametrize("name", ["vllm", "sglang", "openai", "neuron"])
@pytest.mark.parametrize(
    "payload", [None, 7, [], "x", {}, {"0": None}, {"0": {"endpoint": 7}}, {"kv_events": {"publisher": "zmq"}}]
)
def test_answers_that_make_no_sense_name_nothing(name, payload):
    driver = driver_named(name)
    assert list(driver.parse_sources(payload, "w")) == []
    assert driver.parse_facts(msgspec.json.encode(payload)).block_size is None
    assert driver.parse_facts(b"\xff\x00{").origins in (None, {})


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "w.example", "tcp://w.example:5557"),
        ("tcp://[::]:5557", "fd00::7", "tcp://[fd00::7]:5557"),
        ("tcp://127.0.0.1:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://127.0.0.1:5557", "localhost", "tcp://127.0.0.1:5557"),
        ("tcp://10.1.0.7:5557", "10.0.0.7", "tcp://10.1.0.7:5557"),
        ("tcp://*:0", "w", None),
        ("tcp://*:70000", "w", None),
        ("ipc:///tmp/x", "w", None),
        (None, "w", None),
    ],
)
def test_what_a_worker_has_bound_becomes_an_address_to_connect_to(endpoint, host, expected):
    assert reachable(endpoint, host) == expected


def test_facts_come_from_the_first_that_knows_them():
    one = facts_from("configured", block_size=16)
    other = facts_from("/metrics", block_size=32, blocks=100)
    both = merged(one, other)
    assert (both.block_size, both.known("block_size")) == (16, "configured")
    assert (both.blocks, both.known("blocks")) == (100, "/metrics")
    assert (both.started, both.known("started")) == (None, "")
