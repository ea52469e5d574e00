"""What right files mean: the public minimum, units, variables, escapes, and what is never shown."""

import pytest

from gateway.config.load import load, loads
from gateway.config.problems import ConfigError
from gateway.config.schema import Address, Admin, Capabilities, Config, Model, Pool, Timeouts, Traces, Worker
from gateway.config.units import format_duration, format_size, parse_duration, parse_size

MINIMAL = """\
listen: {host: 127.0.0.1, port: 8080}
admin:  {host: 127.0.0.1, port: 8081}
models:
  - name: m
    policy: leastload
    workers:
      - {url: "http://127.0.0.1:9001", driver: vllm}
      - {url: "http://127.0.0.1:9002", driver: vllm}
"""


def test_the_public_minimum_means_what_it_says():
    workers = (Worker(url="http://127.0.0.1:9001", driver="vllm"), Worker(url="http://127.0.0.1:9002", driver="vllm"))
    assert loads(MINIMAL, environ={}) == Config(
        listen=Address(host="127.0.0.1", port=8080),
        admin=Admin(host="127.0.0.1", port=8081),
        models=(Model(name="m", policy="leastload", workers=workers),),
    )


def test_everything_left_out_has_its_default(minimal):
    config = loads(minimal, environ={})
    assert config == Config(models=(Model(name="m", workers=(Worker(url="http://127.0.0.1:9001"),)),))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("30", 30),
        ("1.5", 1.5),
        ("250ms", 0.25),
        ("0.5s", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("2h", 7200),
        ("1d", 86400),
    ],
)
def test_durations_are_seconds_or_have_a_unit(text, seconds, minimal):
    assert loads(f"{minimal}grace: {text}\n").grace == seconds
    if text[-1].isalpha():
        assert loads(f'{minimal}grace: "{text}"\n').grace == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("20_000", 20000),
        ("1B", 1),
        ("64KiB", 65536),
        ("64MiB", 1 << 26),
        ("1GiB", 1 << 30),
        ("10MB", 10**7),
    ],
)
def test_sizes_are_bytes_or_have_a_unit(text, size, minimal):
    assert loads(f"{minimal}limits: {{body: {text}}}\n").limits.body == size


@pytest.mark.parametrize("text", ["", "s", "1x", "1 2", "-1s", "1e9999", "--1", "1..2", "٣", "1s2", "ms"])
def test_what_is_no_quantity_is_none(text):
    assert parse_duration(text) is None
    assert parse_size(text.replace("s", "B")) is None


def test_a_tenth_of_a_second_is_exact():
    assert (parse_duration("100ms"), format_duration(0.1)) == (0.1, "100ms")
    assert (parse_size("1.5KiB"), format_size(1536)) == (1536, "1536")


def test_a_variable_is_put_in_wherever_text_may_stand():
    text = (
        'models: [{name: "${NAME}", aliases: ["a-${NAME}-${NAME}"], workers: [{url: "http://${HOST:-h}:1", api_key: "${KEY}"}]}]\n'
        'grace: ${GRACE:-5m}\nlisten: {port: "${PORT}"}\nheaders:\n  worker: ${WORKER:-false}\n'
    )
    config = loads(text, environ={"NAME": "m", "KEY": "123", "PORT": "8000", "HOST": ""})
    assert config.models[0] == Model(name="m", aliases=("a-m-m",), workers=(Worker(url="http://h:1", api_key="123"),))
    assert (config.grace, config.listen.port, config.headers.worker) == (300, 8000, False)


@pytest.mark.parametrize(
    "value", ["x, y: z", "a\nlisten: {port: 1}", "*a", "&a", "'", '"', "{}", "#", "${KEY}", "null", "true"]
)
def test_what_a_variable_contains_is_never_read_as_yaml_or_as_a_variable(value, minimal):
    assert (
        loads(f"{minimal}telemetry: {{service_name: '${{X}}'}}\n", environ={"X": value}).telemetry.service_name == value
    )


def test_two_dollars_stand_for_a_literal_dollar_and_brace(minimal):
    text = f'{minimal}telemetry: {{service_name: "$${{A}} ${{A}} $A $$ $"}}\n'
    assert loads(text, environ={"A": "1"}).telemetry.service_name == "${A} 1 $A $$ $"


def test_only_true_and_false_are_booleans_so_that_a_model_may_be_called_no():
    config = loads("models: [{name: no, aliases: [on, y, 2026-12-01, 12:30], workers: [{url: http://a}]}]\n")
    assert (config.models[0].name, config.models[0].aliases) == ("no", ("on", "y", "2026-12-01", "12:30"))


def test_parameters_keep_their_types_for_the_policy(minimal):
    text = f"{minimal}policies: {{p: {{preset: session, parameters: {{header: null, body_field: [a, b], max_load_factor: 2}}}}}}\n"
    parameters = loads(text).policies["p"].parameters
    assert parameters == {"header": None, "body_field": ["a", "b"], "max_load_factor": 2}


def test_a_model_section_replaces_the_whole_section_above():
    text = "models: [{name: m, timeouts: {connect: 1s}, workers: [{url: http://a}]}]\ntimeouts: {total: 1s}\n"
    config = loads(text)
    assert (config.models[0].timeouts, config.timeouts) == (Timeouts(connect=1.0), Timeouts(total=1.0))


def test_idle_may_be_long_when_the_workers_keep_alive_is_stated(minimal):
    assert loads(f"{minimal}pool: {{idle: 60s, worker_keep_alive: 75s}}\n").pool == Pool(
        idle=60.0, worker_keep_alive=75.0
    )


def test_two_listeners_may_take_any_free_port_or_one_port_on_two_addresses(minimal):
    loads(f"{minimal}listen: {{port: 0}}\nadmin: {{port: 0}}\n")
    loads(f"{minimal}listen: {{host: 10.0.0.1, port: 80}}\nadmin: {{port: 80}}\n")


def test_secrets_are_in_no_repr():
    worker = Worker(url="http://a", api_key="sk-1", capabilities=Capabilities(slots=2))
    config = Config(models=(Model(name="m", workers=(worker,)),))
    traces = Traces(headers={"authorization": "sk-1"})
    assert "sk-1" not in repr(config) + str(worker) + repr(traces) + repr(list(traces.__rich_repr__()))
    assert "slots=2" in repr(config)
    assert repr(Worker(url="http://a")).count("id=None, api_key=None") == 1


def test_a_file_is_named_in_complaints_as_the_user_gave_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text("modles: 1\n")
    with pytest.raises(ConfigError, match=r"x\.yaml:1:1: modles: unknown key"):
        load("x.yaml")


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path):
    for path, words in ((tmp_path / "none.yaml", "--config"), (tmp_path, "directory")):
        with pytest.raises(ConfigError, match=words) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}: cannot be read")


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "c.yaml"
    with path.open("wb") as file:
        file.truncate((8 << 20) + 1)
    with pytest.raises(ConfigError, match="larger than 8 MiB"):
        load(path)


def test_text_that_is_not_utf8_is_reported_with_its_place(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"models: []\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r":2:6: not UTF-8"):
        load(path)


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load(path) == loads(MINIMAL)
