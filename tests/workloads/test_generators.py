"""Made-up traffic keeps what it promises, whatever its numbers."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.workloads import GENERATORS, WorkloadError, generate, parameters
from simulator.workloads.generators.groups import LADDER
from simulator.workloads.runs import Ids
from simulator.workloads.text import Text

SMALL = {
    "chat": {"users": 30},
    "documents": {"documents": 8, "readers": 30},
    "groups": {"groups": 10, "rates": "3x10 9x20"},
    "rufus": {"shoppers": 30},
    "unique": {"requests": 200},
}


@pytest.fixture(params=sorted(GENERATORS))
def name(request):
    return request.param


def shared(one, two):
    return next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))


def test_equal_seeds_make_equal_traffic_and_others_make_other(name):
    first, again, other = (generate(name, seed=seed, **SMALL[name]) for seed in (5, 5, 6))
    assert first == again
    assert [request.time for request in first.requests] != [request.time for request in other.requests]
    assert first.seed == 5


def test_every_parameter_can_be_given_as_text(name):
    for parameter in parameters(name):
        numbers = {**SMALL[name], parameter.name: str(SMALL[name].get(parameter.name, parameter.default))}
        expected = {**SMALL[name], parameter.name: SMALL[name].get(parameter.name, parameter.default)}
        assert generate(name, **numbers) == generate(name, **expected)


def test_a_number_out_of_bounds_is_refused_by_name(name):
    known = {parameter.name for parameter in parameters(name)}
    for key in known - {"rates", "variation", "think", "skew", "fetch", "system_tokens"}:
        with pytest.raises(WorkloadError, match=key):
            generate(name, **{**SMALL[name], key: 0})
    for key in known & {"variation", "think", "skew", "fetch"}:
        with pytest.raises(WorkloadError, match=key):
            generate(name, **{**SMALL[name], key: "nan"})


def test_too_many_requests_are_refused():
    with pytest.raises(WorkloadError, match="at most 1000000"):
        generate("unique", requests=10**9)
    with pytest.raises(WorkloadError, match="at most 1000000"):
        generate("groups", rates="1e9x1e9")
    with pytest.raises(WorkloadError, match="stages like"):
        generate("groups", rates="quick")


def test_followers_come_after_a_request_of_their_own_session(name):
    by_id = {}
    for request in generate(name, **SMALL[name]).requests:
        if request.after is not None:
            assert by_id[request.after].session == request.session
        by_id[request.id] = request


@pytest.mark.parametrize("name", ["chat", "documents"])
def test_a_turn_begins_with_the_prompt_and_the_answer_before_it(name):
    workload = generate(name, block_tokens=32, **SMALL[name])
    by_id = {request.id: request for request in workload.requests}
    for request in workload.requests:
        if request.after is None:
            continue
        before = by_id[request.after]
        whole = before.prompt_tokens // 32
        answered = (before.prompt_tokens + before.output_tokens) // 32
        blocks = list(request.blocks)
        assert blocks[:whole] == list(before.blocks)[:whole]
        assert blocks[whole:answered] == list(before.output_blocks)
        assert request.prompt_tokens > before.prompt_tokens + before.output_tokens


def test_groups_share_their_system_prompt_and_nothing_with_others():
    workload = generate("groups", groups=4, prompts=3, rates="20x10")
    by_group = defaultdict(dict)
    for request in workload.requests:
        group, prompt = request.session.split("-")
        by_group[group][prompt] = list(request.blocks)
    assert len(by_group) == 4
    for group, prompts in by_group.items():
        texts = list(prompts.values())
        assert len(texts) == 3
        assert all(shared(texts[0], text) == 6000 // 16 for text in texts[1:])
        assert all(len(text) == 7200 // 16 for text in texts)
        for other, foreign in by_group.items():
            if other != group:
                assert shared(texts[0], next(iter(foreign.values()))) == 0


def test_the_groups_of_llm_d_come_at_its_rates():
    workload = generate("groups")
    expected = sum(float(rate) * float(seconds) for rate, seconds in (step.split("x") for step in LADDER.split()))
    assert len(workload.requests) == pytest.approx(expected, rel=0.05)
    assert len({request.session for request in workload.requests}) == 750
    last = [request for request in workload.requests if request.time > workload.requests[-1].time - 25]
    assert len(last) / 25 == pytest.approx(60, rel=0.1)


def test_readers_of_one_document_share_it():
    workload = generate("documents", documents=1, readers=5, variation=0, document_tokens=1600, system_tokens=0)
    firsts = [list(request.blocks) for request in workload.requests if request.after is None]
    assert len(firsts) == 5
    assert all(shared(firsts[0], text) == 100 for text in firsts[1:])


def test_a_generators_request_waits_for_its_plan_and_a_plan_for_the_answer_before():
    workload = generate("rufus", **SMALL["rufus"])
    by_id = {request.id: request for request in workload.requests}
    assert {request.stage for request in workload.requests} == {"planner", "generator"}
    for request in workload.requests:
        if request.stage == "generator":
            assert by_id[request.after].stage == "planner"
        elif request.after is not None:
            assert by_id[request.after].stage == "generator"


def test_unique_prompts_share_nothing():
    workload = generate("unique", requests=300)
    ids = [block for request in workload.requests for block in request.blocks]
    assert len(ids) == len(set(ids))


@given(st.integers(1, 40), st.lists(st.integers(0, 200), min_size=1, max_size=8), st.integers(0, 7), st.integers(1, 99))
def test_texts_share_exactly_the_whole_runs_of_what_they_grew_from(block_tokens, steps, fork, new):
    ids = Ids()
    text = Text(ids, block_tokens)
    texts = [text]
    for step in steps:
        text = text.grown(step)
        texts.append(text)
    for made in texts:
        assert len(made.blocks) == -(-made.tokens // block_tokens)
    origin = texts[min(fork, len(steps))]
    one, two = origin.grown(new), origin.grown(new)
    whole = origin.tokens // block_tokens
    assert shared(list(one.blocks), list(two.blocks)) == whole
    assert list(text.blocks)[:whole] == list(origin.blocks)[:whole]
    after = list(text.blocks_after(origin))
    assert after == list(text.blocks)[whole : text.tokens // block_tokens]
