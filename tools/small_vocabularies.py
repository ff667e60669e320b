#!/usr/bin/env python3
"""Writes vocabularies without the tokens that no test text can meet: small_vocabularies.py FOLDER OUT.

FOLDER holds tokenizers/ and gguf-vocab/ in full, OUT the test texts (*.inp, *.expected.json; the
unpacked tests/data/tokenizers.tar.xz). Merges act within a text, so that a token which is no part of
any text changes nothing: the ids stay what the full vocabularies give."""
import base64
import json
import sys

import gguf
from tokenizers import Tokenizer

FULL, OUT = sys.argv[1:3]


def pair_texts(name):
    with open(f"{OUT}/ggml-vocab-{name}.gguf.inp", encoding="utf-8", newline="") as file:
        return file.read().split("\n__ggml_vocab_test__\n")


def golden_texts(name):
    with open(f"{OUT}/{name}.expected.json", encoding="utf-8") as file:
        cases = json.load(file)
    return [case["text"] for case in (cases["cases"] if isinstance(cases, dict) else cases)]


def small_json(name, more=()):
    path = f"{FULL}/tokenizers/{name}"
    tokenizer = Tokenizer.from_file(path)
    words = set()
    for text in [*golden_texts(name), *more]:
        text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        words |= {text} | {w for w, _ in (tokenizer.pre_tokenizer.pre_tokenize_str(text) if tokenizer.pre_tokenizer else [])}
    everything = "\n".join(words)
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    model = data["model"]
    suffix = model.get("end_of_word_suffix") or ""
    added = {token["content"]: token["id"] for token in data["added_tokens"]}

    def keep(token):
        plain = token[:-len(suffix)] if suffix and token.endswith(suffix) else token
        return len(plain) == 1 or plain in everything or token in added or token.startswith("<0x")

    if isinstance(model["vocab"], list):
        worst = min(score for _, score in model["vocab"])
        model["vocab"] = [[t, s] if keep(t) or s == worst else ["", 0] for t, s in model["vocab"]]
    else:
        vocab = {token: id for token, id in model["vocab"].items() if keep(token)}
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [[a, b] for a, b in merges if a in vocab and b in vocab and a + b in vocab
                           or suffix and a in vocab and b in vocab and a + b in vocab]
        model["vocab"] = {**vocab, **added}  # the ids of added tokens go by the vocabulary's size
    with open(f"{OUT}/{name}", "w", encoding="utf-8") as file:
        json.dump(data, file, ensure_ascii=False, separators=(",", ":"))


def small_tiktoken(name, texts):
    everything = b"\n".join(text.encode() for text in texts)
    with open(f"{FULL}/tokenizers/{name}", "rb") as file:
        lines = [line.split() for line in file if line.strip()]
    last = lines[-1]
    kept = [line for line in lines
            if len(base64.b64decode(line[0])) == 1 or base64.b64decode(line[0]) in everything or line is last]
    with open(f"{OUT}/{name}", "wb") as file:
        file.writelines(b" ".join(line) + b"\n" for line in kept)


def byte_alphabet():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def small_gguf(name):
    reader = gguf.GGUFReader(f"{FULL}/gguf-vocab/ggml-vocab-{name}.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.ggml.")}
    if fields["tokenizer.ggml.model"] == "gpt2":
        table = byte_alphabet()
        everything = "\n".join("".join(table[b] for b in text.encode()) for text in pair_texts(name))
    else:
        everything = "\n".join(("▁" + text).replace(" ", "▁") for text in pair_texts(name))
    types = fields["tokenizer.ggml.token_type"]
    tokens = [t if len(t) == 1 or types[i] != 1 or t in everything else "" for i, t in enumerate(fields["tokenizer.ggml.tokens"])]
    kept = set(tokens)
    writer = gguf.GGUFWriter(f"{OUT}/ggml-vocab-{name}.gguf", "llama")
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(fields.get("tokenizer.ggml.pre", "default"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if "tokenizer.ggml.scores" in fields:
        writer.add_token_scores(fields["tokenizer.ggml.scores"])
    if "tokenizer.ggml.merges" in fields:
        writer.add_token_merges([m for m in fields["tokenizer.ggml.merges"] if m.replace(" ", "") in kept])
    writer.add_bos_token_id(fields["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"])
    if "tokenizer.ggml.add_bos_token" in fields:
        writer.add_add_bos_token(fields["tokenizer.ggml.add_bos_token"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


for name in ("clip.json", "falcon.json", "mistral.json", "phi2.json", "phi3.json", "roberta.json", "t5-small.json"):
    small_json(name)
small_json("gpt2.json", pair_texts("gpt-2"))
small_tiktoken("llama3.tiktoken", golden_texts("llama3.tiktoken") + pair_texts("llama-bpe"))
small_tiktoken("qwen.tiktoken", golden_texts("qwen.tiktoken") + pair_texts("qwen2"))
small_tiktoken("o200k_base.tiktoken", golden_texts("o200k_base.tiktoken"))
for name in ("llama-spm", "deepseek-coder", "falcon", "starcoder"):
    small_gguf(name)
