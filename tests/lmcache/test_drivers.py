"""Every recorded exchange with LMCache's servers: the drivers send what was sent, and read what was answered."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.hints.base import Answer
from backends.hints.hyperpod import HyperPodDriver
from backends.hints.lmcache import LMCacheDriver
from backends.hints.lmcache_common import Place, drop_quota, set_quota
from backends.hints.lmcache_controller import CPU, REMOTE, LMCacheControllerDriver
from backends.hints.lmcache_coordinator import LMCacheCoordinatorDriver, instances, lookup, placements
from backends.hints.registry import AT_SERVER, HintTarget, hint_driver
from tests.lmcache.conftest import description, exchanges, hint, subject

DRIVERS = {
    "lmcache": LMCacheDriver,
    "lmcache-coordinator": LMCacheCoordinatorDriver,
    "lmcache-controller": LMCacheControllerDriver,
    "hyperpod": HyperPodDriver,
}
FILES = {
    "mp_server": "lmcache",
    "coordinator": "lmcache-coordinator",
    "coordinator_with_mp_server": "lmcache-coordinator",
    "coordinator_quota_eviction": "lmcache-coordinator",
    "controller": "lmcache-controller",
}


def recorded(*files, method="POST", path):
    """The exchanges with one route, as test cases."""
    return [
        pytest.param(file, each, id=f"{file}-{index}-{each.get('label', each['status'])}")
        for file in files
        for index, each in enumerate(exchanges(file))
        if each["method"] == method and each["path"] == path
    ]


def place_of(request, **fields):
    return Place(model=request["model_name"], world_size=request["world_size"], **fields)


def sent(call, request):
    """Whether a call says what was said then; fields that were left out there have LMCache's own defaults."""
    defaults = {"cache_salt": "", "source_tier": "l2", "target_tier": "l1"}
    return call.server == "hints" and {**defaults, **call.body} == {**defaults, **request}


COORDINATOR = ("coordinator", "coordinator_with_mp_server", "coordinator_quota_eviction")
TAKEN_ON = {"warm L2 -> L1", "tokens nobody stored", "prefetch dispatched through the coordinator", "salted warm"}


@pytest.mark.parametrize(
    ("file", "exchange"), recorded("mp_server", *COORDINATOR, path="/cache/prefetches"),
)  # fmt: skip
def test_a_prefetch_is_said_as_it_was_recorded_and_its_answer_understood(file, exchange):
    request = exchange["request"]
    if request.get("source_tier", "l2") != "l2" or "model_name" not in request:
        pytest.skip("what no driver says: another direction, or without a model")
    about = subject(request["token_ids"], salt=request.get("cache_salt"))
    place = place_of(request, instance=request.get("instance_id", ""))
    driver = DRIVERS[FILES[file]](place)
    wish = hint("prefetch", about, source="l2", target="l1")
    assert sent(driver.call(wish), request)
    answer = driver.read(wish, exchange["status"], orjson.dumps(exchange["response"]))
    assert answer.verdict == ("pending" if exchange.get("label") in TAKEN_ON else "refused")
    if answer.verdict == "pending":
        instance = f"{place.instance}/" if file != "mp_server" else ""
        assert answer.then.path == f"/cache/prefetches/{instance}{exchange['response']['request_id']}"
        assert (answer.then.method, answer.then.server) == ("GET", "hints")


def polls():
    return [
        pytest.param(file, each, id=f"{file}-{index}-{each.get('label')}")
        for file in FILES
        for index, each in enumerate(exchanges(file))
        if each["method"] == "GET" and each["path"].startswith("/cache/prefetches/")
    ]


@pytest.mark.parametrize(("file", "exchange"), polls())
def test_a_poll_goes_on_while_it_is_pending_and_says_at_its_end_how_much_came(file, exchange):
    driver = DRIVERS[FILES[file]](Place(model="qtiny", instance="mp-0"))
    wish = hint("prefetch", subject(range(293)), source="l2", target="l1")
    answer = driver.read(wish, exchange["status"], orjson.dumps(exchange["response"]))
    response = exchange["response"]
    if exchange["status"] == 502 or "no MP server" in response.get("detail", ""):
        assert answer.verdict == "refused"
    elif exchange["status"] == 404:
        assert (answer.verdict, answer.moved_tokens) == ("accepted", None)
    elif response["status"] == "pending":
        assert answer.verdict == "pending"
        assert answer.then.path == exchange["path"]
    elif response["found_keys"]:
        assert (answer.verdict, answer.moved_tokens) == ("accepted", 293)
    else:
        assert (answer.verdict, answer.moved_tokens) == ("refused", 0)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("file", COORDINATOR)
def test_pins_are_said_and_taken_back_as_they_were_recorded(file, method):
    seen = 0
    for each in exchanges(file):
        if each["method"] != method or each["path"] != "/cache/pins" or "model_name" not in each["request"]:
            continue
        seen += 1
        request = each["request"]
        driver = LMCacheCoordinatorDriver(place_of(request))
        wish = hint(
            "pin" if method == "POST" else "unpin",
            subject(request["token_ids"], salt=request.get("cache_salt")),
            target="l2",
        )
        call = driver.call(wish)
        assert (call.method, call.path) == (method, "/cache/pins")
        assert sent(call, request)
        answer = driver.read(wish, each["status"], orjson.dumps(each["response"]))
        assert answer.verdict == ("accepted" if each["response"].get("affected") else "refused")
    assert seen or (file, method) == ("coordinator_with_mp_server", "DELETE")


@pytest.mark.parametrize("file", COORDINATOR)
def test_a_lookup_is_said_as_it_was_recorded_and_its_placements_read_in_order(file):
    seen = 0
    for each in exchanges(file):
        if each["path"] != "/directory/lookup" or "model_name" not in each["request"] or each["status"] != 200:
            continue
        request, response = each["request"], each["response"]
        place = Place(model=request["model_name"], world_size=request.get("world_size", 1))
        about = subject(request["token_ids"], salt=request.get("cache_salt"))
        call = lookup(about, about.tokens, place)
        assert call.path == "/directory/lookup"
        assert {**call.body, "cache_salt": ""} == {"world_size": 1, **request, "cache_salt": ""}
        found = placements(orjson.dumps(response))
        assert [held.key.chunk_hash_hex for held in found] == [
            one["key"]["chunk_hash_hex"] for one in response["results"]
        ]
        assert [[(one.instance_id, one.tier) for one in held.placements] for held in found] == [
            [(one["instance_id"], one["tier"]) for one in result["placements"]] for result in response["results"]
        ]
        seen += 1
    assert seen


@pytest.mark.parametrize(("file", "exchange"), recorded(*COORDINATOR, path="/cache/delete"))
def test_demoting_from_l1_is_the_coordinators_delete_there(file, exchange):
    request = exchange["request"]
    driver = LMCacheCoordinatorDriver(place_of(request, instance=request["instance_id"]))
    wish = hint("demote", subject(request["token_ids"]), target="l1")
    call = driver.call(wish)
    assert call.path == exchange["path"]
    assert {**request, "tier": "l1", "cache_salt": "", "force": None} == {**call.body, "force": None}
    answer = driver.read(wish, exchange["status"], orjson.dumps(exchange["response"]))
    assert answer.verdict == ("accepted" if exchange["response"].get("affected") else "refused")


def test_demoting_a_part_leaves_the_beginning_of_a_prompt_where_it_is():
    wish = hint("demote", subject(range(128)), target="l1", start=64)
    assert LMCacheCoordinatorDriver(Place(model="m", instance="i")).call(wish) is None
    call = LMCacheDriver(Place(model="qtiny", chunk=32)).call(wish)
    whole = LMCacheDriver(Place(model="qtiny", chunk=32)).call(hint("demote", subject(range(128)), target="l1"))
    assert call.body["keys"] == whole.body["keys"][2:]


def test_demoting_from_l1_names_the_keys_that_the_server_knows():
    recording = exchanges("mp_server")
    request = next(each for each in recording if each.get("label") == "warm L2 -> L1")["request"]
    (delete,) = [each for each in recording if each.get("label") == "delete it from both"]
    wish = hint("demote", subject(request["token_ids"]), target="l1")
    driver = LMCacheDriver(Place(model="qtiny", chunk=32))
    call = driver.call(wish)
    assert (call.method, call.path, call.body["tier"]) == (delete["method"], delete["path"], "l1")
    assert delete["request"]["keys"][0] in call.body["keys"]
    assert len(call.body["keys"]) == 9
    assert driver.read(wish, delete["status"], orjson.dumps(delete["response"])).verdict == "accepted"
    for each in recording:
        if each["method"] == "DELETE" and each["path"] == "/cache/objects" and each["status"] != 200:
            assert driver.read(wish, each["status"], orjson.dumps(each["response"])).verdict == "refused"


@pytest.mark.parametrize("file", ["mp_server", "coordinator", "coordinator_quota_eviction"])
def test_quotas_are_set_and_dropped_as_they_were_recorded(file):
    seen = 0
    for each in exchanges(file):
        salt = each["path"].removeprefix("/quota/")
        if each["path"] == salt or salt == "config" or each["status"] != 200 or each["method"] == "GET":
            continue
        seen += 1
        if each["method"] == "PUT":
            call = set_quota(salt, int(each["request"]["limit_gb"] * 1024**3))
            assert call.body == each["request"]
        else:
            call = drop_quota(salt)
        assert (call.method, call.path) == (each["method"], each["path"])
    assert seen >= 2


@pytest.mark.parametrize("file", ["mp_server", "coordinator"])
def test_a_salts_quota_is_set_once_before_the_first_hint_about_it(file):
    driver = DRIVERS[FILES[file]](Place(model="m", instance="i", salt_quota=512 * 1024**2))
    answered = next(
        each
        for each in exchanges(file)
        if each["method"] == "PUT" and each["path"] == "/quota/tenant-1" and each["status"] == 200
    )
    wish = hint("prefetch", subject(range(64), salt="tenant-1"), source="l2", target="l1")
    first = driver.call(wish)
    assert (first.method, first.path, first.body) == ("PUT", "/quota/tenant-1", {"limit_gb": 0.5})
    then = driver.read(wish, answered["status"], orjson.dumps(answered["response"]))
    assert then.verdict == "pending"
    assert then.then.path == driver.call(wish).path == "/cache/prefetches"
    unsalted = hint("prefetch", subject(range(64)), source="l2", target="l1")
    assert driver.call(unsalted).path == "/cache/prefetches"


# -- the older controller ----------------------------------------------------------------------------------------------


def controller(**fields):
    return LMCacheControllerDriver(Place(model="m", instance="inst-a", **fields))


@pytest.mark.parametrize(("file", "exchange"), recorded("controller", path="/lookup"))
def test_a_controllers_lookup_is_followed_by_a_copy_from_who_has_most(file, exchange):
    ids = exchange["request"].get("tokens")
    if not ids:
        pytest.skip("no prompt")
    driver = LMCacheControllerDriver(Place(model="m", instance="inst-c"), tails=True)
    wish = hint("prefetch", subject(ids), source="l2", target="l1")
    assert driver.call(wish).body == exchange["request"]
    layout = exchange["response"]["layout_info"]
    answer = driver.read(wish, exchange["status"], orjson.dumps(exchange["response"]))
    if not layout:
        assert answer.verdict == "refused"
        return
    ((instance, (location, count)),) = layout.items()
    assert answer.then.path == "/move"
    assert answer.then.body == {
        "old_position": [instance, location],
        "new_position": ["inst-c", CPU],
        "tokens": ids[:count],
        "should_copy": True,
    }
    own = LMCacheControllerDriver(Place(model="m", instance="inst-a"), tails=True)
    already = own.read(wish, exchange["status"], orjson.dumps(exchange["response"]))
    assert already.verdict == ("accepted" if layout.get("inst-a", [""])[0] == CPU else "pending")


@pytest.mark.parametrize(("file", "exchange"), recorded("controller", path="/move"))
def test_a_copy_is_said_as_it_was_recorded(file, exchange):
    request, response = exchange["request"], exchange["response"]
    if "tokens" not in request:
        assert (
            controller().read(hint("prefetch", subject(range(256))), 422, orjson.dumps(response)).verdict == "refused"
        )
        return
    instance, location = request["old_position"]
    driver = LMCacheControllerDriver(Place(model="m", instance="inst-b"))
    wish = hint("prefetch", subject(request["tokens"]), source="l1", target="l1")
    answer = driver.read(wish, 200, orjson.dumps({"event_id": "Lookup", "layout_info": {instance: [location, 256]}}))
    assert answer.then.body == {**request, "should_copy": True}
    end = driver.read(wish, exchange["status"], orjson.dumps(response))
    assert (end.verdict, end.moved_tokens) == (("accepted", 256) if exchange["status"] == 200 else ("refused", None))


@pytest.mark.parametrize(("file", "exchange"), recorded("controller", path="/pin"))
def test_a_controllers_pin_is_said_as_it_was_recorded(file, exchange):
    request = exchange["request"]
    driver = LMCacheControllerDriver(Place(model="m", instance=request["instance_id"]))
    wish = hint("pin", subject(request["tokens"]), target="l1")
    assert driver.call(wish).body == request
    answer = driver.read(wish, exchange["status"], orjson.dumps(exchange["response"]))
    assert answer.verdict == ("accepted" if exchange["status"] == 200 else "refused")


@pytest.mark.parametrize(("file", "exchange"), recorded("controller", path="/clear"))
def test_a_memory_is_emptied_as_it_was_recorded(file, exchange):
    request = exchange["request"]
    call = LMCacheControllerDriver(Place(model="m", instance=request["instance_id"])).clear(request["location"])
    assert (call.path, call.body) == ("/clear", request)


def test_a_controller_is_told_whole_chunks_only_unless_tails_are_stored_too():
    wish = hint("prefetch", subject(range(600)), source="l2", target="l1")
    assert len(controller().call(wish).body["tokens"]) == 512
    assert len(LMCacheControllerDriver(Place(model="m", instance="a"), tails=True).call(wish).body["tokens"]) == 600


def test_a_demoted_prompt_moves_from_the_cpu_to_the_disk():
    call = controller().call(hint("demote", subject(range(512)), target="l1"))
    assert call.body == {
        "old_position": ["inst-a", "LocalCPUBackend"],
        "new_position": ["inst-a", "LocalDiskBackend"],
        "tokens": list(range(512)),
    }


def test_prompts_that_a_controller_would_take_for_others_are_not_spoken_of():
    for about in (subject(range(512), salt="t"), subject(range(512), lora="a")):
        assert controller().call(hint("pin", about, target="l1")) is None
    assert (
        LMCacheDriver(Place(model="m")).call(hint("prefetch", subject(range(512), lora="a"), source="l2", target="l1"))
        is None
    )


# -- who is it, what can be said ---------------------------------------------------------------------------------------


def test_each_server_is_known_by_its_own_driver_only():
    servers = {name: description(name) for name in ("mp_server", "coordinator", "controller")}
    spoken = {
        server: [name for name in AT_SERVER if hint_driver(name, HintTarget(worker="w", model="m")).speaks(200, body)]
        for server, body in servers.items()
    }
    assert spoken == {
        "mp_server": ["lmcache"],
        "coordinator": ["lmcache-coordinator"],
        "controller": ["lmcache-controller"],
    }
    assert not LMCacheDriver(Place(model="m")).speaks(404, servers["mp_server"])


def test_a_server_pins_only_where_it_has_the_route():
    old, new = LMCacheDriver(Place(model="m")), LMCacheDriver(Place(model="m"))
    assert old.speaks(200, description("mp_server"))
    assert new.speaks(200, description("mp_server").replace(b'"/cache/checksums"', b'"/cache/pins"'))
    assert not old.beside("pin", None, "l1")
    assert new.beside("pin", None, "l1")
    wish = hint("pin", subject(range(64)), target="l1")
    assert new.call(wish).body["tier"] == "l1"
    assert new.read(wish, 200, b'{"requested": 2, "pinned": 2, "status": "pinned"}').verdict == "accepted"


@pytest.mark.parametrize(("routes", "path"), [("mp_server", "/cache/prefetches"), ("controller", "/lookup")])
def test_hyperpod_is_spoken_to_in_the_way_of_whoever_answers(routes, path):
    driver = HyperPodDriver(Place(model="m", instance="inst-a"))
    assert driver.speaks(200, description(routes))
    wish = hint("prefetch", subject(range(600)), source="l2", target="l1")
    call = driver.call(wish)
    assert call.path == path
    # In process a tail is stored as well; the server beside the worker has whole chunks of 256 only.
    assert len(call.body["tokens"] if path == "/lookup" else call.body["token_ids"]) == (
        600 if path == "/lookup" else 512
    )


def test_hyperpods_slow_memory_is_its_tiered_storage():
    driver = HyperPodDriver(Place(model="m", instance="inst-a"))
    assert driver.speaks(200, description("controller"))
    assert driver.call(hint("pin", subject(range(256)), target="l2")).body["location"] == REMOTE
    assert not driver.speaks(200, description("coordinator"))


def test_an_instance_that_is_not_configured_is_the_only_one_on_the_workers_host():
    listed = next(each for each in exchanges("coordinator_with_mp_server") if each["path"] == "/instances")
    body = orjson.dumps(listed["response"])
    assert [each.instance_id for each in instances(body)] == ["mp-0"]
    wish = hint("prefetch", subject(range(64)), source="l2", target="l1")
    driver = LMCacheCoordinatorDriver(Place(model="m", worker="127.0.0.1:8000"))
    assert (driver.call(wish).method, driver.call(wish).path) == ("GET", "/instances")
    answer = driver.read(wish, 200, body)
    assert (answer.verdict, answer.then.body["instance_id"]) == ("pending", "mp-0")
    assert driver.call(wish).path == "/cache/prefetches"
    elsewhere = LMCacheCoordinatorDriver(Place(model="m", worker="10.0.0.9:8000"))
    assert elsewhere.read(wish, 200, body).verdict == "refused"


def test_less_than_a_chunk_is_not_said_where_its_size_is_known():
    wish = hint("prefetch", subject(range(31)), source="l2", target="l1")
    assert LMCacheDriver(Place(model="m", chunk=32)).call(wish) is None


@pytest.mark.parametrize("file", FILES)
def test_whatever_a_server_answers_is_read_without_an_error_and_no_error_is_taken_for_a_yes(file):
    driver = DRIVERS[FILES[file]](Place(model="m", instance="inst-a", chunk=32, salt_quota=1))
    for each in exchanges(file):
        for action in ("prefetch", "pin", "unpin", "demote"):
            answer = driver.read(
                hint(action, subject(range(64)), source="l2"), each["status"], orjson.dumps(each["response"])
            )
            assert isinstance(answer, Answer)
            if each["status"] >= 400 and not (action == "prefetch" and "prefetch request_id" in str(each["response"])):
                assert answer.verdict == "refused"


_keys = st.sampled_from([
    "status", "request_id", "found_keys", "total_keys", "detail", "layout_info", "num_tokens", "affected", "requested",
    "instances", "limit_gb", "cache_salt", "deleted", "ok", "inst-a", "error",
])  # fmt: skip
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**64) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=6),
    max_leaves=12,
)


@given(name=st.sampled_from(sorted(DRIVERS)), said=_json | st.binary(max_size=20), status=st.sampled_from([200, 202, 204, 404, 500]),
       action=st.sampled_from(["prefetch", "pin", "unpin", "demote"]))  # fmt: skip
def test_no_answer_whatsoever_breaks_a_driver(name, said, status, action):
    driver = DRIVERS[name](Place(model="m", instance="inst-a", chunk=32, salt_quota=1, worker="h:1"))
    body = said if isinstance(said, bytes) else orjson.dumps(said)
    answer = driver.read(hint(action, subject(range(64), salt="s"), source="l2"), status, body)
    assert answer.verdict in ("accepted", "refused", "pending")
    assert (answer.verdict != "pending") or answer.then is not None
    assert len(answer.detail) <= 200
