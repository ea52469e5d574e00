import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from gateway.prompt.words import MAX_CHARACTERS, Words

ASCII = st.text(st.characters(max_codepoint=127), max_size=80)
TRICKY = st.lists(
    st.sampled_from(
        [
            "'s",
            "'LL",
            " ",
            "  ",
            "\n",
            "\r\n",
            "\t",
            "\x1c",
            "\x0b",
            "\x85",
            "a",
            "Zz",
            "0",
            "12",
            "!",
            " ?",
            "\x7f",
            "_",
        ]
    ),
    max_size=30,
)

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip


def made(pattern, **changes):
    """A byte-level tokenizer whose merges show where words end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("a", "a"),
        ("Ġ", "a"),
        ("Ġ", "Ġ"),
        ("Ċ", "Ċ"),
        ("'", "s"),
        ("0", "0"),
        ("!", "!"),
        ("Z", "z"),
        ("č", "Ċ"),
        ("a", "Ġ"),
    ]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = changes.get("normalizer", normalizers.NFC())
    tokenizer.pre_tokenizer = changes.get("pre_tokenizer") or pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), changes.get("behavior", "isolated")),
            pre_tokenizers.ByteLevel(add_prefix_space=changes.get("space", False), use_regex=False),
        ]
    )
    return tokenizer


@pytest.fixture(scope="module", params=["llama3", "o200k", "qwen3"])
def pair(request, qwen3):
    tokenizer = (
        qwen3._tokenizer if request.param == "qwen3" else made({"llama3": LLAMA3, "o200k": O200K}[request.param])
    )
    words = Words.create(tokenizer)
    assert words is not None
    return words, tokenizer


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ASCII | TRICKY.map("".join).filter(str.isascii))
def test_the_ids_of_any_ascii_text_are_those_of_the_library(pair, text):
    words, tokenizer = pair
    assert words.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "pattern", [rf"\p{{L}}+(?: \p{{N}}+)*|{LLAMA3}", rf"\p{{L}} |{LLAMA3}", r"\p{L}+ ?|\p{N}|\s+|."]
)
def test_a_pattern_whose_words_may_hold_spaces_is_followed_all_the_same(pattern):
    tokenizer = made(pattern)
    words = Words.create(tokenizer)
    assert words is not None
    for text in ("a 0", "a 0 a", "aa 00 0 a", "a  a Zz 00 a", "aa! a 0"):
        assert words.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "tokenizer",
    [
        made(LLAMA3, normalizer=normalizers.Lowercase()),
        made(LLAMA3, space=True),
        made(LLAMA3, behavior="removed"),
        made(r"\p{Greek}+|\s+|."),
        made(r"\w+|\W"),
        made("", pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)),
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    ],
)
def test_other_tokenizers_are_left_alone(tokenizer):
    assert Words.create(tokenizer) is None


def test_texts_that_only_begin_like_short_ascii_ones_come_out_right(qwen3):
    for text in (
        "a" * (MAX_CHARACTERS + 1),
        "<|im_start|>user\nhi <|im_end|> <|im_start|>",
        "hi <think>",
        "<|im_start|>",
        "é",
        "",
    ):
        assert qwen3.encode(text).tolist() == qwen3._tokenizer.encode(text, add_special_tokens=False).ids


def test_what_is_remembered_of_words_is_bounded(monkeypatch):
    from gateway.prompt import words as module

    monkeypatch.setattr(module, "_MAX_WORDS", 50)
    tokenizer = made(LLAMA3)
    words = Words.create(tokenizer)
    for number in range(500):
        words.encode(f" w{'a' * (number % 40)}{chr(97 + number % 26)}{chr(97 + number // 26)}")
    assert len(words._ids) <= 50
