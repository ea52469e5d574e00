import asyncio

import pytest
from structlog.testing import capture_logs

from gateway.fleet.worker import WorkerState
from gateway.prompt.guard import GuardedPrompter
from gateway.prompt.parity import WINDOW, Parity, ParityRules
from gateway.prompt.parity_status import Standing
from gateway.prompt.probes import probes
from gateway.prompt.prompt import How
from gateway.prompt.prompter import Prompter
from gateway.prompt.tokenizer import PromptTokenizer
from simulator.server.faults import Faults

CHAT = "/v1/chat/completions"
NAMES = tuple(probe.name for probe in probes())
QUICK = {"look": 0.01, "question": 5.0, "generation": 5.0, "retry": 0.05, "retry_most": 0.1}
BODY = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def parity(session, local, until):
    """Start a `Parity` over workers and wait until each one has a standing."""
    started = []

    async def parity(*workers, prompter=local, settled=True, **rules):
        made = Parity("m", prompter, session, rules=ParityRules(**(QUICK | rules)))
        started.append(made)
        made.start(workers)
        if settled:
            await until(lambda: Standing.PENDING not in {status.standing for status in made.snapshot()})
        return made

    yield parity
    for each in started:
        await each.stop()
        assert len(each._tasks) == 0


def only(parity):
    (status,) = parity.snapshot()
    return status


async def test_a_worker_with_the_same_tokenizer_is_proven_when_it_is_ready(parity, simulate, until):
    _, worker = await simulate()
    worker.state = WorkerState.WARMING
    checked = await parity(worker, settled=False)
    checked._look()
    assert only(checked).standing is Standing.PENDING
    assert not checked.proven(worker.id)
    worker.state = WorkerState.READY
    await until(lambda: checked.proven(worker.id))
    status = only(checked)
    assert (status.standing, status.compared, status.skipped, status.generated) == (Standing.EXACT, NAMES, (), True)
    assert checked.trusted
    assert checked.degraded() == []


async def test_another_template_is_a_mismatch_that_names_the_probe_and_the_token(
    parity, simulate, changed_model, local
):
    model = changed_model(template=("Functions you may call", "Tools you may call"))
    _, worker = await simulate(tokenizer=model)
    with capture_logs() as logs:
        checked = await parity(worker, retry=60.0, retry_most=60.0)
    status = only(checked)
    assert status.standing is Standing.MISMATCH
    assert status.compared == ("user", "system", "unicode", "turns")
    tools = next(probe for probe in probes() if probe.name == "tools")
    ours = local.now(tools.path, tools.body).ids
    theirs = Prompter(PromptTokenizer.from_directory(model)).now(tools.path, tools.body).ids
    place = next(place for place, (our, their) in enumerate(zip(ours, theirs, strict=False)) if our != their)
    said = [f"tokenizer disagrees with {worker.id} at token {place} of probe 'tools': prompts are matched by bytes"]
    assert checked.degraded() == said
    assert not checked.trusted
    assert not checked.proven(worker.id)
    assert [(line["log_level"], line["worker"]) for line in logs] == [("warning", worker.id)]


async def test_another_vocabulary_is_a_mismatch(parity, simulate, changed_model):
    _, worker = await simulate(tokenizer=changed_model(merges=800))
    assert only(await parity(worker)).standing is Standing.MISMATCH


async def test_one_worker_that_disagrees_makes_the_whole_model_approximate(parity, simulate, changed_model, local):
    _, good = await simulate()
    _, bad = await simulate(tokenizer=changed_model(template=("Functions", "Things")))
    guarded = GuardedPrompter(local, checked := await parity(good, bad))
    assert not checked.trusted
    prompt = guarded.now(CHAT, BODY)
    assert (prompt.how, prompt.reason) == (How.APPROXIMATE, "tokenizer mismatch")
    assert (await guarded.prompt(CHAT, BODY)).how is How.APPROXIMATE
    assert guarded.now("/v1/completions", {"prompt": [1, 2]}).ids.tolist() == [1, 2], "the client's own ids stay exact"
    assert guarded.now("/v1/embeddings", {}).how is How.NONE
    assert guarded.counts["approximate", "tokenizer mismatch"] == 2
    checked.update([good])
    assert checked.trusted
    assert guarded.now(CHAT, BODY).how is How.EXACT


async def test_a_prompt_that_was_waiting_when_the_mismatch_came_is_approximate(local):
    class Fake:
        trusted = True

    class Slow:
        async def prompt(self, path, body, size):
            Fake.trusted = False
            return local.now(path, body)

    assert (await GuardedPrompter(Slow(), Fake()).prompt(CHAT, BODY)).how is How.APPROXIMATE


async def test_a_mismatch_ends_when_all_is_equal_again_and_is_logged_once(parity, told, truth, until):
    server, worker = await told()
    wrong = True

    def tokenize(body):
        ids = truth.ids(body)
        return {"tokens": [*ids[:-1], 0] if wrong else ids}

    server.answers = {"/tokenize": tokenize, CHAT: truth.generated}
    with capture_logs() as logs:
        checked = await parity(worker)
        count = len(server.asked)
        await until(lambda: len(server.asked) > count)
        assert only(checked).standing is Standing.MISMATCH
        wrong = False
        await until(lambda: checked.trusted)
    assert checked.proven(worker.id)
    assert [line["log_level"] for line in logs] == ["warning", "info"]


async def test_rounds_that_find_no_equality_come_ever_more_rarely(session, local, told, until):
    server, worker = await told()
    server.answers["/tokenize"] = lambda _body: {"tokens": [1]}
    now = 0.0
    rules = ParityRules(look=0.001, retry=30.0, retry_most=200.0)
    checked = Parity("m", local, session, rules=rules, clock=lambda: now)
    checked.start([worker])
    pauses = []
    for number in range(1, 6):
        await until(lambda number=number: checked._records[worker.id].fruitless == number)
        pauses.append(checked._records[worker.id].next_round - now)
        now += pauses[-1]
    await checked.stop()
    for pause, wanted in zip(pauses, [30, 60, 120, 200, 200], strict=True):
        assert pause == pytest.approx(wanted, rel=0.11)


async def test_a_worker_without_the_routes_is_unverified_which_is_shown_and_no_degradation(parity, told):
    _, worker = await told()
    checked = await parity(worker)
    status = only(checked)
    assert (status.standing, status.compared, status.skipped) == (Standing.UNVERIFIED, (), NAMES)
    assert status.detail == "POST /tokenize answered 404"
    assert checked.trusted
    assert checked.degraded() == []
    for _ in range(100):
        checked.observed(worker.id, 7, 7)
    assert not checked.proven(worker.id)


async def test_a_worker_that_only_generates_proves_itself_by_that(parity, told, truth):
    server, worker = await told()
    server.answers[CHAT] = truth.generated
    checked = await parity(worker)
    assert only(checked).standing is Standing.EXACT
    assert checked.proven(worker.id)


async def test_a_worker_that_tells_tokens_of_texts_only_is_unverified(parity, told, truth):
    server, worker = await told("sglang")
    server.answers["/v1/tokenize"] = truth.tokenize
    status = only(await parity(worker))
    assert (status.standing, status.compared) == (Standing.UNVERIFIED, ("text",))
    assert status.detail == "it tells the tokens of texts only, not of chats"


async def test_a_worker_that_serves_other_tokens_than_it_tells_is_a_mismatch(parity, told, truth):
    server, worker = await told()
    harmony = {"prompt_token_ids": [1, 2, 3], "usage": {"prompt_tokens": 3}}
    server.answers = {"/tokenize": truth.tokenize, CHAT: lambda _body: harmony}
    status = only(await parity(worker))
    assert status.standing is Standing.MISMATCH
    assert status.detail == f"tokenizer disagrees with {worker.id} at token 0 of a request like probe 'turns'"


async def test_where_no_ids_come_with_answers_their_counts_prove_in_time(parity, told, truth):
    server, worker = await told()
    counts = lambda body: {"choices": [], "usage": {"prompt_tokens": len(truth.ids(body))}}  # noqa: E731
    server.answers = {"/tokenize": truth.tokenize, CHAT: counts}
    checked = await parity(worker)
    assert only(checked).standing is Standing.EXACT
    for _ in range(15):
        checked.observed(worker.id, 7, 7)
        assert not checked.proven(worker.id)
    checked.observed(worker.id, 9, 9)
    assert checked.proven(worker.id)
    checked.observed(worker.id, 9, 8)
    assert not checked.proven(worker.id)


async def test_another_count_of_the_generated_probe_is_a_mismatch(parity, told, truth):
    server, worker = await told()
    server.answers = {"/tokenize": truth.tokenize, CHAT: lambda _body: {"choices": [], "usage": {"prompt_tokens": 3}}}
    status = only(await parity(worker))
    assert status.standing is Standing.MISMATCH
    assert "counts 3 prompt tokens, not" in status.detail


async def test_wrong_counts_are_a_mismatch_when_they_are_many_enough(parity, simulate):
    _, worker = await simulate()
    checked = await parity(worker, retry=60.0, retry_most=60.0)
    for _ in range(3):
        checked.observed(worker.id, 10, 11)
    assert checked.trusted
    assert not checked.proven(worker.id), "one is enough to prove nothing any more"
    checked.observed(worker.id, 10, 11)
    assert not checked.trusted
    assert checked.degraded() == [
        f"{worker.id} counted other prompt tokens in 4 of its last 4 answers (lately 11 instead of 10): prompts are matched by bytes"
    ]
    status = only(checked)
    assert (status.observed, status.wrong) == (4, 4)


async def test_rare_wrong_counts_are_none(parity, simulate):
    _, worker = await simulate()
    checked = await parity(worker)
    for number in range(40 * WINDOW):
        checked.observed(worker.id, 10, 11 if number % (WINDOW // 3 + 1) == 0 else 10)
    assert checked.trusted
    assert only(checked).wrong > 100


async def test_counts_that_are_not_known_and_workers_that_are_not_known_change_nothing(parity, simulate):
    _, worker = await simulate()
    checked = await parity(worker)
    for _ in range(9):
        checked.observed(worker.id, 10, 0)
        checked.observed("nobody", 10, 11)
    assert only(checked).observed == 0
    assert not checked.proven("nobody")


async def test_what_counts_have_shown_is_not_ended_by_a_worker_that_cannot_be_compared(parity, told, until):
    server, worker = await told()
    checked = await parity(worker)
    for _ in range(4):
        checked.observed(worker.id, 10, 11)
    assert not checked.trusted
    checked._ask.forget(worker.id)
    count = len(server.asked)
    await until(lambda: len(server.asked) > count)
    await until(checked._records[worker.id].round.done)
    assert not checked.trusted


async def test_a_worker_that_was_started_again_has_to_prove_itself_again(parity, told, truth, until):
    server, worker = await told()
    server.answers = {"/tokenize": truth.tokenize, CHAT: truth.generated}
    checked = await parity(worker)
    assert checked.proven(worker.id)
    worker.state = WorkerState.WARMING
    await until(lambda: not checked.proven(worker.id))
    server.answers["/tokenize"] = lambda _body: {"tokens": [1]}
    worker.state = WorkerState.READY
    await until(lambda: not checked.trusted)
    worker.state = WorkerState.EJECTED
    await until(lambda: checked.trusted)
    assert only(checked).standing is Standing.PENDING


async def test_a_worker_that_hangs_is_unverified_after_one_question(parity, simulate, until):
    server, worker = await simulate(faults=Faults(hang=True))
    checked = await parity(worker, question=0.05)
    status = only(checked)
    assert status.standing is Standing.UNVERIFIED
    assert status.skipped == NAMES[:1]
    assert checked.trusted
    server.faults.hang = False
    checked._rules = ParityRules(**QUICK)
    await until(lambda: checked.proven(worker.id))


async def test_what_a_template_refuses_is_skipped(parity, told, truth):
    server, worker = await told()
    refuse = lambda body: 400 if body["messages"][0]["role"] == "system" else truth.tokenize(body)  # noqa: E731
    server.answers = {"/tokenize": lambda body: refuse(body) if "messages" in body else truth.tokenize(body)}
    status = only(await parity(worker))
    assert status.standing is Standing.EXACT
    assert status.skipped == ("system", "turns")
    assert not status.proven


async def test_without_a_tokenizer_workers_are_compared_with_the_first_of_them(parity, simulate, changed_model, until):
    _, first = await simulate()
    _, same = await simulate()
    _, other = await simulate(tokenizer=changed_model(template=("Functions", "Things")))
    same.state = other.state = WorkerState.WARMING
    checked = await parity(first, same, other, prompter=None, settled=False, rounds=1)
    await until(lambda: checked.proven(first.id))
    same.state = WorkerState.READY
    await until(lambda: checked.proven(same.id))
    other.state = WorkerState.READY
    await until(lambda: not checked.trusted)
    assert [status.standing for status in checked.snapshot()] == [Standing.EXACT, Standing.EXACT, Standing.MISMATCH]
    # The first one goes; whoever answers next is what the others are compared with.
    same.state = WorkerState.WARMING
    checked.update([other, same])
    await until(lambda: checked.trusted)
    assert checked.proven(other.id)


async def test_a_model_without_a_tokenizer_proves_nothing_but_ids(parity, simulate):
    _, worker = await simulate()
    prompter = Prompter(None)
    status = only(await parity(worker, prompter=prompter))
    assert (status.standing, status.compared) == (Standing.UNVERIFIED, ())
    prompter.close()


async def test_stopping_ends_questions_that_hang(session, local, told):
    server, worker = await told()
    server.answers["/tokenize"] = lambda _body: None
    checked = Parity("m", local, session, rules=ParityRules(**QUICK))
    checked.start([worker])
    async with asyncio.timeout(5):
        while "/tokenize" not in server.asked:
            await server.news.wait()
            server.news.clear()
        await checked.stop()
    assert len(checked._tasks) == 0


async def test_many_workers_that_disagree_are_counted_not_listed(parity, told):
    pairs = [await told() for _ in range(5)]
    for server, _ in pairs:
        server.answers["/tokenize"] = lambda _body: {"tokens": [1]}
    checked = await parity(*(worker for _, worker in pairs))
    said = checked.degraded()
    assert len(said) == 4
    assert said[-1] == "the tokenizer disagrees with 2 more workers"


async def test_every_probe_has_exact_tokens_of_its_own(local):
    texts = [tuple(local.now(probe.path, probe.body).ids) for probe in probes()]
    assert len(set(texts)) == len(NAMES) == len(set(NAMES))
    assert sum(map(len, texts)) < 1000
