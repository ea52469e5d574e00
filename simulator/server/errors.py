"""What goes wrong with a request, in the shapes that vLLM answers with."""

from typing import Any

import orjson


class ApiError(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: HTTP status, 400 to 599; also the `code` of the body.
        message: what the client reads.
        error_type: vLLM's name for the kind of error, e.g. ``BadRequestError``.
        param: the field of the body that is wrong, or None.
    """

    def __init__(self, status: int, message: str, *, error_type: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type
        self.param = param

    def body(self) -> bytes:
        """The JSON body in OpenAI's shape."""
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.error_type,
                    "param": self.param,
                    "code": self.status,
                }
            }
        )

    def anthropic_body(self) -> bytes:
        """The JSON body in Anthropic's shape; what validation finds keeps OpenAI's, as vLLM has it."""
        if self.error_type == "Bad Request":
            return self.body()
        return orjson.dumps({"type": "error", "error": {"type": self.error_type, "message": self.message}})


def bad_request(message: str, param: str | None = None, value: Any = None) -> ApiError:
    """A 400 for a value that is well-formed but wrong, with vLLM's note of the parameter at the end."""
    if param is not None:
        message += f" (parameter={param})" if value is None else f" (parameter={param}, value={value})"
    return ApiError(400, message, error_type="BadRequestError", param=param)


def unknown_model(name: object, served: tuple[str, ...]) -> ApiError:
    """A 404 for a model that is not served here."""
    message = f"The model `{name}` does not exist. Valid aliases: {', '.join(served)}."
    return ApiError(404, message, error_type="NotFoundError", param="model")


def too_long(tokens: int, limit: int, *, at_least: bool) -> ApiError:
    """A 400 for a prompt of `tokens` that leaves no room for output under `limit`.

    With `at_least` (texts, which vLLM cuts one token above the limit before it counts) the count is a lower bound.
    """
    count = f"at least {limit + 1}" if at_least else str(tokens)
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {count} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
    )
    return bad_request(message, "input_tokens", limit + 1 if at_least else tokens)


def internal_error(message: str) -> ApiError:
    """A 500 for a failure inside the engine."""
    return ApiError(500, message, error_type="InternalServerError")


class Violations:
    """Collects what is wrong with a body's fields and reports all of it at once, as vLLM's validation does."""

    __slots__ = ("_first", "_found")

    def __init__(self) -> None:
        self._found: list[dict[str, Any]] = []
        self._first: str | None = None

    def add(self, kind: str, location: str, message: str, value: object) -> None:
        """Note one violation: pydantic's name for it, the dotted path, what was expected, what was found."""
        self._first = self._first or location
        self._found.append({"type": kind, "loc": location, "msg": message, "input": summary(value)})

    def raise_if_any(self) -> None:
        """Raise one `ApiError` for everything found so far.

        Raises:
            ApiError: at least one violation was added.
        """
        if not self._found:
            return
        count = len(self._found)
        lines = "\n".join(f"  {violation}" for violation in self._found)
        message = f"{count} validation error{'s' if count > 1 else ''}:\n{lines}"
        raise ApiError(400, message, error_type="Bad Request", param=self._first)


def summary(value: object) -> str:
    """A short stand-in for a value in an error message: never the whole of a large body."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)[:200]
