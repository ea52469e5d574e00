"""From YAML text to a tree in which every key and value knows its line and column.

YAML's own guesses are not used: no scalar becomes a boolean, a date or a base-60 number because of how it looks. A scalar
stays text until `gateway.config.walk` knows which type is wanted there. Tags, merge keys and a second document are refused.
"""

import re
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field

import yaml

from gateway.config.problems import NOWHERE, Mark, Where, clip

MAX_BYTES = 8 << 20
"""A file above this is a mistake; 1,000 workers with all their capabilities are half a MiB."""
MAX_NODES = 100_000
"""Values after aliases are followed: what an alias bomb runs into. 1,000 workers with everything are 15,000."""
MAX_DEPTH = 40

_DEFAULT_TAGS = frozenset({"tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"})
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SECRET_KEY = re.compile(
    r"""((?:api_?key|apikey|authorization|password|secret|token)["']?\s*[:=]\s*)(["']?)((?!\$\{)[^\s"'][^"',}]*)""",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(://)([^/\s@\"']+)(?=@)")
_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{[^}]*\}?")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """libyaml where it is (20 times faster), without implicit types."""

    yaml_implicit_resolvers: MappingType[str, object] = {}


@dataclass(slots=True)
class Scalar:
    """One scalar.

    Attributes:
        text: what was written, with variables put in.
        mark: where it begins.
        plain: written without quotes, so it may stand for a number, a boolean or nothing.
        written: what to show in messages: the text before variables were put in (their values may be secret).
        end: the place behind its last character.
    """

    text: str
    mark: Mark
    end: Mark
    plain: bool
    written: str

    @property
    def substituted(self) -> bool:
        """Whether a variable was put in."""
        return self.text != self.written


@dataclass(slots=True)
class Unusable:
    """What has been complained about already."""

    mark: Mark


@dataclass(slots=True)
class Sequence:
    """A list."""

    items: list["Node"]
    mark: Mark


@dataclass(slots=True)
class Mapping:
    """A mapping, with each key's own place."""

    entries: dict[str, "Node"]
    keys: dict[str, Mark]
    mark: Mark


Node = Scalar | Sequence | Mapping | Unusable


@dataclass(slots=True)
class Complaint:
    """A problem before it has a file and an excerpt."""

    mark: Mark
    where: Where
    message: str


@dataclass(slots=True)
class Source:
    """The text of a file and what was found wrong with it so far.

    Attributes:
        name: the file's name as the user gave it.
        text: its whole text.
        environ: where variables come from.
        complaints: in the order of finding.
        masked: the scalars that no excerpt may show.
    """

    name: str
    text: str
    environ: MappingType[str, str]
    complaints: list[Complaint] = field(default_factory=list)
    masked: list[Scalar] = field(default_factory=list)
    _nodes: int = 0
    _lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._lines = self.text.splitlines()

    def complain(self, mark: Mark, where: Where, message: str) -> None:
        """Take a problem down."""
        self.complaints.append(Complaint(mark, where, message))

    def parse(self) -> Node | None:
        """The tree, or None when the text is no YAML or nothing; what is wrong is in `complaints`."""
        if not self._is_readable():
            return None
        try:
            root = yaml.compose(self.text, _Loader)
        except yaml.MarkedYAMLError as error:
            self._complain_about_syntax(error)
            return None
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            self.complain(NOWHERE, (), f"cannot be read as YAML: {clip(str(error), 200)}")
            return None
        if root is None:
            self.complain(
                Mark(1, 1), (), "the file is empty; the least it needs is `models:` with one model and its workers"
            )
            return None
        return self._convert(root, (), [])

    def excerpt(self, line: int) -> str | None:
        """Line `line` (from 1) with secrets masked, or None when there is no such line."""
        if not 1 <= line <= len(self._lines):
            return None
        shown = self._lines[line - 1]
        for secret in self.masked:
            if secret.mark.line <= line <= secret.end.line:
                start = secret.mark.column - 1 if line == secret.mark.line else 0
                stop = min(secret.end.column - 1, len(shown)) if line == secret.end.line else len(shown)
                shown = shown[:start] + "*" * (stop - start) + shown[stop:]
        shown = _URL_USER.sub(lambda match: match[1] + "*" * len(match[2]), shown)
        return _SECRET_KEY.sub(lambda match: match[1] + match[2] + "*" * len(match[3]), shown)

    def _is_readable(self) -> bool:
        found = _UNPRINTABLE.search(self.text)
        if found is None:
            return True
        before = self.text[: found.start()].splitlines(keepends=True) or [""]
        if before[-1].endswith(("\n", "\r", "\x85", "\u2028", "\u2029")):
            before.append("")
        mark = Mark(len(before), len(before[-1]) + 1)
        self.complain(mark, (), f"the character U+{ord(found[0]):04X} cannot stand in YAML; remove it")
        return False

    def _complain_about_syntax(self, error: yaml.MarkedYAMLError) -> None:
        at = error.problem_mark or error.context_mark
        mark = Mark(at.line + 1, at.column + 1) if at else NOWHERE
        line = self._lines[mark.line - 1] if 1 <= mark.line <= len(self._lines) else ""
        message = f"not valid YAML: {error.problem or error.context}"
        if error.context and error.context_mark and error.problem and error.context_mark.line + 1 != mark.line:
            message += f" ({error.context} that begins in line {error.context_mark.line + 1})"
        if "\t" in line[: mark.column] and not line[: mark.column - 1].strip():
            message = "a tab cannot indent YAML; use spaces"
        elif "nesting depth" in message:
            message = f"nested too deeply; at most {MAX_DEPTH} levels are read"
        elif "${" in line:
            message += '; inside { } or [ ] a variable must be in quotes: "${NAME}"'
        elif "mapping values are not allowed" in message:
            message += "; check the indentation here and in the line before, and put text that has `: ` in it in quotes"
        elif "single document" in message or "another document" in message:
            message = "a second document begins here; remove the `---` and what follows"
        elif "alias" in message:
            message += "; an alias `*name` needs its anchor `&name` before it; if a literal * is meant, use quotes"
        elif "cannot start any token" in message:
            message += f"; put text that begins with `{line[mark.column - 1 : mark.column]}` in quotes"
        elif "quoted scalar" in message:
            message += "; a closing quote is missing"
        else:
            message += "; check brackets, quotes and the indentation around this line"
        self.complain(mark, (), message)

    def _convert(self, node: yaml.Node, where: Where, parents: list[yaml.Node]) -> Node:
        """Our tree for a YAML node."""
        mark = _mark(node)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            if self._nodes == MAX_NODES + 1:
                self.complain(
                    mark, where, f"more than {MAX_NODES:,} values once aliases are followed; use fewer aliases"
                )
            return Unusable(mark)
        if any(parent is node for parent in parents):
            self.complain(mark, where, "an alias that contains itself; write the value out")
            return Unusable(mark)
        if len(parents) >= MAX_DEPTH:
            self.complain(mark, where, f"nested too deeply; at most {MAX_DEPTH} levels are read")
            return Unusable(mark)
        if node.tag not in _DEFAULT_TAGS:
            self.complain(mark, where, f"the tag `{clip(node.tag)}` is not understood here; remove it")
            return Unusable(mark)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, mark, where)
        inside = [*parents, node]
        if isinstance(node, yaml.SequenceNode):
            items = [self._convert(item, (*where, index), inside) for index, item in enumerate(node.value)]
            return Sequence(items, mark)
        assert isinstance(node, yaml.MappingNode)
        return self._mapping(node, mark, where, inside)

    def _mapping(self, node: yaml.MappingNode, mark: Mark, where: Where, inside: list[yaml.Node]) -> Mapping:
        mapping = Mapping({}, {}, mark)
        for key_node, value_node in node.value:
            key_mark = _mark(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _DEFAULT_TAGS:
                self.complain(key_mark, where, "a key must be plain text")
                continue
            key = key_node.value
            if key == "<<" and not key_node.style:
                self.complain(
                    key_mark, where, "merge keys `<<` are not read; write the keys out or alias a whole section"
                )
                continue
            if key in mapping.keys:
                first = mapping.keys[key].line
                self.complain(key_mark, (*where, key), f"given twice (first in line {first}); remove one of the two")
                continue
            mapping.keys[key] = key_mark
            mapping.entries[key] = self._convert(value_node, (*where, key), inside)
        return mapping

    def _scalar(self, node: yaml.ScalarNode, mark: Mark, where: Where) -> Scalar | Unusable:
        written = node.value
        end = Mark(node.end_mark.line + 1, node.end_mark.column + 1)
        if "${" not in written:
            return Scalar(written, mark, end, plain=not node.style, written=written)
        failed = False

        def put_in(match: re.Match[str]) -> str:
            nonlocal failed
            if match[0] == "$${":
                return "${"
            name, default = match[1], match[2]
            if name is None:
                failed = True
                self.complain(
                    self._find(match[0], node, mark),
                    where,
                    f"`{clip(match[0])}` is no variable; write ${{NAME}} or ${{NAME:-default}}, or $${{ for a literal ${{",
                )
                return ""
            value = self.environ.get(name)
            if default is not None:
                return value or default
            if value is None:
                failed = True
                self.complain(
                    self._find(match[0], node, mark),
                    where,
                    f"the environment variable {name} is not set{did_you_mean_variable(name, self.environ)}; "
                    f"set it, or give a default: ${{{name}:-default}}",
                )
                return ""
            return value

        text = _VARIABLE.sub(put_in, written)
        return Unusable(mark) if failed else Scalar(text, mark, end, plain=not node.style, written=written)

    def _find(self, piece: str, node: yaml.ScalarNode, mark: Mark) -> Mark:
        """Where `piece` stands inside a scalar; the scalar's own mark when it cannot be found (escapes, folding)."""
        for offset, line in enumerate(self._lines[mark.line - 1 : node.end_mark.line + 1]):
            column = line.find(piece, mark.column - 1 if offset == 0 else 0)
            if column >= 0:
                return Mark(mark.line + offset, column + 1)
        return mark


def did_you_mean_variable(name: str, environ: MappingType[str, str]) -> str:
    """A hint at a variable that is set under nearly the same name: other case, or with the prefix ``WARMROUTE_``."""
    for other in (name.upper(), name.lower(), f"WARMROUTE_{name}"):
        if other != name and other in environ:
            return f" ({other} is)"
    return ""


def _mark(node: yaml.Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)
