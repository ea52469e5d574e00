"""Tokenizers by name: a local directory, or a repository on the Hugging Face Hub pinned to a revision."""

import re
from pathlib import Path

from gateway.prompt.tokenizer import PromptTokenizer, TokenizerError

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")

_PATTERNS = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]


def load(source: str, cache: str | None = None) -> PromptTokenizer:
    """The tokenizer that a configuration names.

    Args:
        source: a directory, or ``owner/name@revision`` on the Hub. The revision may be a branch, a tag or (best: it
            never changes) a commit; without one it is ``main``.
        cache: where downloads are kept; None for Hugging Face's own place.

    Raises:
        TokenizerError: there is no such directory, the Hub cannot be reached and the cache has nothing, or the files
            are not understood.
    """
    if Path(source).is_dir():
        return PromptTokenizer.from_directory(source)
    repository, _, revision = source.partition("@")
    if not _REPOSITORY.fullmatch(repository) or Path(source).is_absolute():
        raise TokenizerError(f"{source}: no such directory (and not the owner/name of a repository)")
    return PromptTokenizer.from_directory(fetch(repository, revision or "main", cache))


def fetch(repository: str, revision: str, cache: str | None = None) -> Path:
    """Bring a repository's tokenizer files into the cache, and return the directory that holds them.

    A commit that is cached already is used without asking the Hub.

    Raises:
        TokenizerError: the Hub cannot be reached or does not have it, and the cache does not either.
    """
    # Imported here: it pulls in an HTTP stack that a gateway with local tokenizers never needs.
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    is_commit = re.fullmatch(r"[0-9a-f]{40}", revision) is not None
    failure: Exception | None = None
    for offline in (True, False) if is_commit else (False, True):
        try:
            directory = Path(
                snapshot_download(
                    repository, revision=revision, cache_dir=cache, allow_patterns=_PATTERNS, local_files_only=offline
                )
            )
        except Exception as error:  # noqa: BLE001  # the client raises its own, its HTTP library's and OS errors
            failure = failure or error
            continue
        if (directory / "tokenizer.json").is_file():
            return directory
        failure = failure or TokenizerError("it has no tokenizer.json")
    raise TokenizerError(
        f"{repository}@{revision}: neither on the Hugging Face Hub nor in the cache ({failure}). "
        "Download it once where there is a network, or give a local directory."
    ) from failure
