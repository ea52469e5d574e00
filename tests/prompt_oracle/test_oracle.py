import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.asked_bodies import only_text, relevant
from gateway.prompt.oracle import OracleLimits, OraclePrompter
from gateway.prompt.probes import probes
from gateway.prompt.prompt import How
from simulator.server.faults import Faults

CHAT = "/v1/chat/completions"
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}


def chat(text="hello", **more):
    return {"model": "simulated", "messages": [{"role": "user", "content": text}], **more}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
async def oracle(session):
    """Build an `OraclePrompter` over workers; it must end without a task of its own."""
    built = []

    def oracle(*workers, mode="on", clock=time.monotonic, **limits):
        limits.setdefault("deadline", 5.0)
        made = OraclePrompter(lambda: workers, session, mode=mode, limits=OracleLimits(**limits), clock=clock)
        built.append(made)
        return made

    yield oracle
    for each in built:
        each.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert all(len(each._tasks) == 0 for each in built)


@pytest.mark.parametrize("probe", probes(), ids=lambda probe: probe.name)
async def test_the_ids_are_those_of_the_worker(oracle, simulate, local, probe):
    _, worker = await simulate()
    asked = oracle(worker)
    prompt = await asked.prompt(probe.path, probe.body)
    assert prompt.how is How.EXACT
    assert prompt.ids == local.now(probe.path, probe.body).ids
    assert prompt.token_count == len(prompt.ids) == prompt.new_tokens
    assert asked.counts == {("exact", ""): 1}


async def test_a_path_that_the_worker_does_not_know_is_asked_once(oracle, told, truth):
    server, worker = await told()
    server.answers["/tokenize"] = truth.tokenize
    asked = oracle(worker)
    for text in "abc":
        assert (await asked.prompt(CHAT, chat(text))).how is How.EXACT
    assert server.asked == [f"{CHAT}/render", *["/tokenize"] * 3]


async def test_where_the_worker_renders_it_is_not_asked_to_tokenize(oracle, told, truth):
    server, worker = await told()
    server.answers = {"/tokenize": lambda _body: {"tokens": [1]}, f"{CHAT}/render": truth.render}
    assert (await oracle(worker).prompt(CHAT, chat())).ids.tolist() == truth.ids(chat())
    assert server.asked == [f"{CHAT}/render"]


async def test_the_worker_is_asked_by_its_own_name_of_the_model_and_without_what_makes_no_prompt(oracle, told, truth):
    server, worker = await told()
    server.answers[f"{CHAT}/render"] = truth.render
    await oracle(worker).prompt(
        CHAT, chat(stream=True, max_tokens=7, stream_options={"include_usage": True}) | {"model": "alias"}
    )
    assert server.bodies == [chat()]


async def test_the_same_prompt_is_not_asked_for_again(oracle, told, truth):
    server, worker = await told()
    server.answers[f"{CHAT}/render"] = truth.render
    asked = oracle(worker)
    first = await asked.prompt(CHAT, chat(temperature=0.1))
    again = asked.now(CHAT, chat(temperature=0.9, stream=True))
    assert again is not None
    assert again.segments == first.segments
    assert len(server.asked) == 1
    assert asked.stats["hits"] == 1


async def test_several_prompts_come_together(oracle, told):
    server, worker = await told()
    server.answers["/v1/completions/render"] = lambda _body: [{"token_ids": [1, 2]}, {"token_ids": [3]}]
    prompt = await oracle(worker).prompt("/v1/completions", {"prompt": ["a", "b"]})
    assert [one.ids.tolist() for one in (prompt, *prompt.also)] == [[1, 2], [3]]
    assert prompt.token_count == 2


async def test_a_burst_of_equal_prompts_is_one_question(oracle, told, truth):
    server, worker = await told()
    server.answers[f"{CHAT}/render"] = truth.render
    asked = oracle(worker, in_flight=1)
    found = await asyncio.gather(*(asked.prompt(CHAT, chat()) for _ in range(32)))
    assert {prompt.how for prompt in found} == {How.EXACT}
    assert len(server.asked) == 1


async def test_no_more_questions_than_allowed_are_in_flight(oracle, told):
    server, worker = await told()
    server.answers[f"{CHAT}/render"] = lambda _body: None
    asked = oracle(worker, in_flight=2)
    waiting = [asyncio.create_task(asked.prompt(CHAT, chat(text))) for text in "ab"]  # noqa: TID251
    while len(server.asked) < 2:
        await server.news.wait()
        server.news.clear()
    third = asked.now(CHAT, chat("c"))
    assert (third.how, third.reason) == (How.APPROXIMATE, "busy")
    assert asked.stats["pending"] == 2
    asked.close()
    assert {prompt.reason for prompt in await asyncio.gather(*waiting)} == {"closed"}
    assert asked.now(CHAT, chat("d")).reason == "closed"


async def test_one_that_gives_up_waiting_does_not_take_the_answer_from_others(oracle, told, truth):
    server, worker = await told()
    server.answers[f"{CHAT}/render"] = truth.render
    asked = oracle(worker)
    waiting = [asyncio.create_task(asked.prompt(CHAT, chat())) for _ in range(2)]  # noqa: TID251
    await asyncio.sleep(0)
    waiting[0].cancel()
    assert (await waiting[1]).how is How.EXACT


async def test_auto_asks_for_long_prompts_where_there_is_a_choice(oracle, told, truth):
    (one, first), (other, second) = await told(), await told()
    one.answers[f"{CHAT}/render"] = other.answers[f"{CHAT}/render"] = truth.render
    long = chat("long " * 400)
    asked = oracle(first, second, mode="auto", least=1000)
    assert asked.now(CHAT, chat()).reason == "oracle: too short to ask"
    assert asked.now(CHAT, chat("x" * 200, user="x" * 2000), 2300).reason == "oracle: too short to ask"
    assert (await asked.prompt(CHAT, long)).how is How.EXACT
    second.routable = False
    assert asked.now(CHAT, chat("other " * 400)).reason == "oracle: no choice between workers"
    assert asked.now(CHAT, long).how is How.EXACT, "what is known needs no choice"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [IMAGE]}, "content part: other than text"),
        (chat("x" * 3000), "too big"),
        (chat("\ud800"), "not JSON"),
    ],
)
async def test_what_cannot_be_known_is_not_asked_for(oracle, told, body, reason):
    server, worker = await told()
    prompt = await oracle(worker, body=2000).prompt(CHAT, body)
    assert (prompt.how, prompt.reason) == (How.APPROXIMATE, reason)
    assert server.asked == []


async def test_switched_off_it_never_asks(oracle, told):
    server, worker = await told()
    prompt = oracle(worker, mode="off").now(CHAT, chat())
    assert (prompt.how, prompt.reason) == (How.APPROXIMATE, "oracle: off")
    assert server.asked == []


async def test_ids_of_the_client_need_no_question_and_no_worker(oracle):
    prompt = oracle(mode="off").now("/v1/completions", {"prompt": [[1, 2], [3]]})
    assert [one.ids.tolist() for one in (prompt, *prompt.also)] == [[1, 2], [3]]
    assert oracle().now("/invocations", {"prompt": [1, 2]}).ids.tolist() == [1, 2]


@pytest.mark.parametrize(("path", "body"), [("/v1/embeddings", {"input": "x"}), (CHAT, [1]), (CHAT, None)])
async def test_what_has_no_prompt_has_none(oracle, path, body):
    assert oracle().now(path, body).how is How.NONE


async def test_a_prompt_that_the_worker_refuses_is_no_failure_of_the_worker(oracle, told):
    server, worker = await told()
    server.answers[f"{CHAT}/render"] = lambda _body: 400
    asked = oracle(worker, failures=1)
    for text in "ab":
        assert (await asked.prompt(CHAT, chat(text))).reason == "oracle: refused"
    assert server.asked == [f"{CHAT}/render"] * 2
    assert asked.stats["off"] == 0


async def test_a_worker_that_hangs_costs_the_deadline_a_few_times_and_then_nothing_for_a_while(oracle, simulate):
    server, worker = await simulate(faults=Faults(hang=True))
    clock = Clock()
    asked = oracle(worker, deadline=0.05, failures=2, pause=10.0, clock=clock)
    for text in "ab":
        started = asyncio.get_running_loop().time()
        assert (await asked.prompt(CHAT, chat(text))).reason in ("oracle: failed", "oracle: late_here")
        assert asyncio.get_running_loop().time() - started < 2
    assert asked.now(CHAT, chat("c")).reason == "oracle: no worker to ask"
    assert asked.stats["off"] == 1
    server.faults.hang = False
    clock.now += 9.9
    assert asked.now(CHAT, chat("d")).reason == "oracle: no worker to ask"
    clock.now += 0.2
    assert asked.now(CHAT, chat("e")) is None, "one may try"


async def test_while_one_worker_is_off_the_others_are_asked(oracle, told, truth, join):
    bad, first = await told()
    good, second = await told()
    bad.answers[f"{CHAT}/render"] = lambda _body: 500
    good.answers[f"{CHAT}/render"] = truth.render
    asked = oracle(first, second, failures=1)
    found = [await asked.prompt(CHAT, chat(str(number))) for number in range(30)]
    assert [prompt.how for prompt in found].count(How.APPROXIMATE) == len(bad.asked) <= 1
    first.routable = second.routable = False
    assert asked.now(CHAT, chat("z")).reason == "oracle: no worker to ask"


@pytest.mark.parametrize("answer", [{}, [], {"tokens": "x"}, {"tokens": [None]}])
async def test_an_answer_that_makes_no_sense_is_a_failure(oracle, told, answer):
    server, worker = await told()
    server.answers[f"{CHAT}/render"] = lambda _body: answer
    asked = oracle(worker)
    prompt = await asked.prompt(CHAT, chat())
    assert (prompt.how, prompt.reason) == (How.APPROXIMATE, "oracle: failed")


async def test_the_cache_stays_within_its_bytes(oracle, told):
    server, worker = await told()
    server.answers[f"{CHAT}/render"] = lambda _body: {"token_ids": list(range(1000))}
    asked = oracle(worker, cache=40_000)
    for number in range(10):
        await asked.prompt(CHAT, chat(str(number)))
    assert asked.stats["bytes"] <= 40_000
    assert asked.stats["entries"] == 3
    assert asked.stats["evictions"] == 7


async def test_a_worker_that_is_gone_is_forgotten(session, told, truth):
    servers = [await told() for _ in range(3)]
    for server, _ in servers:
        server.answers[f"{CHAT}/render"] = truth.render
    fleet = []
    asked = OraclePrompter(lambda: fleet, session, mode="on", limits=OracleLimits(deadline=5.0))
    for number, (_, worker) in enumerate(servers):
        fleet[:] = [worker]
        await asked.prompt(CHAT, chat(str(number)))
    assert list(asked._circuits) == [servers[-1][1].id]


SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "max_tokens": st.integers(1, 9),
        "stream": st.booleans(),
        "user": st.text(max_size=3),
        "stop": st.text(max_size=3),
    },
)
OTHER = st.dictionaries(
    st.sampled_from(["messages", "tools", "documents", "reasoning_effort", "chat_template_kwargs", "some_new_field"]),
    st.text(max_size=3),
    max_size=3,
)


@given(SAMPLING, OTHER)
def test_only_what_can_never_change_a_prompt_is_left_out(sampling, other):
    assert relevant(sampling | other) == other


@pytest.mark.parametrize(
    ("body", "is_text"),
    [
        (chat(), True),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, True),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, True),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]}, False),
        ({"messages": [IMAGE]}, False),
        ({"messages": [5]}, False),
        ({"messages": [[[[[[["x"]]]]]]]}, False),
        ({"messages": [{"type": ["text"]}]}, False),
        ({"system": [{"type": "text", "text": "x"}], "messages": "x"}, True),
    ],
)
def test_what_holds_more_than_text_is_told_apart(body, is_text):
    assert only_text(body) is is_text
