import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from gateway.prompt import hub
from gateway.prompt.tokenizer import PromptTokenizer, TokenizerError

ADDED = {
    "content": "<new>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
    "special": True,
}


def test_tokens_that_only_the_configuration_names_are_added(model_directory):
    directory = model_directory(
        {
            "added_tokens_decoder": {"256": ADDED},
            "bos_token": {"__type": "AddedToken", "content": "<bos>", "normalized": False},
            "eos_token": "<new>",
            "pad_token": None,
            "image_token": "<image>",
            "additional_special_tokens": ["<extra>"],
            "add_bos_token": True,
        }
    )
    tokenizer = PromptTokenizer.from_directory(directory)
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<new>", "image_token": "<image>"}
    assert tokenizer.encode("<new><bos><image><extra>").tolist() == [256, 257, 258, 259]
    assert tokenizer.decode(tokenizer.encode("aé")) == "aé"
    assert tokenizer.prefix.tolist() == [], "since transformers 5, add_bos_token has no effect beside a tokenizer.json"


def test_older_models_name_their_tokens_in_a_file_of_its_own(model_directory):
    directory = model_directory({})
    (directory / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<b>"}, "eos_token": "<e>"})
    )
    assert PromptTokenizer.from_directory(directory).special_tokens == {"bos_token": "<b>", "eos_token": "<e>"}


def test_a_tokenizer_that_splits_special_tokens_is_not_cut_at_them(model_directory):
    directory = model_directory({"eos_token": "<e>", "split_special_tokens": True})
    tokenizer = PromptTokenizer.from_directory(directory)
    assert tokenizer.splitter is None
    assert len(tokenizer.encode("<e>")) == 3
    assert tokenizer.split("a<e>b") == ["a<e>b"]


@pytest.mark.parametrize(
    ("config", "model_type", "ids"),
    [
        ({"tokenizer_class": "LlamaTokenizer", "legacy": True}, "llama", ["▁a", "<s>", "▁b"]),
        ({"tokenizer_class": "LlamaTokenizer"}, "mistral", ["▁a", "<s>", "b"]),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": False}, "llama", ["a", "<s>", "b"]),
        ({"tokenizer_class": "LlamaTokenizerFast"}, "deepseek_v3", ["a", "<s>", "b"]),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "llama", ["a", "<s>", "b"]),
    ],
)
def test_llamas_class_puts_its_own_spaces_unless_the_model_is_known_to_name_it_wrongly(
    tmp_path, config, model_type, ids
):
    words = ["<unk>", "▁", "a", "b", "▁a", "▁b"]
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = PromptTokenizer.from_directory(tmp_path)
    assert [loaded._tokenizer.id_to_token(i) for i in loaded.encode("a<s>b")] == ids
    assert loaded.splitter is not None


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert PromptTokenizer.from_directory(tmp_path).encode("a").tolist() == [0]


def test_a_directory_that_cannot_be_used_says_why(tmp_path, model_directory):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        PromptTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        PromptTokenizer.from_directory(tmp_path)
    for config in ([1], {"added_tokens_decoder": [1]}, {"added_tokens_decoder": {"x": ADDED}}, {"bos_token": {"x": 1}}):
        with pytest.raises(TokenizerError, match="cannot be understood"):
            PromptTokenizer.from_directory(model_directory(config))
    with pytest.raises(TokenizerError, match="does not compile"):
        PromptTokenizer.from_directory(model_directory({"chat_template": "{% if %}"}))


def test_a_post_processor_that_does_more_than_surround_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1, "[S]": 2}, unk_token="?"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [S] $A", special_tokens=[("[S]", 2)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="post-processor"):
        PromptTokenizer.from_directory(tmp_path)


FETCHED = os.environ.get("WARMROUTE_TOKENIZERS", "")


@pytest.mark.skipif(
    not FETCHED, reason="tests/prompt/engine/fetch.sh DIRECTORY brings them; then WARMROUTE_TOKENIZERS=DIRECTORY"
)
@pytest.mark.parametrize(
    ("name", "bos", "prefix", "ids"),
    [
        ("llama3_1", "<|begin_of_text|>", [128000], [128006, 882, 128007, 271, 6151, 128009]),
        ("deepseek_v3", "<｜begin▁of▁sentence｜>", [], [0, 128803, 6366, 128804]),  # noqa: RUF001  # DeepSeek's own bars
    ],
)
def test_the_tokenizers_of_llama_and_deepseek_load_and_render(name, bos, prefix, ids):
    from gateway.prompt.prompter import Prompter

    tokenizer = PromptTokenizer.from_directory(Path(FETCHED) / name)
    assert tokenizer.special_tokens["bos_token"] == bos
    assert tokenizer.prefix.tolist() == prefix
    assert tokenizer.splitter is not None
    prompt = Prompter(tokenizer).now("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    found = prompt.ids.tolist()
    assert any(found[at : at + len(ids)] == ids for at in range(len(found)))
    assert found.count(tokenizer.encode(bos)[0]) == 1


def test_a_name_that_is_neither_directory_nor_repository_says_so():
    for source in ("/no/such/directory", "nothing", "a/b/c"):
        with pytest.raises(TokenizerError, match="no such directory"):
            hub.load(source)


def test_a_directory_needs_no_network(model_directory, monkeypatch):
    monkeypatch.setattr(hub, "fetch", None)
    assert hub.load(str(model_directory())).encode("a")


COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("source", "revision", "order"),
    [
        ("owner/name", "main", [False, True]),
        ("owner/name@v1", "v1", [False, True]),
        (f"owner/name@{COMMIT}", COMMIT, [True, False]),
    ],
)
def test_a_pinned_commit_is_looked_for_in_the_cache_first_and_nothing_anywhere_is_a_clear_error(
    monkeypatch, source, revision, order
):
    import huggingface_hub

    asked = []

    def offline(repository, **options):
        asked.append((repository, options["revision"], options["local_files_only"]))
        raise ConnectionError("no network here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(TokenizerError, match="neither on the Hugging Face Hub nor in the cache"):
        hub.load(source)
    assert asked == [("owner/name", revision, local) for local in order]


def test_what_the_cache_has_is_loaded(monkeypatch, model_directory):
    import huggingface_hub

    directory = str(model_directory())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: directory)
    assert hub.load(f"owner/name@{COMMIT}").name == directory
