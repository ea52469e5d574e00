"""`/v1/models`: one card for each name that a client may use, made from the workers' own cards.

The cards come from the control plane (`gateway.fleet.health` fetches them); this file only merges and caches, so that
answering costs nothing and no worker has to be there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from gateway.fleet.fleet import Fleet, Fleets
from gateway.fleet.worker import Worker


class ModelCards:
    """What the workers say about their models, merged by name.

    A name is a fleet's or one of its aliases. Its card is that of the fleet's first worker (in the configuration's
    order) whose card is known, with `id` set to the name and `max_model_len` to the smallest of all workers; without
    any, the least that OpenAI's shape asks for. A LoRA adapter that a worker has loaded is a name as well; its card is that
    of its fleet, with the fleet's name as `parent`.
    """

    __slots__ = ("_adapters", "_cards", "_created", "_fleets", "_one", "_payload")

    def __init__(self, fleets: Fleets, created: int) -> None:
        """`created` is the `created` of cards that no worker gave: seconds since 1970."""
        self._fleets = fleets
        self._created = created
        self._cards: dict[Worker, Mapping[str, Any]] = {}
        self._payload: bytes | None = None
        self._one: dict[str, bytes] = {}
        self._adapters: list[tuple[str, ...]] = []  # of every worker, when the answers were made

    def update(self, fleets: Fleets) -> None:
        """Follow a reload: other names, and only the cards of workers that are still there."""
        self._fleets = fleets
        members = set(fleets.workers())
        self._cards = {worker: card for worker, card in self._cards.items() if worker in members}
        self._forget_answers()

    def record(self, worker: Worker, cards: Sequence[Mapping[str, Any]]) -> bool:
        """Keep what `worker` says about its model; False when none of its `cards` is for it.

        Cards of other models are left out: a name that does not resolve would be a promise that requests break. Those of
        LoRA adapters are heard elsewhere (`gateway.fleet.capabilities`).
        """
        card = next((card for card in cards if card.get("id") == worker.model), None)
        if card is None:
            return False
        if self._cards.get(worker) != card:
            self._cards[worker] = card
            self._forget_answers()
        return True

    def models_payload(self, allows: Callable[[str], bool] | None = None) -> bytes:
        """The JSON body of ``GET /v1/models``: all names, or those that one `allows`."""
        if allows is not None:
            return self._list(allows)
        self._look_at_adapters()
        if self._payload is None:
            self._payload = self._list(lambda _: True)
        return self._payload

    def model_payload(self, name: str) -> bytes | None:
        """The JSON body of ``GET /v1/models/{name}``, or None for a name that does not resolve."""
        self._look_at_adapters()
        payload = self._one.get(name)
        if payload is None:
            fleet = self._fleets.resolve(name)
            if fleet is None:
                return None
            payload = self._one[name] = orjson.dumps(self._card(name, fleet))
        return payload

    def _list(self, allows: Callable[[str], bool]) -> bytes:
        data = [self._card(name, fleet) for name, fleet in self._fleets.names() if allows(name)]
        return orjson.dumps({"object": "list", "data": data})

    def _card(self, name: str, fleet: Fleet) -> dict[str, Any]:
        known = [self._cards[worker] for worker in fleet.workers if worker in self._cards]
        base = known[0] if known else {}
        card = {"object": "model", "created": self._created, "owned_by": "warmroute", **base, "id": name}
        if name not in fleet.own_names:
            card["parent"] = fleet.name
        lengths = [card.get("max_model_len") for card in known]
        lengths += [worker.capabilities.max_model_len for worker in fleet.workers]
        if sizes := [length for length in lengths if type(length) is int and length > 0]:
            card["max_model_len"] = min(sizes)
        return card

    def _look_at_adapters(self) -> None:
        """Forget the answers when a worker has loaded or dropped an adapter since."""
        adapters = [worker.capabilities.lora_adapters for worker in self._fleets.workers()]
        if adapters != self._adapters:
            self._adapters = adapters
            self._forget_answers()

    def _forget_answers(self) -> None:
        self._payload = None
        self._one.clear()
