#!/usr/bin/env python3
"""The most memory that freshet quantize takes: no more for four layers than for two.

usage: memory_test.py [HIDDEN FFN VOCABULARY HEADS KV_HEADS [LAYERS ...]]

Makes models in BF16 with the widths of a 70B (or those named) in a temporary folder, quantises them (W4A16, gptq,
2,048 tokens) and deletes them. The bar: two layers in BF16, the Hessians of one and 1 GiB.
"""
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile

from quantize_case import FRESHET, LAYER, LINEARS, bf16, llama_config

GIB = 1 << 30


def shapes_of(hidden, ffn, vocabulary, heads, kv_heads, layers):
    kv = hidden // heads * kv_heads
    out = {"model.embed_tokens.weight": [vocabulary, hidden]}
    linears = dict(zip(LINEARS, ([hidden, hidden], [kv, hidden], [kv, hidden], [hidden, hidden], [ffn, hidden],
                                 [ffn, hidden], [hidden, ffn])))
    for layer in range(layers):
        out.update({LAYER(layer) + name + ".weight": shape for name, shape in linears.items()})
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[LAYER(layer) + name + ".weight"] = [hidden]
    out.update({"model.norm.weight": [hidden], "lm_head.weight": [vocabulary, hidden]})
    return out, linears


def write_model(folder, shapes, config):
    rng = random.Random(1)
    numbers = struct.pack("<65536H", *(bf16(rng.gauss(0, 0.01)) for _ in range(65536)))
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            if len(shape) == 1:
                f.write(struct.pack("<H", bf16(1.0)) * shape[0])
                continue
            for _ in range(shape[0]):  # a row begins anywhere among the numbers
                start, left = 2 * rng.randrange(65536), 2 * shape[1]
                while left > 0:
                    piece = numbers[start:start + left]
                    f.write(piece)
                    start, left = 0, left - len(piece)


def peak_of(model, out, ids):
    """The peak of the program's resident memory, in bytes: the kernel's own count of that process."""
    process = subprocess.Popen([FRESHET, "quantize", model, "-o", out, "--scheme", "W4A16", "--method", "gptq",
                                "--calibration", ids, "--json"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"freshet quantize ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024


def main():
    sizes = [int(a) for a in sys.argv[1:]] or [8192, 28672, 128256, 64, 8]
    hidden, ffn, vocabulary, heads, kv_heads = sizes[:5]
    failed = False
    for layers in sizes[5:] or [2, 4]:
        with tempfile.TemporaryDirectory() as folder:
            shapes, linears = shapes_of(hidden, ffn, vocabulary, heads, kv_heads, layers)
            layer = 2 * sum(rows * cols for rows, cols in linears.values())
            need = 2 * (2 * vocabulary * hidden * 2 + layers * layer)
            if shutil.disk_usage(folder).free < need:
                sys.exit(f"{folder} has less than the {need / GIB:.0f} GiB that the models take")
            model, ids = os.path.join(folder, "m"), os.path.join(folder, "ids.json")
            os.mkdir(model)
            write_model(model, shapes, llama_config(hidden, ffn, layers, heads, kv_heads, vocabulary))
            rng = random.Random(2)
            with open(ids, "w") as f:
                json.dump([[rng.randrange(vocabulary) for _ in range(512)] for _ in range(4)], f)
            hessians = 4 * (3 * hidden * hidden + ffn * ffn)
            bar = 2 * layer + hessians + GIB
            peak = peak_of(model, os.path.join(folder, "out"), ids)
            print(f"{layers} layers of {layer / GIB:.2f} GiB, Hessians of {hessians / GIB:.2f} GiB: "
                  f"peak {peak / GIB:.2f} GiB, bar {bar / GIB:.2f} GiB", flush=True)
            failed |= peak > bar
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
