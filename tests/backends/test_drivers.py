"""What each driver knows about its kind of worker."""

import pytest

from backends.base import Driver
from backends.registry import DRIVERS, UnknownDriverError, driver_named

ALL = sorted(DRIVERS)


@pytest.mark.parametrize("name", ALL)
def test_a_driver_is_called_what_the_configuration_calls_it(name):
    assert driver_named(name).name == name


@pytest.mark.parametrize("name", ALL)
def test_a_driver_has_everything_that_the_protocol_asks_for(name):
    driver = driver_named(name)
    wanted = {member for member in vars(Driver) if not member.startswith("_")}
    assert wanted == {member for member in wanted if hasattr(driver, member)}
    assert driver.health_path.startswith("/")
    assert driver.models_path == "/v1/models"


def test_drivers_cannot_be_changed_in_place():
    with pytest.raises(TypeError):
        DRIVERS["mine"] = DRIVERS["vllm"]


@pytest.mark.parametrize(
    ("name", "nearest"), [("vlm", "vllm"), ("Neuron", "neuron"), ("sg-lang", "sglang"), ("x", None)]
)
def test_an_unknown_driver_is_refused_with_the_nearest_name(name, nearest):
    with pytest.raises(UnknownDriverError, match=r"Known drivers: neuron, openai, sglang, vllm\.") as caught:
        driver_named(name)
    assert caught.value.nearest == nearest
    assert f"{nearest!r}?" in str(caught.value) or nearest is None


@pytest.mark.parametrize(
    ("name", "path"), [("vllm", "/health"), ("neuron", "/health"), ("sglang", "/health"), ("openai", "/v1/models")]
)
def test_where_health_is_asked(name, path):
    assert driver_named(name).health_path == path


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("status", [204, 301, 401, 404, 429, 500, 503])
def test_only_200_is_healthy(name, status):
    driver = driver_named(name)
    assert driver.is_healthy(200, b"")
    assert not driver.is_healthy(status, b"")


def test_neuron_may_compile_for_ninety_minutes():
    assert driver_named("neuron").start_up == 90 * 60
    assert driver_named("neuron").start_up > driver_named("vllm").start_up


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "payload",
    [
        None,
        [],
        "text",
        7,
        {},
        {"data": None},
        {"data": {}},
        {"data": [1, None, {}, {"id": None}, {"id": 3}, {"id": ""}]},
    ],
)
def test_cards_that_make_no_sense_are_no_cards(name, payload):
    assert driver_named(name).parse_model_cards(payload) == []


@pytest.mark.parametrize("name", ALL)
def test_cards_are_kept_as_they_are(name):
    good = {"id": "m", "object": "model", "max_model_len": 4096, "new_field": [1]}
    assert driver_named(name).parse_model_cards({"object": "list", "data": [good, {"no": "id"}]}) == [good]
