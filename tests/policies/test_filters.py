"""Filters that read capabilities."""

import pytest

from policies.base import Match, RouteRequest
from policies.filters.fits_context import FitsContext
from policies.filters.has_slot import HasSlot
from policies.filters.lora import Lora
from policies.filters.prefix_bucket_cap import PrefixBucketCap
from policies.filters.role import Role

PROMPT = RouteRequest(model="m", prompt_tokens=1000)


@pytest.fixture
def length(real):
    return lambda tokens: real(max_model_len=tokens, kv_capacity_tokens=100_000)


def test_a_request_goes_where_prompt_and_answer_fit(length, real):
    short, long, unknown = length(1100), length(2000), real()
    body = {"max_tokens": 500}
    request = RouteRequest(model="m", prompt_tokens=1000, body=body)
    assert FitsContext().filter(request, [short, long, unknown]) == [long, unknown]
    assert list(FitsContext().filter(PROMPT, [short, long])) == [short, long]
    assert list(FitsContext().filter(RouteRequest(model="m", body=body), [short])) == [short]


def test_an_answer_that_fits_nowhere_is_for_the_worker_to_judge_but_not_a_prompt(length):
    request = RouteRequest(model="m", prompt_tokens=1000, body={"max_tokens": 5000, "max_completion_tokens": True})
    assert FitsContext().filter(request, [length(900), length(1200)])[0].worker.capabilities.max_model_len == 1200
    assert FitsContext().filter(PROMPT, [length(900), length(1000)]) == []
    assert len(FitsContext(refuse=False).filter(PROMPT, [length(900), length(1000)])) == 2


def test_matches_that_have_no_compiled_shape_are_avoided(real):
    shape = {"prefill_buckets": (512, 1024), "max_prefix_bucket": 1024, "block_size": 32}
    request = RouteRequest(model="m", prompt_tokens=1600)
    much, little, other = real(1280, **shape), real(640, **shape), real(1280)
    assert PrefixBucketCap().filter(request, [much, little, other]) == [little, other]
    assert list(PrefixBucketCap().filter(request, [much])) == [much]
    assert list(PrefixBucketCap().filter(RouteRequest(model="m"), [much, little])) == [much, little]


def test_workers_with_a_free_slot_come_first(real):
    full, free, unknown = real(slots=1), real(slots=2), real()
    for each in (full, free, unknown):
        each.worker.acquire()
    assert HasSlot().filter(PROMPT, [full, free, unknown]) == [free, unknown]
    assert list(HasSlot().filter(PROMPT, [full])) == [full]
    both = [free, unknown]
    assert HasSlot().filter(PROMPT, both) is both


def test_workers_that_only_decode_take_no_prompts(real):
    decode, prefill, both = real(role="decode"), real(role="prefill"), real()
    assert Role().filter(PROMPT, [decode, prefill, both]) == [prefill, both]
    assert Role(role="decode").filter(PROMPT, [decode, prefill, both]) == [decode, both]
    assert list(Role().filter(PROMPT, [decode])) == [decode]


def test_an_adapter_s_requests_go_to_those_that_have_it(real):
    having, other = real(Match(), lora_adapters=("sales",)), real()
    ask = lambda name: RouteRequest(model="m", body={"model": name})  # noqa: E731
    assert Lora().filter(ask("sales"), [having, other]) == [having]
    for name in ("m", "unheard-of", 7, None):
        assert list(Lora().filter(ask(name), [having, other])) == [having, other]
