#!/usr/bin/env python3
"""What transformers' generate() writes under fields of generation_config.json.

usage: golden_generate.py SEEDED NAME ...       needs torch and transformers (5.24)

SEEDED/<name>/ is a model of golden_seeded.py, an encoder-decoder. It gets generated.json: a list of
{"fields": {...}, "ids": [...], "output": [...]}, where ids are what the encoder reads, fields are
generate()'s, and the output is without what the decoder begins with and without an end token.
"""
import json
import pathlib
import shutil
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

from golden_seeded import seeded

NEW = 12


def load(source):
    config = json.loads((source / "config.json").read_text())
    described = json.loads((source / "weights.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(source / "config.json", folder)
        save_file({n: seeded(n, *d) for n, d in described.items()}, folder + "/model.safetensors",
                  metadata={"format": "pt"})
        cls = getattr(transformers, config["architectures"][0])
        return cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval(), config


def generate(model, config, ids, **fields):
    own = model.generation_config
    own.forced_eos_token_id = None
    out = model.generate(input_ids=torch.tensor([ids]), do_sample=False, max_new_tokens=NEW, max_length=None, **fields)
    start = 1 + (config.get("forced_bos_token_id") is not None)
    out = out[0, start:].tolist()
    end = config["eos_token_id"]
    return out[:out.index(end)] if end in out else out


def cases(model, config, ids):
    plain = generate(model, config, ids)
    plain = plain or [5]
    likely, pair = max(set(plain), key=plain.count), (plain * 3)[1:3]
    beams = dict(num_beams=3, bad_words_ids=[[likely]])
    for fields in (dict(), dict(bad_words_ids=[[likely]]), dict(bad_words_ids=[pair, [pair[1], 5]]),
                   dict(no_repeat_ngram_size=2), dict(no_repeat_ngram_size=1),
                   dict(suppress_tokens=[likely], begin_suppress_tokens=[plain[0]]),
                   dict(num_beams=3), dict(num_beams=3, no_repeat_ngram_size=2), beams,
                   dict(beams, renormalize_logits=True),
                   dict(beams, renormalize_logits=True, length_penalty=2.0, early_stopping=True)):
        yield {"fields": fields, "ids": ids, "output": generate(model, config, ids, **fields)}


def main():
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        source = pathlib.Path(sys.argv[1]) / name
        model, config = load(source)
        golden = load_file(source / "golden.safetensors")
        made = [c for i in range(8) if f"ids_{i}" in golden
                for c in cases(model, config, golden[f"ids_{i}"].tolist())]
        lines = ",\n".join(json.dumps(c) for c in made)
        (source / "generated.json").write_text(f"[\n{lines}\n]\n")
        print(name, len(made), "cases", len({str(c['output']) for c in made}), "different")


if __name__ == "__main__":
    main()
