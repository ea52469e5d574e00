"""What a driver is: the code that knows one kind of worker's protocol.

A driver holds no state about a worker and opens nothing itself: it names paths, reads answers, and says what that kind of
worker can do. The control plane (`gateway.fleet.health`) makes the calls.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from backends.capability_facts import CapabilityFacts
from backends.kv_events import CacheFacts, EventSource
from backends.profiles import Profile
from backends.token_ids import TokenQuestion

if TYPE_CHECKING:
    from array import array


class Driver(Protocol):
    """One kind of worker."""

    @property
    def name(self) -> str:
        """As written in the configuration: vllm, neuron, sglang, openai."""

    @property
    def health_path(self) -> str:
        """Answered 200 by a worker that can take requests."""

    @property
    def start_up(self) -> float:
        """Seconds that such a worker may need from its start until it answers 200 to `health_path`."""

    @property
    def usage_by_default(self) -> bool:
        """What it takes ``include_usage`` for in a ``stream_options`` object that does not name it."""

    @property
    def credits_blocks(self) -> bool:
        """A cached prefix saves work block by block. False: in whole segments or buckets, so less may be used than is held."""

    @property
    def assumed(self) -> Profile:
        """What is taken for granted about a worker of this kind, where nothing else is known."""

    @property
    def runs_medusa_alone(self) -> bool:
        """Medusa decodes one request at a time there, whatever the batch was compiled for."""

    @property
    def models_path(self) -> str:
        """Where its model cards are, usually ``/v1/models``."""

    def is_healthy(self, status: int, body: bytes) -> bool:
        """Whether this answer to `health_path` means that the worker can take requests."""

    def parse_model_cards(self, payload: Any) -> list[Mapping[str, Any]]:
        """The cards in an answer to `models_path`, in OpenAI's shape; an empty list when it makes no sense."""

    @property
    def sources_path(self) -> str | None:
        """Where such a worker tells on which sockets it publishes KV events; None when it has no way to tell."""

    def parse_sources(self, payload: Any, host: str) -> Sequence[EventSource]:
        """The sockets named in an answer to `sources_path`; empty when it publishes nothing.

        Args:
            payload: the answer's JSON, whatever it is.
            host: the worker's host, in place of wildcards.
        """

    @property
    def facts_path(self) -> str | None:
        """Where such a worker tells how large its KV cache is; None when it has no way to tell."""

    def parse_facts(self, body: bytes) -> CacheFacts:
        """What an answer to `facts_path` says; nothing known when it makes no sense."""

    def capability_facts(self, path: str, body: bytes, model: str) -> CapabilityFacts:
        """What an answer to `models_path` or `facts_path` says about what the worker can do. Never raises.

        Args:
            path: which of the two was asked.
            body: of an answer with status 200, whatever is in it.
            model: what the worker calls the model.
        """

    def token_questions(self, path: str, body: Mapping[str, Any]) -> Sequence[TokenQuestion]:
        """What to ask for the ids that such a worker makes of a request, the most faithful first; none when it can't tell.

        Nothing is generated for these. An answer is right, or the worker's own paths disagree: the caller leaves out
        requests that hold more than text.

        Args:
            path: of the request.
            body: its JSON, with the worker's own name for the model.
        """

    def generation_question(self, path: str, body: Mapping[str, Any]) -> TokenQuestion | None:
        """The request itself, with one token to generate, so that the answer names the ids it was made from; None: it can't."""

    def parse_tokens(self, payload: Any) -> "list[array[int]] | None":
        """The ids of each prompt (uint32) in an answer to one of those questions; None when it makes no sense."""
