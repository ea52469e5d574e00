"""`/v1/models` as a client sees it."""

import json

import pytest

from gateway.config.schema import Capabilities, Config, Model
from gateway.config.schema import Worker as WorkerConfig
from gateway.fleet.fleet import Fleets
from gateway.fleet.models import ModelCards

VLLM = {
    "id": "meta/llama",
    "object": "model",
    "created": 1764580000,
    "owned_by": "vllm",
    "root": "/models/llama",
    "parent": None,
    "max_model_len": 8192,
    "permission": [{"id": "modelperm-1", "object": "model_permission"}],
}


@pytest.fixture
def fleets(build):
    def worker(port, **more):
        return WorkerConfig(url=f"http://127.0.0.1:{port}", driver="vllm", model="meta/llama", **more)

    def make(**capabilities):
        one = Model(name="m", aliases=("a",), workers=(worker(1), worker(2, capabilities=Capabilities(**capabilities))))
        two = Model(name="org/n", workers=(WorkerConfig(url="http://127.0.0.1:3", driver="openai"),))
        return Fleets.from_config(Config(models=(one, two)), build.policy)

    return make


def listed(cards):
    return {card["id"]: card for card in json.loads(cards.models_payload())["data"]}


def test_without_a_word_from_any_worker_every_name_is_listed_with_the_least(fleets):
    cards = ModelCards(fleets(), created=42)
    payload = json.loads(cards.models_payload())
    assert payload["object"] == "list"
    assert payload["data"] == [
        {"object": "model", "created": 42, "owned_by": "warmroute", "id": name} for name in ("m", "a", "org/n")
    ]


def test_a_workers_card_is_listed_under_our_names_with_everything_else_kept(fleets):
    table = fleets()
    cards = ModelCards(table, created=42)
    assert cards.record(next(table.workers()), [VLLM])
    assert listed(cards)["m"] == VLLM | {"id": "m"}
    assert listed(cards)["a"] == VLLM | {"id": "a"}
    assert listed(cards)["org/n"]["owned_by"] == "warmroute"


def test_the_smallest_known_length_is_promised(fleets):
    table = fleets()
    cards = ModelCards(table, created=42)
    first, second, _ = table.workers()
    cards.record(second, [VLLM | {"max_model_len": 4096}])
    cards.record(first, [VLLM])
    assert listed(cards)["m"]["max_model_len"] == 4096
    assert "max_model_len" not in listed(cards)["org/n"]


@pytest.mark.parametrize("nonsense", [None, "8192", True, -1, 0, 1e9])
def test_a_length_that_is_none_is_ignored_and_the_configured_one_used(fleets, nonsense):
    table = fleets(max_model_len=2048)
    cards = ModelCards(table, created=42)
    cards.record(next(table.workers()), [VLLM | {"max_model_len": nonsense}])
    assert listed(cards)["m"]["max_model_len"] == 2048


def test_the_first_worker_of_the_configuration_gives_the_card_whoever_answered_first(fleets):
    table = fleets()
    first, second, _ = table.workers()
    cards = ModelCards(table, created=42)
    cards.record(second, [VLLM | {"created": 2}])
    assert listed(cards)["m"]["created"] == 2
    cards.record(first, [VLLM | {"created": 1}])
    assert listed(cards)["m"]["created"] == 1


def test_cards_of_other_models_are_not_ours(fleets):
    table = fleets()
    cards = ModelCards(table, created=42)
    assert not cards.record(next(table.workers()), [VLLM | {"id": "adapter", "parent": "meta/llama"}])
    assert set(listed(cards)) == {"m", "a", "org/n"}
    assert listed(cards)["m"]["owned_by"] == "warmroute"


def test_one_model_by_name_alias_or_not_at_all(fleets):
    table = fleets()
    cards = ModelCards(table, created=42)
    cards.record(next(table.workers()), [VLLM])
    assert json.loads(cards.model_payload("a")) == listed(cards)["a"]
    assert json.loads(cards.model_payload("org/n"))["id"] == "org/n"
    assert cards.model_payload("meta/llama") is None
    assert cards.model_payload("") is None


def test_answers_are_made_once_until_something_changes(fleets):
    table = fleets()
    cards = ModelCards(table, created=42)
    worker = next(table.workers())
    cards.record(worker, [VLLM])
    many, one = cards.models_payload(), cards.model_payload("m")
    cards.record(worker, [dict(VLLM)])
    assert cards.models_payload() is many
    assert cards.model_payload("m") is one
    cards.record(worker, [VLLM | {"max_model_len": 1}])
    assert cards.models_payload() != many
    assert cards.model_payload("m") != one


def test_reload_changes_the_names_and_forgets_the_cards_of_the_removed(fleets):
    table = fleets()
    cards = ModelCards(table, created=42)
    first, second, _ = table.workers()
    cards.record(first, [VLLM])
    cards.record(second, [VLLM | {"max_model_len": 16}])
    section = table.config.models[0].workers[0]
    new = table.updated(Config(models=(Model(name="renamed", workers=(section,)),)))
    cards.update(new)
    assert listed(cards) == {"renamed": VLLM | {"id": "renamed"}}
    assert cards.model_payload("m") is None
