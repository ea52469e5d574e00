"""Who a request belongs to: from its API key to a tenant, and what that tenant may do.

Only `Tenants.of` sees a key, hashes it and forgets it. A request without a key that somebody has ends there, before its body
is read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from hmac import compare_digest
from math import ceil
from typing import TYPE_CHECKING, Final, NoReturn

from gateway.admission.keys import KeysError, digest, parse_hash, read_files
from gateway.admission.limits import NEVER, Account, Bucket, Refusal, in_words
from gateway.errors import GatewayError, Source

try:  # Python's own: OpenSSL's takes as long again to begin as it then takes for a key
    from _sha256 import sha256  # type: ignore[import-not-found]  # private, and in no stubs
except ImportError:  # it has another name since Python 3.12
    from hashlib import sha256

if TYPE_CHECKING:
    from gateway.config.schema import Config, Model
    from gateway.config.schema import Tenant as Section

Index = Mapping[bytes, tuple[bytes, str]]
"""Digest of a key → that digest and its tenant's name."""

_BEARER: Final = b"bearer "
_LABEL: Final = 12
_LINES: Final = b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n"
_REQUEST_LINES: Final = _LINES % ((b"requests",) * 3)
_TOKEN_LINES: Final = _LINES % ((b"tokens",) * 3)


class Tenant:
    """One tenant, as one configuration has it.

    Attributes:
        name: as the configuration calls it.
        label: stands for the name in whatever leaves this process: the first 12 hexadecimal digits of its SHA-256.
        models: names, of models and aliases, that it may use; see `may_use`.
        weight: its share beside other tenants' when requests have to wait.
        priority_ceiling: the smallest number, so the most urgent priority, that it may ask for.
        may_set: which of ``stage``, ``deadline``, ``priority`` and ``policy`` it may set by a header field.
        cache_salt: keeps its cached prefixes apart from others'; None: they are shared.
        account: what it has used and may still use.
        limits_tokens: whether it matters what an answer costs.
    """

    __slots__ = (
        "_patterns",
        "account",
        "cache_salt",
        "label",
        "limits_tokens",
        "may_set",
        "models",
        "name",
        "priority_ceiling",
        "weight",
    )

    def __init__(self, name: str, section: "Section", models: "Iterable[Model]", account: Account) -> None:
        """`models`: all that there are; `account`: already goes by the section's limits."""
        self.name = name
        self.label = sha256(name.encode()).hexdigest()[:_LABEL]
        # Only * and ? are special: names with brackets are names.
        self._patterns = [pattern.replace("[", "[[]") for pattern in section.models]
        self.models = frozenset(self._allowed(models))
        self.weight = section.weight
        self.priority_ceiling = section.priority_ceiling
        self.may_set = frozenset(section.may_set)
        self.cache_salt = section.cache_salt
        self.account = account
        self.limits_tokens = section.tokens_per_minute is not None

    def __repr__(self) -> str:
        return f"<Tenant {self.name}>"

    def may_use(self, name: str) -> bool:
        """Whether it may use what clients call by this name. Names of LoRA adapters come and go, and are judged by themselves."""
        return name in self.models or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def check_model(self, name: str) -> None:
        """Refuse a model that exists and that it may not use; `name` is what the client asked for.

        Raises:
            GatewayError: 403.
        """
        if not self.may_use(name):
            raise _forbidden(
                "model_not_allowed", "This API key may not use the model; GET /v1/models lists those it may.", "model"
            )

    def check_priority(self, priority: int) -> None:
        """Refuse a priority that is more urgent than it may ask for. Any other but 0 has to be allowed it, too.

        Raises:
            GatewayError: 403.
        """
        if priority < self.priority_ceiling or (priority != 0 and "priority" not in self.may_set):
            raise _forbidden("priority_not_allowed", "This API key may not ask for that priority.", "priority")

    def admit(self, now: float) -> None:
        """Let a request in, before its tokens are known. Each that comes in must be `done` once.

        Args:
            now: monotonic seconds.

        Raises:
            GatewayError: 429.
        """
        refusal = self.account.enter(now)
        if refusal is not None:
            self._refuse(refusal, 1, now)

    def charge(self, tokens: int, now: float) -> None:
        """Take the tokens of a prompt from what it may use.

        Raises:
            GatewayError: 429; nothing was taken.
        """
        refusal = self.account.charge(tokens, now)
        if refusal is not None:
            self._refuse(refusal, tokens, now)

    def done(self, charged: int, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A request that was admitted has ended; see `Account.leave`."""
        self.account.leave(charged, prompt_tokens, output_tokens, now)

    def lines(self, now: float) -> bytes:
        """Header lines for an answer: limits, what is left of them and when they are whole again, as OpenAI has them. Empty without limits."""
        account = self.account
        lines = b""
        if (requests := account.requests) is not None:
            lines = _REQUEST_LINES % _standing(requests, now)
        if (tokens := account.tokens) is not None:
            lines += _TOKEN_LINES % _standing(tokens, now)
        return lines

    @staticmethod
    def header_not_allowed() -> GatewayError:
        """403, for a header field that it may not set."""
        return _forbidden(
            "header_not_allowed", "This API key may not set one of the request's x-warmroute fields.", None
        )

    def _allowed(self, models: "Iterable[Model]") -> Iterator[str]:
        """The names that one of the patterns allows; a model's own name stands for its aliases."""
        for model in models:
            whole = any(fnmatchcase(model.name, pattern) for pattern in self._patterns)
            for name in (model.name, *model.aliases):
                if whole or any(fnmatchcase(name, pattern) for pattern in self._patterns):
                    yield name

    def _refuse(self, refusal: Refusal, wanted: int, now: float) -> NoReturn:
        limit, wait = refusal
        lines = self.lines(now)
        retry_after = None
        if limit == "concurrency":
            message = f"Rate limit reached on requests at once: {self.account.concurrency} are under way."
        elif wait == NEVER:
            # OpenAI's and Anthropic's clients try again by themselves unless told not to.
            lines += b"x-should-retry: false\r\n"
            message = f"Request too large: {wanted} tokens are more than may be used at once."
        else:
            message = f"Rate limit reached on {limit} per minute; try again in {in_words(wait)}."
        if wait != NEVER:
            retry_after = max(1, ceil(wait))
            lines += b"retry-after-ms: %d\r\n" % ceil(wait * 1000)
        raise GatewayError(
            429,
            f"rate_limit_{limit}",
            message,
            source=Source.CLIENT,
            api_type="tokens" if limit == "tokens" else "requests",
            code="rate_limit_exceeded",
            retry_after=retry_after,
            lines=lines,
        )


class Tenants:
    """The tenants of one configuration, by key.

    Attributes:
        by_name: all of them.
    """

    __slots__ = ("_by_key", "by_name")

    def __init__(self, config: "Config", index: Index, before: "Tenants | None", now: float) -> None:
        """Never fails, so that a reload may come here last.

        Args:
            config: with at least one tenant.
            index: of its keys, as of `index_of`.
            before: the tenants until now, whose accounts go on.
            now: monotonic seconds.
        """
        accounts = {name: tenant.account for name, tenant in before.by_name.items()} if before is not None else {}
        self.by_name: dict[str, Tenant] = {}
        for name, section in config.tenants.items():
            account = accounts.get(name) or Account()
            account.configure(section, now)
            self.by_name[name] = Tenant(name, section, config.models, account)
        self.use(index)

    def of(self, credentials: Sequence[bytes], asked: Sequence[str] = ()) -> Tenant:
        """The tenant whose key a request brings.

        Args:
            credentials: values of its ``Authorization`` fields, and those of ``x-api-key`` with ``Bearer`` before them.
            asked: what it sets by header fields, as `Tenant.may_set` calls them.

        Raises:
            GatewayError: 401 without a key, with a wrong one or with several; 403 for what this key may not set.
        """
        if len(credentials) != 1 and len(set(credentials)) != 1:
            raise _unauthorized(missing=not credentials)
        value = credentials[0]
        if value[:7].lower() != _BEARER:
            raise _unauthorized()
        given = sha256(value[7:].strip()).digest()
        found = self._by_key.get(given)
        # Whoever times the look-up learns something of a hash at most, from which there is no way back to a key.
        if found is None or not compare_digest(found[0], given):
            raise _unauthorized()
        tenant = found[1]
        if asked and not tenant.may_set.issuperset(asked):
            raise tenant.header_not_allowed()
        return tenant

    def use(self, index: Index) -> None:
        """Go by other keys of the same tenants from now on."""
        self._by_key = {key: (digest, self.by_name[name]) for key, (digest, name) in index.items()}


def _standing(bucket: Bucket, now: float) -> tuple[int, int, bytes]:
    """Units a minute, whole units that are there, and how long until the bucket is full."""
    level = bucket.level(now)
    return bucket.limit, int(level) if level > 0 else 0, in_words((bucket.capacity - level) / bucket.rate).encode()


def index_of(tenants: "Mapping[str, Section]", files: Mapping[str, frozenset[bytes]] | None = None) -> Index:
    """All keys. Blocks, unless `files` has the digests in each tenant's `keys_file` already.

    Raises:
        KeysError: a file can't be used, or two tenants have the same key.
    """
    if files is None:
        files = read_files(key_files(tenants))
    index: dict[bytes, tuple[bytes, str]] = {}
    for name, section in tenants.items():
        for one in _digests(section, files):
            owner = index.setdefault(one, (one, name))[1]
            if owner != name:
                raise KeysError(f"{section.keys_file or name}: tenants {owner} and {name} have the same key")
    return index


def key_files(tenants: "Mapping[str, Section]") -> list[str]:
    """The paths of the files of keys."""
    return sorted({section.keys_file for section in tenants.values() if section.keys_file is not None})


def _digests(section: "Section", files: Mapping[str, frozenset[bytes]]) -> Iterator[bytes]:
    for text in section.keys:
        one = parse_hash(text)
        if one is not None:
            yield one
    if section.key is not None:
        yield digest(section.key.encode())
    if section.keys_file is not None:
        yield from files[section.keys_file]


def _unauthorized(*, missing: bool = False) -> GatewayError:
    return GatewayError(
        401,
        "missing_api_key" if missing else "invalid_api_key",
        "No API key was given; send it as `Authorization: Bearer KEY` or as `x-api-key`."
        if missing
        else "The API key is not a valid one.",
        source=Source.CLIENT,
        api_type="invalid_request_error",
        code="invalid_api_key",
        lines=b"www-authenticate: Bearer\r\n",
    )


def _forbidden(error_type: str, message: str, param: str | None) -> GatewayError:
    return GatewayError(403, error_type, message, source=Source.CLIENT, code=error_type, param=param)
