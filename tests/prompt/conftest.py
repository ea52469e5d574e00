import lzma
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.prompt.template import ChatTemplates
from gateway.prompt.tokenizer import PromptTokenizer

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def fixtures():
    return FIXTURES


@pytest.fixture(scope="session")
def qwen3_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen3")
    source = FIXTURES / "qwen3"
    (directory / "tokenizer.json").write_bytes(lzma.decompress((source / "tokenizer.json.xz").read_bytes()))
    (directory / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return directory


@pytest.fixture(scope="session")
def qwen3(qwen3_directory):
    return PromptTokenizer.from_directory(qwen3_directory)


def byte_level(*, add_prefix_space=False):
    """Each byte a token: texts of any kind, ids that show every difference."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metaspace(scheme):
    """Characters and words with a visible space before them, where the scheme puts one."""
    words = ["<unk>", "▁", "▁a", "▁b", "a", "b", "▁▁", "ab", "▁ab", "x", "▁x", *"[]INST/<>|s\n"]
    merges = [("▁", "a"), ("▁", "b"), ("▁", "▁"), ("a", "b"), ("▁", "ab"), ("▁", "x")]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    return tokenizer


def prepend():
    tokenizer = metaspace("never")
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


SHAPES = {
    "byte level": byte_level,
    "prefix space": lambda: byte_level(add_prefix_space=True),
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "prepend normalizer": prepend,
}


@pytest.fixture(scope="session")
def odd_tokenizer_shapes():
    """Makers of tokenizers by shape."""
    return SHAPES


@pytest.fixture(scope="session", params=sorted(SHAPES))
def odd_tokenizer(request):
    """A tokenizer of each shape, with added tokens of each kind."""
    tokenizer = SHAPES[request.param]()
    tokenizer.add_special_tokens(
        [
            AddedToken("<s>", normalized=False),
            AddedToken("<sx>", normalized=False),
            AddedToken("<|l|>", normalized=False, lstrip=True),
            AddedToken("<|r|>", normalized=False, rstrip=True),
        ]
    )
    tokenizer.add_tokens([AddedToken("ab<", normalized=True), AddedToken("b", normalized=False, single_word=True)])
    return PromptTokenizer(tokenizer, ChatTemplates({}), {}, name=request.param)


@pytest.fixture
def model_directory(tmp_path, qwen3_directory):
    """A function that writes a model's directory with a tiny tokenizer and the given files."""
    import json

    def write(config=None, **files):
        byte_level().save(str(tmp_path / "tokenizer.json"))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".jinja").write_text(text)
        return tmp_path

    return write
