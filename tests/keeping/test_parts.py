from hypothesis import given, settings
from hypothesis import strategies as st

from bench.keeping_model.parts import MARK_BYTES, MOST_PARTS, PART_BYTES, Parts


def chains(branches):
    """Prompts as lists of chained marks: equal beginnings have equal marks."""
    found = []
    for text in branches:
        marks, mark = [], 7
        for letter in text:
            mark = hash((mark, letter)) & ((1 << 60) - 1)
            marks.append(mark)
        found.append(marks)
    return found


def check(parts):
    total, children, seen = 0, {}, set()
    for part in parts:
        assert part.marks
        total += PART_BYTES + MARK_BYTES * len(part.marks)
        children[part.parent] = children.get(part.parent, 0) + 1
        assert part.start == (0 if part.parent is None else part.parent.start + len(part.parent.marks))
        assert part not in seen
        seen.add(part)
        assert part.parent not in seen, "the end of a prompt is forgotten before its beginning"
        assert all(parts._by_mark[mark] is part for mark in part.marks)
    for part in parts:
        assert part.children == children.get(part, 0)
        assert part.parent is None or part.parent in seen
    assert total == parts.bytes
    assert parts.marks == sum(len(part.marks) for part in parts)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=40), st.integers(2_000, 60_000))
def test_whatever_comes_the_tree_is_a_tree_within_its_bytes(texts, most):
    parts = Parts(most, 1)
    for marks in chains(texts):
        path, known = parts.path(marks)
        assert 0 <= known <= len(marks)
        assert [mark for part in reversed(path) for mark in part.marks] == marks
        check(parts)
        assert parts.bytes <= most or len(parts) == len(path)


@given(st.lists(st.text("ab", min_size=1, max_size=30), min_size=1, max_size=20))
def test_without_a_limit_what_is_known_is_the_longest_common_beginning(texts):
    parts = Parts(1 << 40, 1)
    before = []
    for marks in chains(texts):
        expected = max(
            (
                next((n for n, (a, b) in enumerate(zip(marks, old, strict=False)) if a != b), min(len(marks), len(old)))
                for old in before
            ),
            default=0,
        )
        assert parts.path(marks)[1] == expected
        before.append(marks)


def test_a_conversation_of_two_hundred_turns_has_few_parts():
    parts = Parts(1 << 40, 1)
    (marks,) = chains(["a" * 400])
    for turn in range(1, 201):
        path, known = parts.path(marks[: 2 * turn])
        assert known == 2 * turn - 2
        check(parts)
    assert len(path) <= MOST_PARTS + 1
