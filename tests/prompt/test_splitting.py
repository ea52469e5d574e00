import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from gateway.prompt import splitting
from gateway.prompt.splitting import Splitter
from gateway.prompt.template import ChatTemplates
from gateway.prompt.tokenizer import PromptTokenizer

MANY = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
TEXTS = st.lists(
    st.sampled_from(["<s>", "<sx>", "<s", "<|l|>", "<|r|>", "ab<", "b", "a", " ", "  ", "\n", "x", "<", ">", "é", "e\u0301"]), max_size=14
).map("".join)  # fmt: skip


@MANY
@given(TEXTS)
def test_pieces_are_the_text_and_their_ids_are_the_ids_of_the_whole(odd_tokenizer, text):
    pieces = odd_tokenizer.split(text)
    assert "".join(pieces) == text
    whole = odd_tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    assert [token for piece in pieces for token in odd_tokenizer.encode(piece)] == whole


def test_every_shape_of_tokenizer_here_can_be_split(odd_tokenizer):
    assert odd_tokenizer.split("a<s>b<sx>a") == ["a", "<s>b", "<sx>a"]
    assert odd_tokenizer.split("a<|l|>b<|r|>a") == ["a<|l|>b<|r|>a"], "tokens that take spaces with them are no cuts"


@MANY
@given(
    st.lists(st.sampled_from(["<a", "<a>", "<ab", "<abc>", "a", "b", "<", ">", "c", "[x]"]), max_size=40).map("".join)
)
def test_the_longest_token_that_begins_leftmost_is_found(text):
    tokens = ["<a>", "<ab", "<abc>", "<a", "[x]"]
    splitter = Splitter(tokens, tokens)
    expected, position, start = [], 0, 0
    while position < len(text):
        found = max((token for token in tokens if text.startswith(token, position)), key=len, default="")
        if found:
            if position > start:
                expected.append(text[start:position])
            start = position
        position += len(found) or 1
    expected.append(text[start:])
    assert splitter.split(text) == expected


@pytest.mark.parametrize("shift", range(-12, 12))
def test_a_token_across_the_end_of_a_slice_is_found_once(shift, monkeypatch):
    monkeypatch.setattr(splitting, "SLICE", 64)
    splitter = Splitter(["<|im_start|>", "<|im"], ["<|im_start|>", "<|im"])
    text = ("x" * (64 + shift) + "<|im_start|>" + "y" * 3 + "<|im" + "_start") * 5
    short = Splitter(["<|im_start|>", "<|im"], ["<|im_start|>", "<|im"])
    monkeypatch.setattr(splitting, "SLICE", 10**9)
    wanted = short.split(text)
    monkeypatch.setattr(splitting, "SLICE", 64)
    assert splitter.split(text) == wanted
    assert sum(piece.startswith("<|im") for piece in wanted) == 10


def test_a_text_of_special_tokens_only_has_a_bounded_number_of_pieces():
    splitter = Splitter(["<s>"], ["<s>"])
    text = "<s>" * 50_000
    pieces = splitter.split(text)
    assert "".join(pieces) == text
    assert len(pieces) <= splitting.MAX_PIECES


def test_a_tokenizer_that_drops_merges_at_random_is_never_split(odd_tokenizer):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], dropout=0.5))
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    assert Splitter.create(tokenizer) is None


def test_tokens_that_a_normalizer_might_change_are_no_cuts_but_without_one_they_are():
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    def make(normalizer, contents):
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.normalizer = normalizer
        tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
        tokenizer.add_tokens([AddedToken(content, normalized=True) for content in contents])
        return PromptTokenizer(tokenizer, ChatTemplates({}), {})

    assert make(normalizers.Lowercase(), ["<User>"]).split("a<User>a<s>a") == ["a<User>a", "<s>a"]
    assert make(None, ["<User>"]).split("a<User>a<s>a") == ["a", "<User>a", "<s>a"]
    assert make(None, ["<s>x"]).split("a<s>x") == ["a", "<s>x"], "one that another one is a part of is no cut"


LETTERS = st.text("abc|", max_size=8)
OVERLAPPING = Splitter(["ab", "abc", "ca|", "a||"], ["ab", "abc", "ca|", "a||"])


@settings(max_examples=500, deadline=None)
@given(LETTERS, LETTERS)
def test_what_follows_a_text_that_no_token_reaches_over_changes_none_of_its_tokens(text, more):
    starts = OVERLAPPING._starts(text)
    if not OVERLAPPING.reaches_over(text):
        assert [start for start in OVERLAPPING._starts(text + more) if start < len(text)] == starts
    if not OVERLAPPING.begins_in(text):
        assert not starts
    assert OVERLAPPING.cuts_before(text) == (starts[:1] == [0])


@pytest.mark.parametrize(
    ("text", "over"),
    [("a", True), ("xab", True), ("xab|", False), ("ca", True), ("a|", True), ("b", False), ("", False)],
)
def test_a_token_reaches_over_a_text_that_ends_in_a_part_of_it(text, over):
    assert OVERLAPPING.reaches_over(text) is over
