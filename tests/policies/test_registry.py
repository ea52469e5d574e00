import sys
from collections.abc import Sequence
from random import Random
from typing import Annotated, Literal

import msgspec
import pytest

from gateway.config.schema import Policy, Step
from policies.base import RouteRequest
from policies.parameters import PolicyError, construct
from policies.pipeline import Pipeline
from policies.presets import Recipe
from policies.presets import Step as RecipeStep
from policies.registry import Registry

REQUEST = RouteRequest(model="m")
PRESETS = [
    "chwbl",
    "dynamo-cost",
    "kvaware",
    "leastload",
    "lmetric",
    "p2c",
    "prefixaware",
    "roundrobin",
    "session",
    "ttft",
]


class Constant:
    """A third-party scorer with one parameter of each sort."""

    def __init__(
        self,
        value: float,
        *,
        names: Sequence[str] = (),
        mode: Literal["up", "down"] = "up",
        share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5,
        opaque: list[str] | set[str] = (),
        untyped=None,
        rng: Random,
    ):
        if value < 0:
            raise ValueError("value must not be negative")
        self.value, self.names, self.mode, self.share, self.rng = value, names, mode, share, rng
        self.opaque, self.untyped = opaque, untyped

    def score(self, request, candidates):
        return [self.value] * len(candidates)


class First:
    """A third-party filter, scorer and picker without a constructor."""

    def filter(self, request, candidates):
        return candidates[:1]

    def score(self, request, candidates):
        return [float(index) for index in range(len(candidates))]

    def pick(self, request, candidates, costs):
        return 0


def takes_anything(**parameters):
    built = First()
    built.parameters = parameters
    return built


@pytest.fixture
def registry():
    made = Registry.default()
    made.register("scorer", "constant", Constant)
    return made


@pytest.fixture
def refused(registry):
    """The error that building the policy `mine` of this section gives."""

    def build(**section):
        with pytest.raises(PolicyError) as caught:
            registry.build("mine", {"mine": Policy(**section)})
        assert str(caught.value) == caught.value.message
        return caught.value

    return build


def constant(**parameters):
    return (Step(type="constant", parameters={"value": 1, **parameters}),)


def test_every_built_in_name_is_there():
    registry = Registry.default()
    assert registry.presets() == PRESETS
    assert registry.types("filter") == [
        "fits-context",
        "has-slot",
        "healthy",
        "lora",
        "model",
        "prefix-bucket-cap",
        "role",
        "untried",
    ]
    assert registry.types("scorer") == [
        "dynamo-cost",
        "in-flight",
        "in-flight-tokens",
        "kv-pressure",
        "lmetric",
        "lora-affinity",
        "lru",
        "predicted-latency",
        "prefill-cost",
        "prefix-hash",
        "prefix-match",
        "queue",
        "random",
        "round-robin",
        "running-requests",
        "session",
        "tier-weighted-match",
        "ttft",
        "uncached-tokens",
    ]
    assert registry.types("picker") == ["lowest-cost", "power-of-two"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_by_its_name_alone(name, fleet):
    policy = Registry.default().build(name, {})
    assert policy.name == name
    assert policy.decide(REQUEST, fleet(3)) is not None
    assert policy.faults == 0


@pytest.mark.parametrize("kind", ["filter", "scorer", "picker"])
def test_every_built_in_step_builds_with_its_defaults_and_decides(kind, fleet):
    registry = Registry.default()
    for name in registry.types(kind):
        step = Step(type=name)
        section = Policy(picker=step) if kind == "picker" else Policy(**{f"{kind}s": (step,)})
        policy = registry.build("mine", {"mine": section})
        assert policy.decide(REQUEST, fleet(3)) is not None
        assert policy.faults == 0


def test_a_section_comes_before_a_preset_of_the_same_name(fleet):
    section = Policy(scorers=(Step(type="in-flight", weight=3),))
    candidates = fleet([2, 1])
    assert list(Registry.default().build("p2c", {"p2c": section}).decide(REQUEST, candidates).costs) == [6.0, 3.0]


def test_a_section_without_filters_and_picker_has_those_of_the_presets(fleet):
    candidates = fleet([2, 1, 0])
    candidates[2].worker.routable = False
    policy = Registry.default().build("mine", {"mine": Policy(scorers=(Step(type="in-flight"),))})
    assert policy.decide(REQUEST, candidates).chosen is candidates[1]


def test_a_preset_takes_other_parameters_than_its_defaults(fleet):
    section = Policy(preset="session", parameters={"header": "X-Chat", "max_load_factor": 2})
    policy, candidates = Registry.default().build("mine", {"mine": section}), fleet([1] * 20)
    chosen = {policy.decide(RouteRequest(model="m", headers={"x-chat": f"{n}"}), candidates).chosen for n in range(40)}
    assert len(chosen) > 10
    same = {policy.decide(RouteRequest(model="m", headers={"x-chat": "7"}), candidates).chosen for _ in range(40)}
    assert len(same) == 1


def test_a_step_s_parameters_reach_its_constructor(registry):
    step = constant(value=2, names=["a"], mode="down", share=1, untyped={"x": [1]})
    built = registry.build("mine", {"mine": Policy(scorers=step)}, seed=5)._scorer.__self__
    assert (built.value, built.names, built.mode, built.share, built.untyped) == (2.0, ["a"], "down", 1.0, {"x": [1]})
    assert isinstance(built.value, float)
    assert built.rng.random() == Random(5).random()


def test_each_build_has_a_state_of_its_own(fleet):
    registry, candidates = Registry.default(), fleet(3)
    one, other = registry.build("roundrobin", {}), registry.build("roundrobin", {})
    taken = one.decide(REQUEST, candidates).chosen
    only = [taken, next(each for each in candidates if each is not taken)]
    assert one.decide(REQUEST, only).chosen is only[1]
    assert {other.decide(REQUEST, only).chosen for _ in range(2)} == set(only)


def test_two_registries_share_nothing():
    registry = Registry.default()
    registry.register("picker", "mine", First)
    registry.register_preset("own", lambda: Recipe(scorers=(), picker=RecipeStep("mine")))
    assert "mine" in registry.types("picker")
    assert isinstance(registry.build("own", {}), Pipeline)
    assert "mine" not in Registry.default().types("picker")
    assert "own" not in Registry.default().presets()


def test_a_name_cannot_be_registered_twice():
    registry = Registry.default()
    with pytest.raises(ValueError, match="healthy"):
        registry.register("filter", "healthy", First)
    with pytest.raises(ValueError, match="p2c"):
        registry.register_preset("p2c", lambda: Recipe(scorers=()))


def test_an_unknown_policy_names_the_nearest_one():
    with pytest.raises(PolicyError, match='no policy "leastlaod"; did you mean "leastload"') as caught:
        Registry.default().build("leastlaod", {"mine": Policy(preset="p2c")})
    assert caught.value.where == ()
    with pytest.raises(PolicyError, match='did you mean "minne"'):
        Registry.default().build("mine", {"minne": Policy(preset="p2c")})


def test_an_unknown_preset_names_the_nearest_one(refused):
    error = refused(preset="sesion")
    assert 'did you mean "session"' in error.message
    assert error.where == ("policies", "mine", "preset")


def test_an_unknown_type_names_the_nearest_one_or_all(refused):
    error = refused(filters=(Step(type="healthy"), Step(type="healty")))
    assert 'no filter "healty"; did you mean "healthy"' in error.message
    assert error.where == ("policies", "mine", "filters", 1, "type")
    error = refused(picker=Step(type="xyz"))
    assert "there are: lowest-cost, power-of-two" in error.message
    assert error.where == ("policies", "mine", "picker", "type")


@pytest.mark.parametrize(
    ("parameters", "name", "message"),
    [
        ({"shere": 1}, "shere", 'unknown parameter "shere" of Constant; did you mean "share"?'),
        ({"rng": 1}, "rng", 'unknown parameter "rng"'),
        ({"value": "1"}, "value", "Expected `float`, got `str`"),
        ({"value": True}, "value", "Expected `float`, got `bool`"),
        ({"value": None}, "value", "Expected `float`, got `null`"),
        ({"names": "abc"}, "names", "Expected `array`, got `str`"),
        ({"names": [1]}, "names", "Expected `str`, got `int`"),
        ({"mode": "sideways"}, "mode", "Invalid enum value 'sideways'"),
        ({"share": 1.5}, "share", "Expected `float` <= 1.0"),
    ],
)
def test_a_bad_parameter_is_refused_where_it_stands(parameters, name, message, refused):
    error = refused(scorers=(Step(type="in-flight"), *constant(**parameters)))
    assert message in error.message
    assert error.where == ("policies", "mine", "scorers", 1, "parameters", name)


def test_a_missing_parameter_is_named(refused):
    error = refused(scorers=(Step(type="constant"),))
    assert 'Constant needs the parameter "value"' in error.message
    assert error.where == ("policies", "mine", "scorers", 0, "parameters")


def test_what_a_constructor_refuses_is_a_policy_error(refused):
    error = refused(scorers=constant(value=-1))
    assert "value must not be negative" in error.message
    assert error.where == ("policies", "mine", "scorers", 0, "parameters")


@pytest.mark.parametrize(
    ("preset", "parameters", "message"),
    [
        ("session", {"max_load_factor": 0.5}, "max_load_factor must be at least 1"),
        ("session", {"max_load_factor": float("nan")}, "max_load_factor must be at least 1"),
        ("chwbl", {"load_factor": 0.9}, "load_factor must be at least 1"),
        ("chwbl", {"prefix_length": 0}, "prefix_length must be at least 1"),
    ],
)
def test_a_preset_s_bad_values_point_at_the_preset_s_parameters(preset, parameters, message, refused):
    error = refused(preset=preset, parameters=parameters)
    assert message in error.message
    assert error.where == ("policies", "mine", "parameters")


def test_a_preset_s_unknown_parameter_points_at_it(refused):
    error = refused(preset="session", parameters={"heder": "x"})
    assert 'did you mean "header"' in error.message
    assert error.where == ("policies", "mine", "parameters", "heder")


def test_a_preset_and_steps_exclude_each_other(refused):
    error = refused(preset="p2c", scorers=(Step(type="random"),))
    assert "not both" in error.message
    assert error.where == ("policies", "mine", "preset")


def test_parameters_without_a_preset_are_refused(refused):
    assert refused(parameters={"a": 1}, scorers=(Step(type="random"),)).where == ("policies", "mine", "parameters")


def test_an_empty_section_is_refused(refused):
    assert refused().where == ("policies", "mine")


def test_only_scorers_have_a_weight_and_it_is_finite(refused):
    assert refused(filters=(Step(type="healthy", weight=2),)).where == ("policies", "mine", "filters", 0, "weight")
    assert refused(picker=Step(type="lowest-cost", weight=2)).where == ("policies", "mine", "picker", "weight")
    for weight in (float("inf"), float("nan"), -1.0):
        error = refused(scorers=(Step(type="random", weight=weight),))
        assert error.where == ("policies", "mine", "scorers", 0, "weight")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed package `warm_plugin` with one entry point of each kind, and two that cannot be loaded."""
    (tmp_path / "warm_plugin.py").write_text(
        "class Last:\n"
        "    def __init__(self, *, offset: int = 0): self.offset = offset\n"
        "    def filter(self, request, candidates): return candidates[-2:]\n"
        "    def score(self, request, candidates): return [float(-n) for n in range(len(candidates))]\n"
        "    def pick(self, request, candidates, costs): return len(candidates) - 1 - self.offset\n"
        "class Outer:\n"
        "    Last = Last\n"
        "text = 'no class'\n"
    )
    info = tmp_path / "warm_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: warm-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[warmroute.filters]\nlast-two = warm_plugin:Last\nhealthy = warm_plugin:Last\n"
        "[warmroute.scorers]\nlast = warm_plugin:Last\nbroken = warm_plugin:Missing\n"
        "[warmroute.pickers]\nlast = warm_plugin:Last\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("warm_plugin", None)


def test_entry_points_of_each_kind_are_found(plugin, fleet):
    section = Policy(
        filters=(Step(type="last-two"),),
        scorers=(Step(type="last"),),
        picker=Step(type="last", parameters={"offset": 1}),
    )
    registry, candidates = Registry.default(), fleet(4)
    decision = registry.build("mine", {"mine": section}).decide(REQUEST, candidates)
    assert decision.chosen is candidates[2]
    assert list(decision.costs) == [0.0, -1.0]
    assert "last-two" in registry.types("filter")


def test_an_entry_point_cannot_take_the_place_of_a_built_in(plugin, fleet):
    section = Policy(filters=(Step(type="healthy"),))
    assert len(Registry.default().build("mine", {"mine": section}).decide(REQUEST, fleet(4)).candidates) == 4


def test_an_entry_point_that_cannot_be_loaded_is_a_policy_error(plugin, refused):
    error = refused(scorers=(Step(type="broken"),))
    assert "warm_plugin:Missing" in error.message
    assert error.where == ("policies", "mine", "scorers", 0, "type")


@pytest.mark.parametrize("path", ["warm_plugin:Last", "warm_plugin:Outer.Last"])
def test_a_dotted_path_is_imported(path, plugin, fleet):
    candidates = fleet(3)
    policy = Registry.default().build("mine", {"mine": Policy(picker=Step(type=path))})
    assert policy.decide(REQUEST, candidates).chosen is candidates[2]


@pytest.mark.parametrize("path", ["warm_plugin:Nothing", "no_such_module_here:X", "warm_plugin:", ":Last", "a b:c"])
def test_a_dotted_path_that_leads_nowhere_is_a_policy_error(path, plugin, refused):
    error = refused(picker=Step(type=path))
    assert error.message.startswith(f'cannot import "{path}"')
    assert error.where == ("policies", "mine", "picker", "type")


def test_what_is_no_step_of_its_kind_is_refused(plugin, refused):
    assert "is no class" in refused(picker=Step(type="warm_plugin:text")).message
    error = refused(filters=(Step(type="policies.scorers.in_flight:InFlight"),))
    assert 'it has no method "filter"' in error.message


def test_a_constructor_that_takes_any_keyword_gets_them_all():
    assert construct(takes_anything, {"a": 1, "b": "x"}, ()).parameters == {"a": 1, "b": "x"}


def test_annotations_that_cannot_be_checked_let_values_pass():
    assert construct(Constant, {"value": 1.0, "opaque": "anything"}, (), Random(1)).opaque == "anything"
