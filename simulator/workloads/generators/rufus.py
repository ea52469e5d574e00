"""A shopping assistant in two stages, as Rufus is described: a planner must have finished before the answer can begin.

The planner classifies the question and says what to look up; then documents are fetched, and the generator writes the
answer over them. Source of the shape: AWS' posts on Rufus of May and August 2025 (planner on the critical path, its whole
output needed); the lengths are assumptions.
"""

from random import Random

from simulator.workloads.arrivals import poisson
from simulator.workloads.numbers import bounded, length, pause, zipf
from simulator.workloads.runs import Ids
from simulator.workloads.text import Text
from simulator.workloads.workload import Workload, WorkRequest


def rufus(
    *,
    seed: int = 0,
    shoppers: int = 300,
    rate: float = 0.5,
    questions: int = 3,
    planner_tokens: int = 1500,
    plan_tokens: int = 60,
    generator_tokens: int = 2000,
    categories: int = 40,
    category_tokens: int = 1000,
    retrieved_tokens: int = 2500,
    question_tokens: int = 40,
    answer_tokens: int = 300,
    fetch: float = 0.05,
    think: float = 25.0,
    skew: float = 1.0,
    variation: float = 0.4,
    block_tokens: int = 16,
) -> Workload:
    """Shoppers come by a Poisson process; each of their questions is a planner's and then a generator's request.

    Args:
        seed: of all that is by chance.
        shoppers: how many conversations.
        rate: conversations begun per second.
        questions: mean number of questions in one (log-normal).
        planner_tokens: the planner's system prompt, one for all; the conversation so far comes behind it.
        plan_tokens: mean length of a plan.
        generator_tokens: the generator's system prompt, one for all.
        categories: how many kinds of goods.
        category_tokens: what the generator is told about a kind, behind its system prompt.
        retrieved_tokens: mean length of what was fetched for a question, and belongs to nobody else.
        question_tokens: mean length of a question.
        answer_tokens: mean length of an answer.
        fetch: mean seconds (exponential) from the end of a plan to the generator's request.
        think: mean seconds (exponential) from the end of an answer to the next question.
        skew: the n-th category is asked about 1/n**skew times as often as the first; 0: all equally.
        variation: standard deviation divided by mean, of questions, plans, answers and what is fetched.
        block_tokens: tokens per content id.

    Raises:
        WorkloadError: a number out of bounds.
    """
    bounded(
        "rufus",
        2 * shoppers * questions,
        or_zero={"fetch": fetch, "think": think, "skew": skew, "variation": variation},
        shoppers=shoppers,
        questions=questions,
        planner_tokens=planner_tokens,
        plan_tokens=plan_tokens,
        generator_tokens=generator_tokens,
        categories=categories,
        category_tokens=category_tokens,
        retrieved_tokens=retrieved_tokens,
        question_tokens=question_tokens,
        answer_tokens=answer_tokens,
        block_tokens=block_tokens,
    )
    random = Random(seed)
    ids = Ids()
    planner = Text(ids, block_tokens).grown(planner_tokens)
    generator = Text(ids, block_tokens).grown(generator_tokens)
    kinds = [generator.grown(category_tokens) for _ in range(categories)]
    weights = zipf(categories, skew)
    requests: list[WorkRequest] = []
    for shopper, start in enumerate(poisson(random, rate, shoppers)):
        session = f"s{shopper}"
        said = planner
        history = random.choices(kinds, cum_weights=weights)[0]
        after: str | None = None
        for turn in range(length(random, questions, variation)):
            question = length(random, question_tokens, variation)
            said = said.grown(question)
            plan = length(random, plan_tokens, variation)
            plan_id, answer_id = f"{session}-{turn}-plan", f"{session}-{turn}-answer"
            requests.append(
                WorkRequest(
                    id=plan_id,
                    time=start,
                    session=session,
                    prompt_tokens=said.tokens,
                    output_tokens=plan,
                    blocks=said.blocks,
                    after=after,
                    delay=pause(random, think) if after else 0.0,
                    stage="planner",
                )
            )
            # The conversation stays, what was fetched for an answer does not: it stands behind.
            history = history.grown(question)
            prompt = history.grown(length(random, retrieved_tokens, variation))
            answer = length(random, answer_tokens, variation)
            requests.append(
                WorkRequest(
                    id=answer_id,
                    time=start,
                    session=session,
                    prompt_tokens=prompt.tokens,
                    output_tokens=answer,
                    blocks=prompt.blocks,
                    after=plan_id,
                    delay=pause(random, fetch),
                    stage="generator",
                )
            )
            said, history, after = said.grown(answer), history.grown(answer), answer_id
    return Workload(
        "rufus",
        block_tokens,
        requests,
        seed,
        ["Closed loop: a generator's request waits for its plan, the next question for the answer."],
    )
