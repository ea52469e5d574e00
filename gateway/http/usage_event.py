r"""Taking out of a stream the one event that the worker sent only because the gateway asked for usage.

With ``stream_options.include_usage`` a worker sends one event more, right before ``data: [DONE]``: no choices, only usage. A client that did
not ask for it may stumble over it. Everything else must reach the client byte for byte and at once; when in doubt, the event passes.

What can't be undone: vLLM puts ``system_fingerprint`` into its last event, which is the usage event when there is one. A client whose usage
event is taken out does not see it.
"""

import re
from typing import Final

import orjson

from gateway.http.tail import chunk_payloads

_BLANK_LINE: Final = re.compile(rb"\n\r?\n")
_EMPTY_LINES: Final = re.compile(rb"(?:\r?\n)+")
_DONE: Final = b"data: [DONE]"
_TIGHT_DONE: Final = b"data:[DONE]"
_DONES: Final = (_DONE, _TIGHT_DONE)
_BEGINNING: Final = re.compile(rb"data:[ \t]*(?:\{|\Z)")
_CHOICE: Final = re.compile(rb'"choices"\s*:\s*\[\s*[^\]\s]')
_LONGEST: Final = 16 * 1024
"""Bytes of the longest usage event that is recognised, and so the most that is ever held back."""

_ORDINARY: Final = (b"}]}\n\n", b'"usage":null}\n\n')
_ORDINARY_CHUNK: Final = (b"}]}\n\n\r\n", b'"usage":null}\n\n\r\n')
"""How reads end whose last event can't be a usage event: with the end of its choices, or with a usage that is null."""


class UsageStripper:
    """Passes a stream of server-sent events on, without the usage event right before its ``[DONE]``.

    A read is held back only while its last event may be a usage event: as long as it is incomplete and shows no choice, or until what comes
    behind it shows whether it is the last one.

    The two faces may take turns within one stream, as the relay's do; what one has held back, the other gives out in its own framing.
    """

    __slots__ = ("_before", "_clear", "_held", "_judged", "removed")

    def __init__(self) -> None:
        self._held = b""
        # Length of the whole usage event that is held back; 0 when it is not known to be one.
        self._judged = 0
        # The last bytes that were passed on, when they are in the middle of an event; None between two events.
        self._before: bytes | None = None
        # Nothing is held back, and the next byte begins an event.
        self._clear = True
        self.removed = 0
        """Events taken out."""

    def body(self, data: bytes) -> bytes:
        """What is to be passed on of `data`, both without framing."""
        if self._clear and (data.endswith(_ORDINARY) or (data.endswith(b"\n\n") and b'"usage"' not in data)):
            return data
        return self._pass(data)

    def chunks(self, data: bytes) -> bytes:
        """What is to be passed on of `data`, both in whole chunks. Chunks from which nothing is taken stay as they are."""
        if self._clear and data.endswith(_ORDINARY_CHUNK):
            # Only an event before [DONE] is ever removed, and [DONE] is the last one: what other events this read holds does not matter.
            return data
        out: list[bytes] = []
        begin = 0
        for start, end in chunk_payloads(data):
            payload = data[start:end]
            passed = self.body(payload)
            if passed is payload:
                out.append(data[begin : end + 2])
            elif passed:
                out.append(b"%x\r\n%b\r\n" % (len(passed), passed))
            begin = end + 2
        return b"".join(out)

    def release(self) -> bytes:
        """What is held back, without framing: to be passed on at the end of the stream, and before anything is added to it."""
        held = self._held
        if held:
            self._held = b""
            self._judged = 0
            self._before = held[-2:]
        return held

    def _pass(self, data: bytes) -> bytes:
        """`body` without its short cuts; `data` itself when nothing was held back before or is now."""
        start = judged = 0
        if self._held:
            data = self._held + data
            self._held = b""
            judged, self._judged = self._judged, 0
        elif self._before is not None:
            seen = self._before + data
            blank = _BLANK_LINE.search(seen)
            if blank is None:
                self._before = seen[-2:]
                return data
            start = blank.end() - len(self._before)
            self._before = None
        while start < len(data):
            end, judged = judged, 0
            if not end:
                if empty := _EMPTY_LINES.match(data, start):
                    start = empty.end()
                    continue
                blank = _BLANK_LINE.search(data, start)
                if blank is None:
                    if _may_become_usage(data[start:]):
                        self._held = data[start:]
                        data = data[:start]
                    else:
                        # The beginning of an event is the beginning of a line: an empty one may have begun here.
                        self._before = (b"\n" + data[start:])[-2:]
                    break
                end = blank.end()
                if end - start > _LONGEST or not _is_usage(data[start : blank.start()]):
                    start = end
                    continue
            behind = data[end : end + len(_DONE)]
            if behind.startswith(_DONES):
                self.removed += 1
                data = data[:start] + data[end:]
            elif _DONE.startswith(behind) or _TIGHT_DONE.startswith(behind):
                self._held = data[start:]
                self._judged = end - start
                data = data[:start]
                break
            else:
                start = end
        self._clear = not self._held and self._before is None
        return data


def _may_become_usage(part: bytes) -> bool:
    """Whether `part` may be the beginning of a usage event. If an event is one, so is each of its beginnings."""
    if len(part) > _LONGEST:
        return False
    if not _BEGINNING.match(part):
        return b"data:".startswith(part)
    return not _CHOICE.search(part)


def _is_usage(event: bytes) -> bool:
    """Whether an event, without its blank line, has usage and no choices, in one line of data."""
    if b'"usage"' not in event or b"\n" in event or not _may_become_usage(event):
        return False
    try:
        document = orjson.loads(event[len(b"data:") :])
    except orjson.JSONDecodeError:
        return False
    return document.get("choices") == [] and isinstance(document.get("usage"), dict) and not event.endswith(b"}]}")
