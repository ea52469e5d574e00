"""What is wrong with a configuration file, said so that it can be put right: place, expectation, nearest name, remedy."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Where = tuple[str | int, ...]
"""The way to a value from the top of the file: keys and list indexes."""

_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SEPARATORS = re.compile(r"[-_ .]")
_EXCERPT_WIDTH = 100

MAX_SHOWN = 100
"""Problems of one file that are written out: one mistake copied to 1,000 workers is no more than that."""


class Mark(NamedTuple):
    """A place in the file; both count from 1, columns in characters."""

    line: int
    column: int


NOWHERE = Mark(0, 0)
"""The mark of a problem with the file as a whole."""


class Problem(NamedTuple):
    """One complaint.

    Attributes:
        file: the file's name as the user gave it.
        mark: where; `NOWHERE` when the file as a whole is meant.
        path: the value's path, as `format_path` writes it; may be empty.
        message: what is wrong, what was expected, and what to do.
        excerpt: the line of the file with secrets masked, or None.
    """

    file: str
    mark: Mark
    path: str
    message: str
    excerpt: str | None = None

    def __str__(self) -> str:
        place = self.file if self.mark == NOWHERE else f"{self.file}:{self.mark.line}:{self.mark.column}"
        head = f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"
        if self.excerpt is None:
            return head
        shown, caret = _window(self.excerpt, self.mark.column - 1)
        number = f"{self.mark.line:>5}"
        return f"{head}\n{number} | {shown}\n{' ' * len(number)} | {caret}"


class ConfigError(Exception):
    """A configuration that cannot be used, with everything that is wrong with it in the order of its lines."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(problems, key=lambda problem: problem.mark)
        super().__init__(self.problems)

    def __str__(self) -> str:
        shown = [str(problem) for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            shown.append(f"... and {len(self.problems) - MAX_SHOWN:,} more")
        return "\n".join(shown)


def format_path(where: Where) -> str:
    """``("models", 0, "url")`` as ``models[0].url``; keys that are no plain words are quoted in brackets."""
    path = ""
    for step in where:
        if isinstance(step, int):
            path += f"[{step}]"
        elif _BARE_KEY.fullmatch(step):
            path += f".{step}" if path else step
        else:
            path += f'["{clip(step)}"]'
    return path


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` most probably should be, or None; case, dashes and underscores count for little."""
    by_folded = {_fold(name): name for name in sorted(known, reverse=True)}
    found = difflib.get_close_matches(_fold(word)[:100], by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean `x`?`` for the nearest known name, else nothing."""
    name = nearest(word, known)
    return f"; did you mean `{name}`?" if name else ""


def choices(names: Iterable[str]) -> str:
    """Names in the order of the alphabet, for the end of a message."""
    return ", ".join(sorted(names))


def clip(text: str, length: int = 60) -> str:
    """A user's text fit for one line of a message: printable and not too long."""
    printable = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[: length + 1])
    return printable if len(text) <= length else f"{printable[: length - 3]}..."


def listed(items: Sequence[str], conjunction: str = "or") -> str:
    """``a, b or c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {conjunction} {items[-1]}"


def _fold(word: str) -> str:
    return _SEPARATORS.sub("", word).lower()


def _window(line: str, column: int) -> tuple[str, str]:
    """A piece of a long line around `column` (from 0), and the line below it with a caret."""
    start = max(0, min(column - _EXCERPT_WIDTH // 2, len(line) - _EXCERPT_WIDTH))
    shown = line[start : start + _EXCERPT_WIDTH].replace("\t", " ")
    return shown, " " * (column - start) + "^"
