import time

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.schema import Admin
from gateway.inspector.access import SESSION, Access

TOKEN = "0123456789abcdef-token"
WITH_TOKEN = f", token: {TOKEN}"
PROTECTED = (
    "/api/fleet",
    "/api/requests",
    "/api/requests/x",
    "/api/prefixes",
    "/api/config",
    "/api/live",
    "/api/workers/x",
)


def bearer(token):
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
async def guarded(scene):
    async with scene(1, policy="leastload", admin=WITH_TOKEN) as found:
        yield found


async def test_with_a_token_nothing_is_said_without_it(guarded):
    for path in PROTECTED:
        assert (await guarded.get(path))[0] == 401
        assert (await guarded.get(path, headers=bearer(TOKEN + "x")))[0] == 401
    assert (await guarded.post("/api/explain", {"body": {}}))[0] == 401
    assert (await guarded.get("/api/fleet", headers=bearer(TOKEN)))[0] == 200


async def test_probes_scrapes_and_the_page_itself_need_no_token(guarded):
    for path in ("/healthz", "/readyz", "/metrics", "/", "/static/app.js", "/api/openapi.json"):
        async with guarded.http.get(f"{guarded.admin}{path}") as answer:
            assert answer.status == 200


async def test_a_login_gives_a_cookie_that_scripts_and_other_sites_never_see(guarded):
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
        async with browser.post(f"{guarded.admin}/api/login", json={"token": TOKEN}) as answer:
            assert answer.status == 200
            cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert TOKEN not in cookie
        async with browser.get(f"{guarded.admin}/api/fleet") as answer:
            assert answer.status == 200
        async with browser.post(f"{guarded.admin}/api/logout", json={}) as answer:
            assert answer.status == 200
        async with browser.get(f"{guarded.admin}/api/fleet") as answer:
            assert answer.status == 401


async def test_a_wrong_token_is_refused(guarded):
    assert (await guarded.post("/api/login", {"token": "wrong"}))[0] == 403
    assert (await guarded.post("/api/login", {}))[0] == 403
    assert (await guarded.post("/api/login", ["x"]))[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_another_sites_page_can_drain_nothing(scene, headers):
    async with scene(1, policy="leastload") as found:
        path = f"/api/workers/{found.ids[0]}/drain"
        assert (await found.post(path, {}, headers=headers))[0] == 403
        async with found.http.post(f"{found.admin}{path}", data="{}", headers={"content-type": "text/plain"}) as answer:
            assert answer.status == 415
        assert found.gateway.inspector.lives()[0]["state"] == "ready"
        assert (await found.post(path, {}, headers={"origin": found.admin, "sec-fetch-site": "same-origin"}))[0] == 200


async def test_beyond_loopback_without_a_token_there_is_no_inspector(scene):
    async with scene(1, policy="leastload", admin=', host: "0.0.0.0"') as found:
        status, document = await found.get("/api/fleet")
        assert status == 403
        assert "admin.token" in document["error"]
        assert (await found.get("/readyz"))[0] == 200


async def test_a_token_may_come_from_a_file(scene, tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    async with scene(1, policy="leastload", admin=f", token_file: {tmp_path / 'token'}") as found:
        assert (await found.get("/api/fleet"))[0] == 401
        assert (await found.get("/api/fleet", headers=bearer(TOKEN)))[0] == 200


def test_a_file_without_a_usable_token_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        Access.from_config(Admin(token_file=str(tmp_path / "none")))
    (tmp_path / "short").write_text("abc")
    with pytest.raises(OSError, match="at least 16"):
        Access.from_config(Admin(token_file=str(tmp_path / "short")))


def test_a_session_ends_and_does_not_outlive_its_token():
    access = Access("127.0.0.1", TOKEN)
    session = access.session()
    assert access._valid(session, time.time())
    assert not access._valid(session, time.time() + SESSION + 1)
    assert not Access("127.0.0.1", TOKEN + "2")._valid(session, time.time())


@given(st.text(max_size=80))
def test_no_made_up_cookie_is_valid(value):
    assert not Access("127.0.0.1", TOKEN)._valid(value, time.time())


@given(st.integers(0, 2**60))
def test_no_session_can_be_prolonged(until):
    access = Access("127.0.0.1", TOKEN)
    _, _, signature = access.session().partition(".")
    assert not access._valid(f"{until}.{signature}", 0.0) or f"{until}.{signature}" == access.session()
