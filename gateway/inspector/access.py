"""Who may use the inspector's API, and from which pages.

There are two ways in: the token itself as ``Authorization: Bearer``, for programs, and a cookie that a page gets for the token,
for browsers. A cookie is sent along by other sites' pages too, so whatever changes something also has to come from this origin.
"""

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from aiohttp import web

    from gateway.config.schema import Admin

COOKIE: Final = "warmroute_admin"
SESSION: Final = 12 * 3600.0
"""Seconds that a login lasts."""
_SHORTEST: Final = 16


class Access:
    """Decides about requests to one listener.

    Attributes:
        token: what is asked for; None: nothing is.
        closed: there is no token and the listener is not on loopback: nobody may.
    """

    def __init__(self, host: str, token: str | None) -> None:
        """`host`: that the listener is bound to."""
        self.token = token
        self.closed = token is None and not is_loopback(host)

    @classmethod
    def from_config(cls, section: "Admin") -> "Access":
        """What the configuration wants.

        Raises:
            OSError: the token's file can't be read, or holds no usable token.
        """
        token = section.token
        if section.token_file is not None:
            token = Path(section.token_file).read_text(encoding="utf-8").strip()
            if len(token) < _SHORTEST:
                raise OSError(f"{section.token_file}: a token of at least {_SHORTEST} characters is expected")
        return cls(section.host, token)

    def admits(self, request: "web.Request") -> bool:
        """Whether it carries the token, or a cookie that was given for it."""
        if self.token is None:
            return not self.closed
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.knows(given.strip()):
            return True
        return self._valid(request.cookies.get(COOKIE, ""), time.time())

    def knows(self, token: str) -> bool:
        """Whether this is the token; takes as long whatever is wrong with it."""
        return self.token is not None and hmac.compare_digest(_bytes(token), _bytes(self.token))

    def session(self) -> str:
        """A cookie's value, good for `SESSION` seconds. It says nothing about the token and does not outlive it."""
        until = str(int(time.time() + SESSION))
        return f"{until}.{self._signature(until)}"

    def _valid(self, value: str, now: float) -> bool:
        until, _, signature = value.partition(".")
        if not (until.isascii() and until.isdigit() and len(until) < 16):
            return False
        return hmac.compare_digest(_bytes(signature), _bytes(self._signature(until))) and int(until) > now

    def _signature(self, until: str) -> str:
        assert self.token is not None
        return hmac.new(self.token.encode(), b"warmroute session " + until.encode(), hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    """What a header held: bytes that are no text come as surrogates."""
    return text.encode("utf-8", "surrogateescape")


def same_origin(request: "web.Request") -> bool:
    """Whether a request comes from a page of this listener, or from no page at all.

    Browsers name the page's origin with every POST; programs do not. An origin that is not ours, and one that is hidden
    (``null``), are refused.
    """
    if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        return False
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower() != ""


def host_allowed(hosts: Sequence[str], bound: str) -> bool:
    """Whether a request's Host fields are what a listener on `bound` may answer to.

    A page on the web can make its own name resolve to 127.0.0.1 and then read what a loopback listener says (DNS
    rebinding); its requests carry that name. So a loopback listener answers only to loopback's names, another one to
    any one Host, as it is reached by names that we cannot know.
    """
    if len(hosts) > 1:
        return False
    if not is_loopback(bound):
        return True
    if not hosts:
        return False
    try:
        name = urlsplit(f"//{hosts[0]}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name.rstrip("."))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is bound to `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
