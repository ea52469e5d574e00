import pytest
from opentelemetry.semconv import attributes as stable
from opentelemetry.semconv._incubating import attributes as incubating

from gateway.telemetry import names


def conventional_names():
    """Every attribute name in the installed conventions."""
    import importlib
    import pkgutil

    found = set()
    for package in (stable, incubating):
        for module in pkgutil.iter_modules(package.__path__):
            loaded = importlib.import_module(f"{package.__name__}.{module.name}")
            found |= {value for name, value in vars(loaded).items() if name.isupper() and isinstance(value, str)}
    return found


OURS = {
    name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str) and "." in value
}


def test_every_name_outside_our_namespace_is_in_the_conventions():
    foreign = {value for value in OURS.values() if not value.startswith("warmroute.")}
    assert len(foreign) > 10
    assert foreign <= conventional_names()


def test_no_name_is_there_twice():
    assert len(set(OURS.values())) == len(OURS)


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/messages", "chat"),
        ("/v1/completions", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/rerank", "rerank"),
        ("/rerank", "rerank"),
        ("/v1/audio/transcriptions", "transcriptions"),
        ("_other", "_other"),
    ],
)
def test_a_path_has_an_operation(path, operation):
    assert names.operation(path) == operation
