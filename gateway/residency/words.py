"""What a client itself has said about caching, whatever the API it said it in. Read from bodies by `gateway.residency.client_words`."""

import msgspec


class ClientWords(msgspec.Struct, frozen=True, gc=False):
    """One request's.

    Attributes:
        breakpoints: ``(token_stop, ttl_seconds)``, rising: the prompt up to there is to be kept for so long.
        key: requests with the same one share a prefix (OpenAI's `prompt_cache_key`).
        retention_seconds: the whole prompt is to be kept for so long; None: nothing was said.
        session_end: this is the last request of its conversation.
    """

    breakpoints: tuple[tuple[int, float], ...] = ()
    key: str | None = None
    retention_seconds: float | None = None
    session_end: bool = False
