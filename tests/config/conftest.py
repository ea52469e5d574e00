"""Fixtures of the configuration's tests."""

import pytest

from gateway.config.load import loads
from gateway.config.problems import ConfigError

MODEL = 'models: [{name: m, workers: [{url: "http://127.0.0.1:9001"}]}]\n'


@pytest.fixture
def minimal():
    """The shortest right file: one line, to which a test adds sections."""
    return MODEL


@pytest.fixture
def problems_of():
    """Loads a text that must be wrong and returns its problems."""

    def load(text, **environ):
        with pytest.raises(ConfigError) as caught:
            loads(text, "config.yaml", environ=environ)
        return caught.value.problems

    return load
