#!/usr/bin/env python3
"""Trains small SentencePiece models that between them use each option, and writes what SentencePiece
makes of some texts: golden_sentencepiece.py OUT_DIRECTORY [TEXTS] [SEED]"""
import base64
import io
import json
import os
import random
import sys

import gguf
import sentencepiece as spm

from golden_mechanisms import ALPHABET, TEXTS

OUT = sys.argv[1]
COUNT = int(sys.argv[2]) if len(sys.argv) > 2 else 30
RNG = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
WORDS = ["the", "then", "there", "hello", "help", "food", "fool", "foot", "a", "an", "and", "hand", "sand", "1", "12", "123", "naïve", "café", "你好",
         "世界", "ア", "アイ", "don't", "I'm", "we'll", "end.", "stop!", "x", "xx", "<sep>", "привет", "при", "вет"]
CORPUS = [" ".join(RNG.choice(WORDS) for _ in range(RNG.randint(3, 14))) for _ in range(3000)]
MODELS = {
    "unigram": dict(model_type="unigram", normalization_rule_name="identity"),
    "unigram_bytes": dict(model_type="unigram", normalization_rule_name="identity", byte_fallback=True, vocab_size=400,
                          user_defined_symbols=["<sep>", "foo", "▁the"]),
    "unigram_nfkc": dict(model_type="unigram", normalization_rule_name="nmt_nfkc_cf"),
    "bpe": dict(model_type="bpe", normalization_rule_name="identity"),
    "bpe_bytes": dict(model_type="bpe", normalization_rule_name="identity", byte_fallback=True, vocab_size=400,
                      remove_extra_whitespaces=False),
    "bpe_user": dict(model_type="bpe", normalization_rule_name="identity", user_defined_symbols=["<sep>", "foo", "  ", "▁▁▁"],
                     remove_extra_whitespaces=False, split_by_number=False, split_digits=True),
    "bpe_suffix": dict(model_type="bpe", normalization_rule_name="identity", treat_whitespace_as_suffix=True),
    "bpe_plain": dict(model_type="bpe", normalization_rule_name="identity", add_dummy_prefix=False, split_by_whitespace=False,
                      bos_id=-1, eos_id=-1, pad_id=3, unk_surface=" ?? "),
}


def write_gguf(name, model, processor):
    """The same vocabulary as llama.cpp's converter writes it."""
    size = processor.get_piece_size()
    kinds = [2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1 for i in range(size)]
    writer = gguf.GGUFWriter(os.path.join(OUT, f"spm_{name}.gguf"), model)
    writer.add_tokenizer_model(model)
    writer.add_token_list([processor.id_to_piece(i) for i in range(size)])
    writer.add_token_scores([processor.get_score(i) for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_unk_token_id(processor.unk_id())
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(model == "t5")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def main():
    expected = {}
    for name, options in MODELS.items():
        model = io.BytesIO()
        options = dict(dict(vocab_size=120, character_coverage=0.9995, hard_vocab_limit=False, minloglevel=2), **options)
        spm.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=model, **options)
        with open(os.path.join(OUT, f"spm_{name}.model"), "wb") as out:
            out.write(model.getvalue())
        processor = spm.SentencePieceProcessor(model_proto=model.getvalue())
        if name in ("unigram", "bpe_bytes"):
            write_gguf(name, "t5" if name == "unigram" else "llama", processor)
        texts = TEXTS + ["".join(RNG.choice(ALPHABET + WORDS) for _ in range(RNG.randint(1, 24))) for _ in range(COUNT)]
        cases = [dict(text=t, ids=processor.encode(t), decoded=processor.decode(processor.encode(t))) for t in texts]
        for _ in range(COUNT):
            ids = [RNG.randrange(processor.get_piece_size()) for _ in range(RNG.randint(1, 12))]
            cases.append(dict(ids=ids, decoded=processor.decode(ids)))
        for _ in range(10):
            raw = bytes(RNG.choice(b"ab \xe4\xbd\xa0\xf0\x9f\x98\xc3\xff") for _ in range(RNG.randint(1, 9)))
            cases.append(dict(bytes=base64.b64encode(raw).decode(), ids=processor.encode(raw)))
        expected[name] = cases
    with open(os.path.join(OUT, "sentencepiece.json"), "w", encoding="utf-8") as out:
        json.dump(expected, out, ensure_ascii=False, separators=(",", ":"))


main()
