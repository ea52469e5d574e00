"""A client of the admin API for commands: asks, and says in a sentence what went wrong."""

import json
import os
import urllib.error
import urllib.request
from typing import Any, Final

TOKEN: Final = "WARMROUTE_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
"""The variable that holds the token, where one is asked for."""
_TIMEOUT: Final = 10.0
_EXPLAIN_TIMEOUT: Final = 60.0


class AdminError(Exception):
    """The gateway did not answer, or refused; the message says why."""


class AdminClient:
    """Blocks while it asks."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """`url` of the admin listener; the token is taken from `TOKEN` unless given.

        Raises:
            AdminError: the URL is none.
        """
        if not url.startswith(("http://", "https://")):
            raise AdminError(f"{url}: the address must begin with http:// or https://")
        self._url = url.rstrip("/")
        self._token = token or os.environ.get(TOKEN)

    def get(self, path: str) -> dict[str, Any]:
        """The document at `path`.

        Raises:
            AdminError: there is none.
        """
        return self._ask(urllib.request.Request(f"{self._url}{path}"), _TIMEOUT)  # noqa: S310 - see above

    def post(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """The answer to `document`.

        Raises:
            AdminError: there is none.
        """
        request = urllib.request.Request(  # noqa: S310 - see above
            f"{self._url}{path}", json.dumps(document).encode(), {"content-type": "application/json"}
        )
        return self._ask(request, _EXPLAIN_TIMEOUT)

    def _ask(self, request: urllib.request.Request, timeout: float) -> dict[str, Any]:
        if self._token is not None:
            request.add_header("authorization", f"Bearer {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310 - see above
                document = json.load(response)
        except urllib.error.HTTPError as error:
            raise AdminError(f"{self._url}: {_refusal(error)}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise AdminError(f"{self._url} does not answer: {reason}") from error
        if not isinstance(document, dict):
            raise AdminError(f"{self._url}: this is no admin listener of warmroute")
        return document


def _refusal(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return f"a token is needed: put it into the variable {TOKEN}"
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"
