"""The routing table and what a reload keeps."""

import msgspec
import pytest

from backends.registry import UnknownDriverError
from gateway.config.schema import Capabilities, Config, Health, Model, Policy, Retries, Timeouts
from gateway.config.schema import Worker as WorkerConfig
from gateway.fleet.fleet import Fleets
from gateway.fleet.worker import WorkerState

A, B, C = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000"


def model(name, *urls, **more):
    return Model(name=name, workers=tuple(WorkerConfig(url=url, driver="vllm") for url in urls), **more)


def config(*models, **more):
    return Config(models=models, **more)


@pytest.fixture
def table(build):
    return lambda *models, **more: Fleets.from_config(config(*models, **more), build.policy)


def test_a_name_and_its_aliases_lead_to_the_fleet_and_others_to_none(table):
    fleets = table(model("m", A, aliases=("gpt-4o", "x/y")), model("n", B))
    assert fleets.resolve("m") is fleets.resolve("gpt-4o") is fleets.resolve("x/y")
    assert fleets.resolve("n").name == "n"
    assert fleets.resolve("M") is None
    assert fleets.resolve("") is None


def test_no_model_means_the_only_fleet(table):
    assert table(model("m", A)).resolve(None).name == "m"
    assert table(model("m", A), model("n", B)).resolve(None) is None


def test_a_name_is_never_hidden_by_an_alias(table):
    fleets = table(model("m", A, aliases=("n",)), model("n", B))
    assert fleets.resolve("n").name == "n"
    assert [(name, fleet.name) for name, fleet in fleets.names()] == [("m", "m"), ("n", "n")]


def test_candidates_are_the_workers_own_in_the_order_of_the_configuration(table):
    fleet = table(model("m", B, A)).resolve("m")
    assert [candidate.worker.id for candidate in fleet.candidates] == ["10.0.0.2:8000", "10.0.0.1:8000"]
    assert all(candidate is worker.candidate for candidate, worker in zip(fleet.candidates, fleet.workers, strict=True))


def test_a_models_sections_win_over_the_top_level_ones(table):
    own = model("m", A, timeouts=Timeouts(connect=1), retries=Retries(attempts=1), health=Health(interval=9))
    fleets = table(own, model("n", B), timeouts=Timeouts(connect=7), health=Health(interval=8))
    mine, other = fleets
    assert (mine.timeouts.connect, mine.retries.attempts, mine.health.interval) == (1, 1, 9)
    assert (other.timeouts.connect, other.retries, other.health.interval) == (7, Retries(), 8)


def test_a_worker_is_asked_for_the_model_by_its_own_name(table):
    section = WorkerConfig(url=A, driver="vllm", model="meta/llama", id="one", api_key="k")
    (fleet,) = table(Model(name="m", workers=(section,)))
    (worker,) = fleet.workers
    assert (worker.model, worker.id, worker.api_key, worker.driver.name) == ("meta/llama", "one", "k", "vllm")
    assert worker.state is WorkerState.WARMING


def test_ids_are_unique_when_one_server_stands_in_several_fleets(table):
    fleets = table(model("m", A, A + "/a", A + "/b"), model("n", A), Model(name="o", workers=(WorkerConfig(url=A),)))
    assert [worker.id for worker in fleets.workers()] == [
        "10.0.0.1:8000",
        "10.0.0.1:8000@m",
        "10.0.0.1:8000@m#2",
        "10.0.0.1:8000@n",
        "10.0.0.1:8000@o",
    ]


def test_reload_keeps_workers_adds_new_ones_and_marks_the_removed(table):
    old = table(model("m", A, B))
    stays, leaves = old.workers()
    stays.state, stays.routable, stays.in_flight, leaves.routable = WorkerState.READY, True, 3, True
    lease = leaves.acquire()
    new = old.updated(config(model("m", C, A)))
    fresh, kept = new.workers()
    assert kept is stays
    assert (kept.state, kept.in_flight) == (WorkerState.READY, 3)
    assert fresh.state is WorkerState.WARMING
    assert (leaves.state, leaves.routable) == (WorkerState.GONE, False)
    assert new.departed == [leaves]
    assert old.resolve("m").workers == [stays, leaves], "requests in flight go on with the old table"
    lease.release()
    assert new.updated(config(model("m", A))).departed == [fresh]


def test_a_gone_worker_stays_in_view_while_it_has_requests_and_never_comes_back(table):
    first = table(model("m", A, B))
    leaving = first.resolve("m").workers[1]
    lease = leaving.acquire()
    second = first.updated(config(model("m", A)))
    third = second.updated(config(model("m", A, B)))
    assert third.resolve("m").workers[1] is not leaving
    assert third.departed == [leaving]
    lease.release()
    assert third.updated(config(model("m", A, B))).departed == []


def test_a_table_that_was_left_behind_cannot_bring_a_gone_worker_back(table):
    old = table(model("m", A, B))
    leaving = old.resolve("m").workers[1]
    old.updated(config(model("m", A)))
    assert leaving not in list(old.updated(config(model("m", A, B))).workers())


@pytest.mark.parametrize("change", [{"url": B}, {"driver": "sglang"}, {"model": "other"}])
def test_another_url_driver_or_model_is_another_worker(table, change):
    old = table(model("m", A))
    section = msgspec.structs.replace(WorkerConfig(url=A, driver="vllm"), **change)
    new = old.updated(config(Model(name="m", workers=(section,))))
    assert next(new.workers()) is not next(old.workers())


def test_what_may_change_in_a_workers_life_follows_the_configuration(table):
    old = table(model("m", A + "/"))
    section = WorkerConfig(url=A, driver="vllm", id="new", api_key="k2", capabilities=Capabilities(slots=4))
    new = old.updated(config(Model(name="m", workers=(section,))))
    (worker,) = new.workers()
    assert worker is next(old.workers())
    assert (worker.id, worker.api_key, worker.capabilities.slots) == ("new", "k2", 4)


def test_each_fleet_keeps_its_own_worker_when_both_name_the_same_server(table):
    shared = WorkerConfig(url=A, driver="vllm", model="base")
    old = table(Model(name="m", workers=(shared,)), Model(name="n", workers=(shared,)))
    of_m, of_n = old.workers()
    assert of_m is not of_n
    new = old.updated(config(Model(name="n", workers=(shared,)), Model(name="m", workers=(shared,))))
    assert [*new.workers()] == [of_n, of_m]


def test_a_renamed_fleet_keeps_its_workers(table):
    shared = WorkerConfig(url=A, driver="vllm", model="base")
    old = table(Model(name="m", workers=(shared,)))
    new = old.updated(config(Model(name="renamed", workers=(shared,))))
    assert next(new.workers()) is next(old.workers())
    assert new.departed == []


def test_a_policy_stays_while_its_name_and_section_do(table, build):
    sections = {"mine": Policy(preset="session", parameters={"header": "a"})}
    old = table(model("m", A, policy="mine"), model("n", B), policies=sections)
    mine, preset = (fleet.policy for fleet in old)
    assert mine is not preset

    same = old.updated(config(model("m", B, policy="mine"), model("n", B), policies=dict(sections)))
    assert [fleet.policy for fleet in same] == [mine, preset]

    other = {"mine": Policy(preset="session", parameters={"header": "b"})}
    changed = same.updated(config(model("m", B, policy="mine"), model("n", B, policy="p2c"), policies=other))
    assert all(fleet.policy not in (mine, preset) for fleet in changed)
    assert [fleet.policy.name for fleet in changed] == ["mine", "p2c"]


def test_reload_builds_from_the_new_sections(table, build):
    old = table(model("m", A))
    new = old.updated(config(model("m", A, policy="p2c")), lambda name: build.policy(f"new {name}"))
    assert new.resolve("m").policy.name == "new p2c"


def test_a_reload_that_fails_changes_nothing(table):
    old = table(model("m", A, B))
    first, second = old.workers()

    def refuse(name):
        raise ValueError(name)

    with pytest.raises(ValueError, match="p2c"):
        old.updated(config(model("m", A, policy="p2c")), refuse)
    with pytest.raises(UnknownDriverError):
        old.updated(config(Model(name="m", workers=(WorkerConfig(url=A, driver="vlm", api_key="k"),))))
    assert (first.state, second.state, first.api_key) == (WorkerState.WARMING, WorkerState.WARMING, None)


def test_ready_counts_ready_workers(table):
    (fleet,) = table(model("m", A, B))
    assert fleet.ready == 0
    fleet.workers[1].state = WorkerState.READY
    assert fleet.ready == 1


def test_a_lease_counts_in_and_out_once(table):
    (worker,) = table(model("m", A)).workers()
    lease = worker.acquire(100)
    assert (worker.in_flight, worker.in_flight_tokens) == (1, 100)
    lease.release()
    lease.release()
    assert (worker.in_flight, worker.in_flight_tokens) == (0, 0)
