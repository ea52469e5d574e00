"""Long documents and questions on them: HyperPod's published benchmark is of this kind (8k and 64k tokens, 7 workers).

Its exact prompts, rates and answers are not published; the defaults here are chosen so that documents are asked about
again before a worker's memory has turned over.
"""

from random import Random

from simulator.workloads.arrivals import poisson
from simulator.workloads.generators.talk import talk
from simulator.workloads.numbers import bounded, zipf
from simulator.workloads.runs import Ids
from simulator.workloads.text import Text
from simulator.workloads.workload import Workload, WorkRequest


def documents(
    *,
    seed: int = 0,
    documents: int = 100,
    document_tokens: int = 8192,
    readers: int = 300,
    rate: float = 1.0,
    questions: int = 5,
    question_tokens: int = 100,
    output_tokens: int = 200,
    system_tokens: int = 200,
    variation: float = 0.3,
    skew: float = 0.5,
    think: float = 15.0,
    block_tokens: int = 16,
) -> Workload:
    """Readers come by a Poisson process, choose a document and ask on, each question after the answer before it.

    Args:
        seed: of all that is by chance.
        documents: how many.
        document_tokens: length of each.
        readers: how many conversations.
        rate: conversations begun per second.
        questions: in each conversation; the prompt of one holds the document and all before it.
        question_tokens: mean length of a question.
        output_tokens: mean length of an answer.
        system_tokens: length of the system prompt before all documents.
        variation: standard deviation divided by mean, of questions and answers.
        skew: the n-th document is chosen 1/n**skew times as often as the first; 0: all equally.
        think: mean seconds (exponential) from the end of an answer to the next question.
        block_tokens: tokens per content id.

    Raises:
        WorkloadError: a number out of bounds.
    """
    bounded(
        "documents",
        readers * questions,
        or_zero={"system_tokens": system_tokens, "variation": variation, "skew": skew, "think": think},
        documents=documents,
        document_tokens=document_tokens,
        readers=readers,
        questions=questions,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        block_tokens=block_tokens,
    )
    random = Random(seed)
    ids = Ids()
    system = Text(ids, block_tokens).grown(system_tokens)
    shelf = [system.grown(document_tokens) for _ in range(documents)]
    weights = zipf(documents, skew)
    requests: list[WorkRequest] = []
    for reader, start in enumerate(poisson(random, rate, readers)):
        document = random.choices(shelf, cum_weights=weights)[0]
        requests += talk(
            random,
            f"d{reader}",
            start,
            document,
            questions,
            message_tokens=question_tokens,
            output_tokens=output_tokens,
            variation=variation,
            think=think,
        )
    return Workload(
        "documents", block_tokens, requests, seed, ["Closed loop: a question waits for the answer before it."]
    )
