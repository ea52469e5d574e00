"""The inspector's page: files read once, served as they are. They hold no data, so they need no token."""

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from aiohttp import web

_TYPES: Final[Mapping[str, str]] = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The page loads nothing from elsewhere, has no inline script or style, and can't turn text into markup."""


class Pages:
    """All files of the page by URL path."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, str, str]] = {}
        root = files("gateway.inspector") / "static"
        self._read(root, "/static")
        self._files["/"] = self._files["/static/index.html"]

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Register a route for each."""
        for path in self._files:
            router.add_get(path, self._serve)

    async def _serve(self, request: web.Request) -> web.Response:
        body, content_type, tag = self._files[request.path]
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)

    def _read(self, folder: Traversable, path: str) -> None:
        for each in folder.iterdir():
            if each.is_dir():
                self._read(each, f"{path}/{each.name}")
            elif (content_type := _TYPES.get(each.name.rpartition(".")[2])) is not None:
                body = each.read_bytes()
                tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
                self._files[f"{path}/{each.name}"] = body, content_type, tag
