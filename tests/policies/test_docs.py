import re
from pathlib import Path

import msgspec
import pytest
import yaml

from gateway.config.schema import Policy
from policies.base import RouteRequest
from policies.registry import Registry

TEXT = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_policy_in_the_documentation_builds_and_decides(block, fleet):
    sections = msgspec.convert(yaml.safe_load(block)["policies"], dict[str, Policy])
    for name in sections:
        policy = Registry.default().build(name, sections)
        assert policy.decide(RouteRequest(model="m"), fleet(3)) is not None
        assert policy.faults == 0


def test_the_documentation_s_own_scorer_scores(fleet):
    names: dict = {}
    exec(blocks("python")[0], names)
    candidates = fleet(2)
    candidates[1].worker.in_flight_tokens = 8192
    assert list(names["TokensInFlight"]().score(RouteRequest(model="m"), candidates)) == [0.0, 1.0]


def test_every_built_in_name_is_documented():
    registry = Registry.default()
    names = [*registry.presets(), *registry.types("filter"), *registry.types("scorer"), *registry.types("picker")]
    assert [name for name in names if f"| `{name}`" not in TEXT] == []
