"""Which drivers there are, by the name that the configuration uses."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from backends.base import Driver
from backends.neuron import NeuronDriver
from backends.openai import OpenAIDriver
from backends.sglang import SGLangDriver
from backends.vllm import VLLMDriver

DRIVERS: Mapping[str, Callable[[], Driver]] = MappingProxyType(
    {"neuron": NeuronDriver, "openai": OpenAIDriver, "sglang": SGLangDriver, "vllm": VLLMDriver}
)


class UnknownDriverError(ValueError):
    """No driver has this name. `nearest` is the known name most like it, or None."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nearest = next(iter(difflib.get_close_matches(name.lower(), DRIVERS, n=1)), None)
        hint = f"; did you mean {self.nearest!r}?" if self.nearest else "."
        super().__init__(f"unknown driver {name!r}{hint} Known drivers: {', '.join(DRIVERS)}.")


def driver_named(name: str) -> Driver:
    """A driver of the kind `name`.

    Raises:
        UnknownDriverError: there is no such kind.
    """
    factory = DRIVERS.get(name)
    if factory is None:
        raise UnknownDriverError(name)
    return factory()
