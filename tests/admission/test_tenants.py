"""From a key to its tenant, and what that may do."""

import pytest

from gateway.admission.keys import KeyFiles, KeysError, hashed, new_key, parse_hash, read_keys, usable
from gateway.admission.tenancy import Tenancy
from gateway.admission.tenants import Tenants, index_of
from gateway.cli import main
from gateway.config.dump import dump
from gateway.config.load import loads
from gateway.config.problems import ConfigError
from gateway.errors import GatewayError

KEY, OTHER = new_key(), new_key()
MODELS = """
models:
  - {name: "qwen[a]", aliases: [gpt], workers: [{url: "http://127.0.0.1:1"}]}
  - {name: llama, aliases: [gpt-mini], workers: [{url: "http://127.0.0.1:2"}]}
"""


def configured(sections, models=MODELS, **environ):
    return loads(models + "tenants:\n" + sections, environ=environ)


def tenants(sections, before=None, now=0.0, **environ):
    config = configured(sections, **environ)
    return Tenants(config, index_of(config.tenants), before, now)


def one(section="", **environ):
    return tenants(f'  a: {{keys: ["{hashed(KEY)}"]{section}}}\n', **environ)


def bearer(key):
    return (b"Bearer " + key.encode(),)


def status(call):
    with pytest.raises(GatewayError) as caught:
        call()
    return caught.value.status


def test_a_key_leads_to_its_tenant_by_its_hash_or_as_itself():
    both = tenants(f'  a: {{keys: ["{hashed(KEY)}"]}}\n  b:\n    key: ${{K}}\n', K=OTHER)
    assert both.of(bearer(KEY)).name == "a"
    assert both.of((b"bEaReR   " + OTHER.encode(),)).name == "b"


@pytest.mark.parametrize(
    "credentials",
    [
        (),
        (b"",),
        (b"Bearer ",),
        (b"Bearer",),
        b"Basic YTpi",
        (b"Bearer " + b"x" * 8192,),
        (b"Bearer ' OR 1=1 --",),
        (b"Bearer \xff\xfe",),
        (b"Bearer " + hashed(KEY).encode(),),
        (b"Bearer " + KEY.encode()[:-1],),
        (b"Bearer " + KEY.encode().upper(),),
        (b"Bearer Bearer " + KEY.encode(),),
        (b"Bearer " + KEY.encode(), b"Bearer " + OTHER.encode()),
    ],
)
def test_no_key_a_wrong_one_and_several_are_refused(credentials):
    credentials = credentials if isinstance(credentials, tuple) else (credentials,)
    assert status(lambda: one().of(credentials)) == 401


def test_the_same_key_in_both_fields_is_one_key():
    assert one().of(bearer(KEY) * 2).name == "a"


def test_a_pattern_allows_a_name_and_a_models_name_its_aliases():
    tenant = one(', models: ["qwen[a]", "gpt-*", "lora?"]').of(bearer(KEY))
    assert tenant.models == {"qwen[a]", "gpt", "gpt-mini"}
    assert tenant.may_use("lora1")
    assert not tenant.may_use("llama")
    assert not tenant.may_use("qwena")
    assert status(lambda: tenant.check_model("llama")) == 403


def test_without_patterns_every_model_is_allowed():
    assert one().of(bearer(KEY)).may_use("anything")


def test_only_what_the_key_allows_may_be_set():
    keyed = one(", may_set: [stage]")
    keyed.of(bearer(KEY), ("stage",))
    assert status(lambda: keyed.of(bearer(KEY), ("stage", "priority"))) == 403


def test_no_priority_above_the_ceiling_and_none_at_all_where_it_is_not_allowed():
    plain = one().of(bearer(KEY))
    plain.check_priority(0)
    assert status(lambda: plain.check_priority(5)) == 403
    allowed = one(", may_set: [priority], priority_ceiling: -2").of(bearer(KEY))
    allowed.check_priority(-2)
    allowed.check_priority(7)
    assert status(lambda: allowed.check_priority(-3)) == 403


def test_a_refusal_says_when_to_come_back_and_one_that_is_useless_to_repeat_says_so():
    tenant = one(", requests_per_minute: 1, tokens_per_minute: 60, concurrency: 2").of(bearer(KEY))
    tenant.admit(0.0)
    with pytest.raises(GatewayError) as caught:
        tenant.admit(0.5)
    error = caught.value
    assert (error.status, error.api_type, error.code, error.retry_after) == (429, "requests", "rate_limit_exceeded", 60)
    assert b"retry-after-ms: 59500\r\n" in error.lines
    assert b"x-ratelimit-remaining-requests: 0\r\nx-ratelimit-reset-requests: 59.5s\r\n" in error.lines
    with pytest.raises(GatewayError) as caught:
        tenant.charge(61, 1.0)
    assert (caught.value.api_type, caught.value.retry_after) == ("tokens", None)
    assert b"x-should-retry: false\r\n" in caught.value.lines


def test_limits_are_shown_as_openai_shows_them_and_not_at_all_without():
    assert one().of(bearer(KEY)).lines(0.0) == b""
    tenant = one(", requests_per_minute: 60, tokens_per_minute: 6000").of(bearer(KEY))
    tenant.admit(0.0)
    tenant.charge(150, 0.0)
    assert tenant.lines(0.0).decode().split("\r\n") == [
        "x-ratelimit-limit-requests: 60",
        "x-ratelimit-remaining-requests: 59",
        "x-ratelimit-reset-requests: 1s",
        "x-ratelimit-limit-tokens: 6000",
        "x-ratelimit-remaining-tokens: 5850",
        "x-ratelimit-reset-tokens: 1.5s",
        "",
    ]


def test_a_reload_gives_no_fresh_minute():
    before = one(", requests_per_minute: 1")
    before.of(bearer(KEY)).admit(0.0)
    section = f'  a: {{keys: ["{hashed(OTHER)}"], requests_per_minute: 1}}\n'
    after = tenants(section, before=before, now=1.0)
    assert status(lambda: after.of(bearer(KEY))) == 401
    assert status(lambda: after.of(bearer(OTHER)).admit(1.0)) == 429


def test_files_hold_keys_or_hashes_with_comments(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{hashed(KEY)}  # the app\n\n{OTHER} the batch job\n")
    assert read_keys(path) == {parse_hash(hashed(KEY)), parse_hash(hashed(OTHER))}


@pytest.mark.parametrize("text", ["short", "sha256:12", "sha256:" + "g" * 64, "ok" * 20 + "\n" + "\xe9" * 30])
def test_a_file_with_anything_else_is_refused_by_line_without_showing_it(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(KeysError) as caught:
        read_keys(path)
    assert f"{path}:{len(text.splitlines())}:" in str(caught.value)
    assert text not in str(caught.value)


def test_a_file_that_is_away_or_two_tenants_with_one_key_are_refused(tmp_path):
    path = tmp_path / "keys"
    config = configured(f'  a: {{keys: ["{hashed(KEY)}"]}}\n  b: {{keys_file: "{path}"}}\n')
    with pytest.raises(KeysError, match="cannot be read"):
        index_of(config.tenants)
    path.write_text(KEY)
    with pytest.raises(KeysError, match="a and b have the same key"):
        index_of(config.tenants)


async def test_a_file_of_keys_is_read_again_when_it_changes_and_a_bad_one_changes_nothing(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEY)
    config = configured(f'  a: {{keys_file: "{path}"}}\n')
    tenancy = Tenancy(lambda: 0.0)
    tenancy.use(config, await tenancy.prepare(config))
    assert tenancy.current.of(bearer(KEY)).name == "a"

    replacement = tmp_path / "new"
    replacement.write_text(f"{OTHER}\n")
    replacement.replace(path)
    await tenancy.look()
    assert tenancy.current.of(bearer(OTHER)).name == "a"
    assert status(lambda: tenancy.current.of(bearer(KEY))) == 401

    path.write_text("bad")
    await tenancy.look()
    assert tenancy.current.of(bearer(OTHER)).name == "a"
    assert "neither a hash" in tenancy.degraded[0]

    path.write_text(f"{OTHER}\n{KEY}")
    await tenancy.look()
    assert tenancy.current.of(bearer(KEY)).name == "a"
    assert tenancy.degraded == ()


async def test_files_that_did_not_change_are_not_read(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEY)
    read = []
    files = KeyFiles([str(path)], read.append)
    await files.look()
    assert read == []


async def test_without_tenants_the_gateway_is_open_and_says_so_once(capsys):
    tenancy = Tenancy(lambda: 0.0)
    config = loads(MODELS)
    tenancy.use(config, await tenancy.prepare(config))
    tenancy.announce()
    tenancy.use(config, await tenancy.prepare(config))
    assert tenancy.current is None
    assert "may use every model" in tenancy.information[0]
    assert capsys.readouterr().out.count("may use every model") == 1


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("  a: {models: [m]}\n", "no key"),
        ('  a: {keys: ["wr-not-a-hash-but-a-key"]}\n', "expected a hash"),
        ("  a: {key: '12345678901234567890 '}\n", "spaces"),
        (f'  a: {{keys: ["{hashed(KEY)}"]}}\n  b: {{key: {KEY}}}\n', 'the same key as one of "a"'),
    ],
)
def test_wrong_keys_are_complained_about_and_never_shown(section, words):
    with pytest.raises(ConfigError) as caught:
        configured(section)
    assert words in str(caught.value)
    assert KEY not in str(caught.value)
    assert "not-a-hash" not in str(caught.value)


def test_neither_keys_nor_salts_are_printed():
    config = configured(f'  a: {{keys: ["{hashed(KEY)}"], key: {OTHER}, cache_salt: secret-salt}}\n')
    for text in (repr(config), dump(config)):
        assert hashed(KEY) not in text
        assert OTHER not in text
        assert "secret-salt" not in text


def test_the_command_makes_a_key_whose_line_the_configuration_takes(capsys):
    assert main(["key", "shop"]) == 0
    key, line = (line.partition(": ")[2].strip() for line in capsys.readouterr().out.splitlines())
    assert usable(key)
    config = loads(f"{MODELS}{line}\n")
    assert Tenants(config, index_of(config.tenants), None, 0.0).of(bearer(key)).name == "shop"


def test_the_command_hashes_a_key_that_exists(capsys, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{KEY}\n"))
    assert main(["key", "--hash"]) == 0
    assert capsys.readouterr().out.strip() == hashed(KEY)
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    assert main(["key", "--hash"]) == 2
