"""Train the small tokenizer of the simulated worker: `python -m simulator.train_tokenizer OUTPUT TEXT [TEXT ...]`.

Neither the installation nor the tests run this: the result is shipped in `simulator/data`, with the sources of its text
and their licences in the README there. The same texts in the same order give the same files.
"""

import argparse
import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 6144
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Words with at most one leading space, numbers digit by digit, runs of punctuation, and whitespace: a word that is in
# the vocabulary is then always one token, wherever it stands, so generated text tokenizes back to the same ids.
PIECES = r" ?[A-Za-z]+|\p{N}| ?[^\sA-Za-z\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def strings_of(value: object) -> Iterator[str]:
    """Every string inside a JSON value, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_of(item)


def texts_of(path: Path) -> Iterator[str]:
    """The texts of one file: the strings of JSON and JSON lines (``.gz`` too), else the file's lines."""
    opener = gzip.open if path.suffix == ".gz" else open
    name = path.name.removesuffix(".gz")
    with opener(path, "rt", encoding="utf-8") as file:
        if name.endswith(".jsonl"):
            for line in file:
                yield from strings_of(json.loads(line))
        elif name.endswith(".json"):
            yield from strings_of(json.load(file))
        else:
            yield from file


def distinct_lines(paths: list[Path]) -> Iterator[str]:
    """Each different line of all texts once, in order: a conversation that repeats its history counts once.

    Lines with letters outside ASCII, machine-made ids and encoded data are left out; bytes cover those anyway.
    """
    seen: set[str] = set()
    for path in paths:
        for text in texts_of(path):
            for line in text.splitlines():
                if line not in seen and line.isascii() and not re.search(r"[0-9a-fA-F]{12}|\S{80}", line):
                    seen.add(line)
                    yield line + "\n"


def train(paths: list[Path]) -> Tokenizer:
    """A byte-level BPE tokenizer with ChatML's special tokens, trained from the texts at `paths`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
    )
    tokenizer.train_from_iterator(distinct_lines(paths), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def whole_words(tokenizer: Tokenizer, paths: list[Path]) -> list[str]:
    """The lower-case words of three letters and more that stand in the texts at least five times and are one token.

    The simulated worker writes with these.
    """
    counts = Counter(word for line in distinct_lines(paths) for word in re.findall(r"(?<= )[a-z]{3,}(?=[ .,\n])", line))
    return sorted(word for word, count in counts.items() if count >= 5 and len(tokenizer.encode(f" {word}").ids) == 1)


def configuration(template: str) -> dict[str, object]:
    """What `tokenizer_config.json` says, in Hugging Face's layout."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def main() -> int:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` (with the folder's ``chat_template.jinja`` in it), ``words.txt``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path, help="folder to write to; holds chat_template.jinja")
    parser.add_argument("texts", type=Path, nargs="+", help="plain text, .json or .jsonl, each also as .gz")
    arguments = parser.parse_args()
    tokenizer = train(arguments.texts)
    tokenizer.save(str(arguments.output / "tokenizer.json"), pretty=False)
    words = whole_words(tokenizer, arguments.texts)
    (arguments.output / "words.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    template = (arguments.output / "chat_template.jinja").read_text(encoding="utf-8")
    (arguments.output / "tokenizer_config.json").write_text(
        json.dumps(configuration(template), indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
