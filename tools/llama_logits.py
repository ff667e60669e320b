#!/usr/bin/env python3
"""Compares llama.cpp's logits of files that `freshet convert` wrote with transformers'.

usage: llama_logits.py FRESHET CHECKPOINTS GOLDEN NAME ...
needs numpy, safetensors and llama-cpp-py-sync (PyPI; a build of llama.cpp's library)

CHECKPOINTS/<name>/ is a folder to convert (build/release/tests/data/seeded), GOLDEN/<name>/ has
golden.safetensors (tests/data/seeded). Files are in F32, without a vocabulary. Prints the largest
difference of each input's logits, in units of the largest logit: llama.cpp's and Freshet's.
"""
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
from llama_cpp_py_sync import _cffi_bindings
from safetensors.numpy import load_file

FFI, LIB = _cffi_bindings.get_ffi(), _cffi_bindings.get_lib()


def llama_logits(path, ids):
    """[tokens, vocabulary], with keys and values in F32."""
    model = LIB.llama_model_load_from_file(path.encode(), LIB.llama_model_default_params())
    if model == FFI.NULL:
        sys.exit(f"llama.cpp does not load {path}")
    options = LIB.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 512
    options.type_k = options.type_v = options.flash_attn_type = 0
    context = LIB.llama_init_from_model(model, options)
    batch = LIB.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    if LIB.llama_decode(context, batch) != 0:
        sys.exit(f"llama.cpp does not run {path}")
    size = 4 * LIB.llama_vocab_n_tokens(LIB.llama_model_get_vocab(model))
    rows = [np.frombuffer(FFI.buffer(LIB.llama_get_logits_ith(context, i), size), np.float32).copy()
            for i in range(len(ids))]
    LIB.llama_batch_free(batch)
    LIB.llama_free(context)
    LIB.llama_model_free(model)
    return np.stack(rows)


def main():
    freshet, checkpoints, golden, *names = sys.argv[1:]
    LIB.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        file, ids_file, out = (os.path.join(folder, n) for n in ("model.gguf", "ids.json", "out.safetensors"))
        for name in names:
            want = load_file(os.path.join(golden, name, "golden.safetensors"))
            ids = [want[f"ids_{i}"].tolist() for i in range(2)]
            with open(ids_file, "w", encoding="utf-8") as f:
                json.dump(ids, f)
            subprocess.run([freshet, "convert", os.path.join(checkpoints, name), "-o", file, "--type", "f32",
                            "--force", "--set", "tokenizer.ggml.model=no_vocab"], check=True, capture_output=True)
            subprocess.run([freshet, "eval", "logits", file, "--ids", ids_file, "-o", out, "--reference",
                            "--device", "cpu"], check=True, capture_output=True)
            ours = load_file(out)
            for i in range(2):
                logits = want[f"logits_{i}"]
                far = [np.abs(x - logits).max() / np.abs(logits).max()
                       for x in (llama_logits(file, ids[i]), ours[f"logits_{i}"])]
                print(f"{name} {len(ids[i])} tokens: llama.cpp {far[0]:.1e}, Freshet {far[1]:.1e}", flush=True)


if __name__ == "__main__":
    main()
