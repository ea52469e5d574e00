"""LMCache's older controller with two fake workers: real routes, real messages, no cache behind them."""

import asyncio
import threading
from array import array
from typing import Any, Final

import msgspec
import zmq

from backends.hints.base import Answer
from backends.hints.lmcache_common import Place
from backends.hints.lmcache_controller import CPU, DISK, LMCacheControllerDriver
from backends.hints.model import Action, Hint, Subject
from bench.lmcache_stack import Stack
from gateway.fleet.asking import open_session
from gateway.residency.calls import make

KEYS: Final = (-5291550163413402495, -3317032428723197383, 79107099446296706)
"""Of the tokens 1000 to 1599 in chunks of 256, 256 and 88, as the controller computes them with ``PYTHONHASHSEED=0``."""
TOKENS: Final = range(1000, 1600)

_ANSWERS: Final = {
    "PinWorkerMsg": "PinWorkerRetMsg",
    "MoveWorkerMsg": "MoveWorkerRetMsg",
    "ClearWorkerMsg": "ClearWorkerRetMsg",
}


class FakeWorker:
    """Registers, says what it holds, and does as it is told, which is to answer."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", name: str, port: int, pull: int, reply: int) -> None:
        """`port`: where it listens; `pull` and `reply`: the controller's."""
        self.name = name
        self.port = port
        self.asked: list[dict[str, Any]] = []
        self._seq = 0
        self._rep = context.socket(zmq.REP)
        self._rep.bind(f"tcp://127.0.0.1:{port}")
        self._push = context.socket(zmq.PUSH)
        self._push.connect(f"tcp://127.0.0.1:{pull}")
        self._request = context.socket(zmq.DEALER)
        self._request.connect(f"tcp://127.0.0.1:{reply}")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Register and begin to answer.

        Raises:
            RuntimeError: the controller does not answer.
        """
        address = {"ip": "127.0.0.1", "port": self.port, "peer_init_url": f"127.0.0.1:{self.port + 1}"}
        message = {"type": "RegisterMsg", "instance_id": self.name, "worker_id": 0, **address}
        self._request.send_multipart([b"", msgspec.msgpack.encode(message)])
        if not self._request.poll(10_000):
            raise RuntimeError("the controller does not answer a registration")
        self._request.recv_multipart()
        self._thread.start()

    def tell(self, op: str, location: str, *keys: int) -> None:
        """It holds these now (`admit`), or no longer (`evict`)."""
        operations = []
        for key in keys:
            operations.append({"op_type": op, "key": key, "seq_num": self._seq})
            self._seq += 1
        message = {"type": "BatchedKVOperationMsg", "instance_id": self.name, "worker_id": 0, "location": location}
        self._push.send(msgspec.msgpack.encode({**message, "operations": operations}))

    def stop(self) -> None:
        """Close the sockets."""
        self._stopping.set()
        self._thread.join()
        for each in (self._rep, self._push, self._request):
            each.close(0)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if not self._rep.poll(100):
                continue
            message = msgspec.msgpack.decode(self._rep.recv())
            self.asked.append(message)
            kind = _ANSWERS.get(message["type"])
            if kind is None:
                self._rep.send(msgspec.msgpack.encode({"type": "ErrorMsg", "error": "unknown"}))
            else:
                self._rep.send(msgspec.msgpack.encode({"type": kind, "num_tokens": len(message.get("tokens") or ())}))


async def controller(stack: Stack) -> dict[str, Any]:
    """What the driver's calls come to: who is asked for what, and what the answers say."""
    base = stack.base + 60
    port, pull, reply, heartbeat = base, base + 1, base + 2, base + 3
    ports = f'{{"pull":{pull},"reply":{reply},"heartbeat":{heartbeat}}}'
    stack.run(
        "controller", ["lmcache_controller", "--host", "127.0.0.1", "--port", str(port), "--monitor-ports", ports], port
    )
    url = f"http://127.0.0.1:{port}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    a, b = (FakeWorker(context, name, base + number, pull, reply) for name, number in (("inst-a", 5), ("inst-b", 8)))
    session = open_session()
    seen: dict[str, Any] = {}
    ids = array("I", TOKENS)
    about = Subject("m", len(ids), {}, lambda: ids)
    wish = {"id": 1, "rule": "bench", "worker": "", "subject": about, "stop": len(ids)}

    async def say(driver: LMCacheControllerDriver, hint: Hint) -> Answer:
        call = driver.call(hint)
        assert call is not None
        while True:
            said = await make(session, call, url, {}, 20)
            answer = driver.read(hint, said.status, said.body)
            if answer.then is None:
                return answer
            call = answer.then

    try:
        for each in (a, b):
            each.start()
        a.tell("admit", CPU, *KEYS)
        b.tell("admit", DISK, KEYS[0])
        await asyncio.sleep(1.0)
        drivers = {each.name: LMCacheControllerDriver(Place(model="m", instance=each.name)) for each in (a, b)}
        fetch = Hint(action=Action.PREFETCH, source="l1", target="l1", **wish)  # type: ignore[arg-type]
        pin = Hint(action=Action.PIN, target="l1", **wish)  # type: ignore[arg-type]
        demote = Hint(action=Action.DEMOTE, target="l1", **wish)  # type: ignore[arg-type]
        for name, worker, hint in (
            ("fetched by b from a", "inst-b", fetch),
            ("fetched by a from itself", "inst-a", fetch),
            ("pinned at a", "inst-a", pin),
            ("demoted at a", "inst-a", demote),
        ):
            answer = await say(drivers[worker], hint)
            seen[name] = [answer.verdict, answer.moved_tokens]
        said = await make(session, drivers["inst-a"].clear(), url, {}, 20)
        seen["cleared"] = [said.status, msgspec.json.decode(said.body).get("num_tokens")]
        a.tell("evict", CPU, *KEYS)
        await asyncio.sleep(1.0)
        seen["fetched by a after its evictions, from b's disk"] = [
            (answer := await say(drivers["inst-a"], fetch)).verdict,
            answer.moved_tokens,
        ]
        seen["asked of a"] = [f"{each['type']} {len(each.get('tokens') or ())}" for each in a.asked]
        seen["asked of b"] = [f"{each['type']} {len(each.get('tokens') or ())}" for each in b.asked]
        copies = [each for each in a.asked if each["type"] == "MoveWorkerMsg"]
        seen["copy"] = [each.get("do_copy", each.get("should_copy", each.get("copy"))) for each in copies]
    finally:
        await session.close()
        for each in (a, b):
            each.stop()
        context.term()
        stack.stop("controller")
    seen["ok"] = (
        seen["fetched by b from a"] == ["accepted", 512]
        and seen["fetched by a from itself"] == ["accepted", 0]
        and seen["pinned at a"] == ["accepted", 512]
        and seen["demoted at a"] == ["accepted", 512]
        and seen["cleared"][0] == 200
        and seen["fetched by a after its evictions, from b's disk"] == ["accepted", 256]
    )
    return seen
