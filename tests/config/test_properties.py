"""What holds for every configuration and every broken file."""

import random
import string
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import schema
from gateway.config.base import REDACTED
from gateway.config.dump import dump
from gateway.config.load import loads
from gateway.config.problems import ConfigError
from gateway.config.units import format_duration, format_size, parse_duration, parse_size

EXAMPLE = (Path(__file__).parents[2] / "config.yaml").read_text(encoding="utf-8")

seconds = st.one_of(st.floats(0, 1e6), st.integers(0, 10**6).map(float), st.integers(0, 10**6).map(lambda n: n / 1000))
sizes = st.one_of(st.integers(1024, 2**40), st.integers(1, 2**20).map(lambda n: n * 1024))
shares = st.floats(0, 1)
counts = st.integers(1, 10**9)
texts = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Cn", "Co"), exclude_characters="\u2028\u2029\ufeff"), max_size=20
)
names = st.one_of(
    st.text(string.ascii_letters + string.digits + " .:/_-${}#&*!%@[],", min_size=1, max_size=20).filter(
        lambda s: s == s.strip()
    ),
    st.sampled_from(
        [
            "no",
            "true",
            "null",
            "~",
            "1e3",
            "0x1",
            "1_000",
            "12:30",
            "2026-12-01",
            "<<",
            "=",
            "- a",
            "a: b",
            "${A}",
            "$${",
        ]
    ),
)
keys = st.text(string.ascii_letters + string.digits + "._~+/=-${}", min_size=1, max_size=20)


def optional(strategy):
    return st.one_of(st.none(), strategy)


def build(struct, **fields):
    return st.builds(struct, **fields)


capabilities = build(
    schema.Capabilities,
    profile=optional(st.sampled_from(schema.PROFILES)),
    block_size=optional(counts),
    prefill_buckets=optional(st.sets(counts, max_size=4).map(sorted).map(tuple)),
    prefix_caching=optional(st.booleans()),
    prefill_rate=optional(st.floats(1, 1e6)),
    overhead=optional(seconds),
    decoder=optional(st.sampled_from(["plain", "speculative", "medusa"])),
    tiers=build(
        schema.Tiers,
        l1=optional(build(schema.TierMemory, capacity=optional(sizes), latency=optional(seconds))),
        l2=optional(build(schema.TierMemory, bandwidth=optional(st.integers(1, 10**12)))),
    ),
    role=optional(st.sampled_from(["both", "prefill", "decode"])),
    lora_adapters=optional(st.lists(texts, max_size=2).map(tuple)),
)
sockets = build(
    schema.EventSocket,
    endpoint=st.sampled_from(["tcp://a:1", "tcp://[::1]:65535", "ipc:///run/x"]),
    replay_endpoint=optional(st.just("tcp://10.0.0.7:5657")),
    topic=optional(names),
)
timeouts = build(schema.Timeouts, connect=seconds, first_byte=seconds, between_chunks=seconds, total=seconds)
retries = build(
    schema.Retries,
    attempts=st.integers(1, 10),
    budget=shares,
    budget_min=counts,
    budget_window=seconds.filter(bool),
    retry_after_max=seconds,
    statuses=st.lists(st.sampled_from([429, 500, 502, 503, 504]), max_size=3).map(tuple),
)
hedging = build(
    schema.Hedging,
    after=st.sampled_from(["p50", "p90", "p95", "p99"]) | seconds.filter(bool),
    budget=shares,
    max=st.integers(1, 3),
)
health = build(
    schema.Health,
    interval=seconds.filter(bool),
    timeout=seconds.filter(bool),
    path=optional(st.sampled_from(["/", "/health", "/ping?a=b"])),
    slow_start=seconds,
)
presets = build(
    schema.Policy,
    preset=st.just("session"),
    parameters=st.fixed_dictionaries(
        {}, optional={"header": optional(names), "body_field": st.lists(names, max_size=3)}
    ),
)


@st.composite
def configs(draw):
    policies = draw(st.dictionaries(names, presets, max_size=2))
    taken = draw(st.lists(names, unique=True, min_size=1, max_size=6))
    models = []
    while taken:
        used = draw(st.integers(1, len(taken)))
        fleet, taken = taken[:used], taken[used:]
        workers = [
            schema.Worker(
                url=f"http{draw(st.sampled_from(['', 's']))}://host-{len(models)}-{index}:{draw(st.integers(1, 65535))}/base",
                driver=draw(st.sampled_from(["vllm", "neuron", "sglang", "openai"])),
                id=draw(optional(st.just(f"w/{len(models)}.{index}"))),
                api_key=draw(optional(keys)),
                model=draw(optional(names)),
                host=draw(optional(names)),
                capabilities=draw(capabilities),
                kv_events=draw(st.sampled_from(["auto", "off"]) | sockets),
                lmcache_events=draw(optional(sockets)),
                forget_after=schema.TierTimes(l1=draw(optional(seconds))),
            )
            for index in range(draw(st.integers(1, 3)))
        ]
        models.append(
            schema.Model(
                name=fleet[0],
                aliases=tuple(fleet[1:]),
                policy=draw(st.sampled_from(["leastload", "p2c", *policies])),
                workers=tuple(workers),
                tokenizer=draw(optional(texts)),
                timeouts=draw(optional(timeouts)),
                retries=draw(optional(retries)),
                hedging=draw(optional(hedging)),
                health=draw(optional(health)),
            )
        )
    idle = draw(seconds)
    traces = schema.Traces(
        headers=draw(st.dictionaries(st.text(string.ascii_letters + "-_", min_size=1, max_size=8), keys, max_size=2)),
        sample=draw(shares),
        file=draw(optional(texts)),
    )
    return schema.Config(
        models=tuple(models),
        listen=schema.Address(host="::1", port=draw(st.integers(0, 65535))),
        policies=policies,
        timeouts=draw(timeouts),
        retries=draw(retries),
        health=draw(health),
        pool=schema.Pool(idle=idle, worker_keep_alive=idle + 1),
        limits=schema.Limits(body=draw(sizes), header=draw(sizes), header_read=draw(seconds), connections=draw(counts)),
        headers=schema.Headers(worker=draw(st.booleans())),
        telemetry=schema.Telemetry(service_name=draw(texts), traces=traces),
        grace=draw(seconds),
    )


@given(configs())
@settings(max_examples=100, deadline=None)
def test_every_configuration_that_is_written_out_loads_equal(config):
    text = dump(config, secrets=True)
    assert loads(text, environ={}) == config
    assert loads(text.replace("\n", "\r\n"), environ={}) == config


@given(configs())
@settings(max_examples=20, deadline=None)
def test_what_is_printed_for_people_differs_in_the_secrets_only(config):
    data = msgspec.to_builtins(config)
    for model in data["models"]:
        for worker in model["workers"]:
            worker["api_key"] = worker["api_key"] and REDACTED
    data["telemetry"]["traces"]["headers"] = dict.fromkeys(config.telemetry.traces.headers, REDACTED)
    assert loads(dump(config), environ={}) == msgspec.convert(data, schema.Config)


@given(seconds)
def test_a_formatted_duration_reads_back_exactly(value):
    assert parse_duration(format_duration(value)) == value


@given(st.integers(0, 2**53))
def test_a_formatted_size_reads_back_exactly(value):
    assert parse_size(format_size(value)) == value


def mutated(text, rng):
    """`text` with one to four random changes: bytes, lines, pieces moved, indentation, values."""
    for _ in range(rng.randint(1, 4)):
        at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        lines = text.splitlines(keepends=True) or [""]
        line = rng.randrange(len(lines))
        match rng.randrange(8):
            case 0:
                text = text[:at] + rng.choice("{}[]:,&*!|>'\"%@`#-? \t\n\r\0\x85\u2028$é😀~=<") + text[at:]
            case 1:
                text = text[:at] + text[min(to, at + 20) :]
            case 2:
                text = text[:at] + text[at : at + 30] + text[at:]
            case 3:
                lines[line] = rng.choice(["  ", "\t", "- ", "? ", "<<: ", "--- "]) + lines[line]
                text = "".join(lines)
            case 4:
                lines.insert(rng.randrange(len(lines)), lines[line])
                text = "".join(lines)
            case 5:
                lines[line] = lines[line].replace("  ", "", 1)
                text = "".join(lines)
            case 6:
                head, colon, _ = lines[line].partition(":")
                value = rng.choice(
                    [
                        "null",
                        "[]",
                        "{}",
                        "-1",
                        "1e99",
                        ".nan",
                        "*a",
                        "&a x",
                        "!x y",
                        "${A}",
                        "${",
                        "'",
                        '"\\x"',
                        "9" * 400,
                    ]
                )
                lines[line] = f"{head}{colon} {value}\n"
                text = "".join(lines)
            case 7:
                text = text.replace("# ", "", 1) if rng.random() < 0.5 else text[:at] + "# " + text[at:]
    return text


def problems_in(text):
    try:
        loads(text, environ={})
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("seed", range(8))
def test_a_mutated_example_loads_or_raises_configuration_errors_only(seed):
    rng = random.Random(seed)
    refused = 0
    for _ in range(60):
        text = mutated(EXAMPLE, rng)
        problems = problems_in(text)
        refused += bool(problems)
        assert all(0 <= problem.mark.line <= len(text.splitlines()) + 1 and str(problem) for problem in problems)
    assert refused > 20


@given(st.text(max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_text_loads_or_raises_configuration_errors_only(text):
    assert problems_in(text)
