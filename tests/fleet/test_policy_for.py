"""Policies by stage and by a request's header."""

import pytest

from gateway.config.schema import Config, Model, PolicyChoice, Worker
from gateway.errors import GatewayError
from gateway.fleet.fleet import Fleets
from policies.registry import Registry

WORKERS = (Worker(url="http://127.0.0.1:1"), Worker(url="http://127.0.0.1:2"))


def fleets(**model):
    config = Config(models=(Model(name="m", workers=WORKERS, **model),))
    return Fleets.from_config(config, lambda name: Registry.default().build(name, config.policies))


def test_without_a_choice_every_request_goes_by_the_model_s_policy():
    fleet = fleets().resolve("m")
    assert fleet.policy_name == "ttft"
    assert fleet.policy_for({"x-warmroute-policy": "p2c"}) is fleet.policy
    assert fleet.policy_for({}, "planner") is fleet.policy


def test_a_header_chooses_among_what_is_allowed():
    choice = PolicyChoice(header="X-Route", allowed=("leastload", "kvaware"))
    fleet = fleets(policy="leastload", policy_choice=choice, stage_policies={"planner": "p2c"}).resolve("m")
    assert fleet.policy_for({"x-route": "kvaware"}).name == "kvaware"
    assert fleet.policy_for({"x-route": "leastload"}) is fleet.policy
    assert fleet.policy_for({}) is fleet.policy
    assert fleet.policy_for({}, "planner").name == "p2c"
    assert fleet.policy_for({"x-route": "kvaware"}, "planner").name == "kvaware"
    assert fleet.policy_for({}, "unheard-of") is fleet.policy
    with pytest.raises(GatewayError, match="there are: leastload, kvaware") as caught:
        fleet.policy_for({"x-route": "p2c"})
    assert caught.value.status == 400


def test_matches_come_from_what_any_of_its_policies_wants():
    assert fleets(policy="leastload").resolve("m").knowledge == "none"
    assert fleets(policy="leastload", stage_policies={"x": "prefixaware"}).resolve("m").knowledge == "history"
    assert (
        fleets(policy="prefixaware", policy_choice=PolicyChoice(allowed=("ttft",))).resolve("m").knowledge == "events"
    )


def test_a_reload_keeps_the_policies_that_stay():
    before = fleets(stage_policies={"x": "roundrobin"})
    config = Config(models=(Model(name="m", workers=WORKERS, policy="roundrobin"),))
    after = before.updated(config)
    assert after.resolve("m").policy is before.resolve("m").policies["roundrobin"]
