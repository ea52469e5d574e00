"""Whether a chat template wants a message's content as one string or as a list of parts.

vLLM decides by the template's syntax tree (`vllm/renderers/hf.py`): a template that loops over a message's content
wants parts. The loop may be over ``message.content`` itself, over a variable named `content`, or over the parameter of
a macro that is called with the content; and `message` is whatever a loop over ``messages``, or over a variable that was
assigned from it, is called.
"""

from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]


def detect(tree: nodes.Template) -> ContentFormat:
    """The format that vLLM 0.32 detects for a template with this syntax tree."""
    messages = _aliases(tree, "messages")
    items = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in messages)
    }
    in_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        loops = list(macro.find_all(nodes.For))
        in_macros.update(id(loop) for loop in loops)
        parameters = _content_parameters(tree, macro, items)
        if any(isinstance(loop.iter, nodes.Name) and loop.iter.name in parameters for loop in loops):
            return "openai"
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, item, "content") for item in items):
            return "openai"
        if isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" and id(loop) not in in_macros:
            return "openai"
    return "string"


def _aliases(tree: nodes.Template, name: str) -> list[str]:
    """`name` and all variables that are assigned from it or from one another, however far away."""
    found = [name]
    for known in found:
        for assignment in tree.find_all(nodes.Assign):
            if (
                _reads(assignment.node, known)
                and isinstance(assignment.target, nodes.Name)
                and assignment.target.name not in found
            ):
                found.append(assignment.target.name)
    return found


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, items: set[str]) -> set[str]:
    """The parameters of `macro` that some call gives a message's content."""
    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(names, call.args, strict=False), *((pair.key, pair.value) for pair in call.kwargs)]
        found.update(
            name for name, value in given if name in names and any(_reads(value, item, "content") for item in items)
        )
    return found


def _reads(node: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """Whether `node` is `variable` (or ``variable.key``), perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _reads_name(node.node, variable)
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads_name(node.node, variable)


def _reads_name(node: nodes.Node, variable: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
