#!/usr/bin/env python3
"""Writes tests/data/loader: small models in every container, made by the formats' own packages.

sharded/ (config.json, index, two safetensors), single/ (one safetensors of many types), model.gguf
(every metadata type, several tensor types), aligned.gguf, writable.gguf (only types that we write),
split/ (the same tensors over three files), and expected.txt: a line "file tensor dtype shape fnv1a" for each tensor, shapes outermost first. It also
writes the seeds of the fuzzers that read these formats.

Needs: pip install gguf safetensors numpy. Usage: tools/golden_loader.py [root of the repository]
"""
import json
import logging
import pathlib
import shutil
import sys

import numpy as np
import safetensors
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter, quants

GGUF_TENSORS = {
    "token_embd.weight": (T.F16, (6, 32)), "blk.0.attn_q.weight": (T.Q4_0, (4, 64)),
    "blk.0.ffn_up.weight": (T.Q8_0, (3, 32)), "blk.0.ffn_gate_exps.weight": (T.F32, (2, 3, 5)),
    "blk.1.attn_q.weight": (T.BF16, (4, 8)), "output.weight": (T.Q6_K, (2, 256)),
    "blk.1.odd.weight": (T.Q8_K, (1, 256)), "rope_freqs.weight": (T.F32, (7,)),
}


def fnv1a(data):
    h = 0xCBF29CE484222325
    for b in bytes(data):
        h = (h ^ b) * 0x100000001B3 % 2**64
    return f"{h:016x}"


def line(file, name, dtype, shape, data):
    return f"{file} {name} {dtype} {','.join(map(str, shape)) or '-'} {fnv1a(data)}\n"


def write_safetensors(path, tensors, metadata=None):
    """tensors: name -> (dtype of the package, dtype of the file, shape, bytes)."""
    keep = {n: np.frombuffer(t[3], np.uint8) for n, t in tensors.items()}
    spec = {n: safetensors.TensorSpec(dtype=t[0], shape=list(t[2]), data_ptr=keep[n].ctypes.data,
                                      data_len=keep[n].size) for n, t in tensors.items()}
    safetensors.serialize_file(spec, str(path), metadata)
    path.chmod(0o644)


def make_single(out, rng):
    def t(package, file, shape, size):
        return package, file, shape, rng.bytes(int(np.prod(shape)) * size)
    tensors = {
        "a.f32": t("float32", "F32", (2, 3), 4), "a.f16": t("float16", "F16", (5,), 2),
        "a.bf16": t("bfloat16", "BF16", (3, 1, 2), 2), "scalar": t("float32", "F32", (), 4),
        "fp8": t("float8_e4m3fn", "F8_E4M3", (3,), 1), "ids": t("int64", "I64", (2,), 8),
        "packed": t("uint8", "U8", (7,), 1), "empty": t("float32", "F32", (0, 4), 4),
        "naïve \"name\"": t("float32", "F32", (1,), 4),
    }
    write_safetensors(out / "model.safetensors", tensors, {"format": "pt", "note": "ünï"})
    (out / "config.json").write_text('{"model_type": "llama", "vocab_size": 6}\n')
    return [line("single", n.replace(" ", "_"), *t[1:]) for n, t in tensors.items()]


def make_sharded(out, rng):
    shards = {
        "model-00001-of-00002.safetensors": ["model.embed_tokens.weight", "model.norm.weight"],
        "model-00002-of-00002.safetensors": ["lm_head.weight"],
    }
    lines, weight_map = [], {}
    for file, names in shards.items():
        tensors = {n: ("bfloat16", "BF16", (4, 8), rng.bytes(64)) for n in names}
        write_safetensors(out / file, tensors, {"format": "pt"})
        weight_map |= {n: file for n in names}
        lines += [line("sharded", n, *t[1:]) for n, t in tensors.items()]
    index = {"metadata": {"total_size": 192}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (out / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 8}\n')
    (out / "generation_config.json").write_text('{"eos_token_id": [1, 2]}\n')
    return lines


def add_tensors(writer, rng, foreign=True):
    lines = []
    for name, (kind, shape) in GGUF_TENSORS.items():
        if kind == T.Q8_K and not foreign:
            continue
        size, bytes_ = quants.GGML_QUANT_SIZES[kind]
        row = (*shape[:-1], shape[-1] // size * bytes_)
        data = np.frombuffer(rng.bytes(int(np.prod(row))), np.uint8).reshape(row)
        if kind == T.F32:
            writer.add_tensor(name, data.view(np.float32).reshape(shape))
        elif kind == T.F16:
            writer.add_tensor(name, data.view(np.float16).reshape(shape))
        else:
            writer.add_tensor(name, data, raw_dtype=kind)
        lines.append((name, kind.name, shape, data.tobytes()))
    return lines


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_gguf(path, rng, alignment=None, foreign=True):
    w = GGUFWriter(path, "llama")
    if alignment:
        w.add_custom_alignment(alignment)
    w.add_name("tiny ünï")
    w.add_uint8("t.u8", 200)
    w.add_int8("t.i8", -100)
    w.add_uint16("t.u16", 60000)
    w.add_int16("t.i16", -30000)
    w.add_uint32("t.u32", 4000000000)
    w.add_int32("t.i32", -2000000000)
    w.add_float32("t.f32", 0.1)
    w.add_bool("t.bool", True)
    w.add_uint64("t.u64", 2**63 + 5)
    w.add_int64("t.i64", -2**62)
    w.add_float64("t.f64", 1e300)
    w.add_array("t.strings", ["", "a", "Ġthe", "日本"])
    w.add_array("t.ints", [1, -2, 3])
    w.add_array("t.floats", [0.5, -1.25])
    w.add_array("t.bools", [True, False])
    lines = add_tensors(w, rng, foreign)
    finish(w)
    return [line(path.name, *t) for t in lines]


def make_split(out, rng):
    w = GGUFWriter(out / "model.gguf", "llama", split_max_tensors=3)
    w.add_name("split")
    lines = add_tensors(w, rng)
    finish(w)
    return [line("split", *t) for t in lines]


def main():
    logging.disable(logging.INFO)
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    out = root / "tests/data/loader"
    rng = np.random.default_rng(4)
    for d in ["single", "sharded", "split"]:
        (out / d).mkdir(parents=True, exist_ok=True)
    lines = make_single(out / "single", rng) + make_sharded(out / "sharded", rng)
    lines += make_gguf(out / "model.gguf", rng) + make_gguf(out / "aligned.gguf", rng, 128)
    lines += make_gguf(out / "writable.gguf", rng, foreign=False)
    lines += make_split(out / "split", rng)
    (out / "expected.txt").write_text("".join(lines), encoding="utf-8")
    for name, files in {"fuzz_gguf": ["model.gguf", "aligned.gguf"],
                        "fuzz_safetensors": ["single/model.safetensors",
                                             "sharded/model-00001-of-00002.safetensors"]}.items():
        seeds = root / "tests/fuzz/corpus" / name
        seeds.mkdir(parents=True, exist_ok=True)
        for f in files:
            shutil.copyfile(out / f, seeds / f.replace("/", "-"))


if __name__ == "__main__":
    main()
