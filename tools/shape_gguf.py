#!/usr/bin/env python3
"""Writes a GGUF file in the shape of Llama-3.2-1B with random weights, for measuring: freshet and its peers
read the same file. Needs nothing but Python.

usage: shape_gguf.py OUT.gguf [--type q4_0|q8_0|q4_k|q4_k_m|q6_k|bf16|f16] [--layers 16] [--hidden 2048] [--ffn 8192]
                     [--heads 32] [--kv-heads 8] [--head-dim 64] [--vocab 128256]
The embeddings are q6_k where the weights have four bits (as llama.cpp's quantiser leaves them), else the type.
"""
import argparse
import random
import struct
import sys

ALIGNMENT = 32
# name: (number in a GGUF file, weights in a block, bytes in a block)
TYPES = {"f32": (0, 1, 4), "f16": (1, 1, 2), "q4_0": (2, 32, 18), "q8_0": (8, 32, 34), "q4_k": (12, 256, 144),
         "q6_k": (14, 256, 210), "bf16": (30, 1, 2)}
FILE_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 7, "q4_k": 14, "q4_k_m": 15, "q6_k": 18, "bf16": 32}
PATTERN_BLOCKS = 4099  # a prime: no row repeats its neighbour


def f16(x):
    return struct.pack("<e", x)


def block(kind, rng):
    """A block whose weights look like N(0, 0.02)."""
    if kind == "f32":
        return struct.pack("<f", 1.0)
    if kind == "f16":
        return f16(rng.gauss(0, 0.02))
    if kind == "bf16":
        return struct.pack("<f", rng.gauss(0, 0.02))[2:]
    if kind == "q4_0":
        return f16(0.0043) + rng.randbytes(16)
    if kind == "q8_0":
        return f16(0.00027) + rng.randbytes(32)
    if kind == "q6_k":
        return rng.randbytes(192) + bytes(rng.randrange(20, 60) for _ in range(16)) + f16(0.00003)
    scales = bytes(rng.randrange(16, 64) for _ in range(12))  # q4_k; the upper two bits stay clear
    return f16(0.0001) + f16(0.0007) + scales + rng.randbytes(128)


def text(s):
    data = s.encode()
    return struct.pack("<Q", len(data)) + data


def metadata(key, value):
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    kind = 8 if isinstance(value[0], str) else 5
    items = b"".join(text(v) if kind == 8 else struct.pack("<i", v) for v in value)
    return text(key) + struct.pack("<IIQ", 9, kind, len(value)) + items


def weights_type(kind, name):
    if name.endswith("norm.weight"):
        return "f32"
    if name.startswith("token_embd"):
        return "q6_k" if kind.startswith("q4") else kind
    if kind == "q4_k_m":  # llama.cpp gives more bits to half of these
        layer = int(name.split(".")[1])
        more = "attn_v" in name or "ffn_down" in name
        return "q6_k" if more and layer % 2 == 0 else "q4_k"
    return kind


def tensors(o):
    yield "token_embd.weight", (o.hidden, o.vocab)
    for i in range(o.layers):
        p = f"blk.{i}."
        yield p + "attn_norm.weight", (o.hidden,)
        yield p + "attn_q.weight", (o.hidden, o.heads * o.head_dim)
        yield p + "attn_k.weight", (o.hidden, o.kv_heads * o.head_dim)
        yield p + "attn_v.weight", (o.hidden, o.kv_heads * o.head_dim)
        yield p + "attn_output.weight", (o.heads * o.head_dim, o.hidden)
        yield p + "ffn_norm.weight", (o.hidden,)
        yield p + "ffn_gate.weight", (o.hidden, o.ffn)
        yield p + "ffn_up.weight", (o.hidden, o.ffn)
        yield p + "ffn_down.weight", (o.ffn, o.hidden)
    yield "output_norm.weight", (o.hidden,)


def write(o, file):
    kinds = {"f32": None}  # in order of their first use
    listed, data_at = [], 0
    for name, shape in tensors(o):
        kind = weights_type(o.type, name)
        number, per_block, size = TYPES[kind]
        elements = 1
        for n in shape:
            elements *= n
        if shape[0] % per_block:
            sys.exit(f"{name}: rows of {shape[0]} don't divide into {kind} blocks of {per_block}")
        blocks = elements // per_block
        listed.append((name, shape, kind, number, data_at, blocks, size))
        data_at += -(-blocks * size // ALIGNMENT) * ALIGNMENT
        kinds[kind] = None
    tokens = [chr(0x100 + i) if i < 256 else f"t{i}" for i in range(o.vocab)]
    about = {"general.architecture": "llama", "general.name": "shape", "general.file_type": FILE_TYPES[o.type],
             "general.quantization_version": 2, "llama.context_length": 131072, "llama.embedding_length": o.hidden,
             "llama.block_count": o.layers, "llama.feed_forward_length": o.ffn,
             "llama.attention.head_count": o.heads, "llama.attention.head_count_kv": o.kv_heads,
             "llama.attention.key_length": o.head_dim, "llama.attention.value_length": o.head_dim,
             "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 500000.0,
             "llama.rope.dimension_count": o.head_dim, "llama.vocab_size": o.vocab,
             "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": tokens,
             "tokenizer.ggml.token_type": [1] * o.vocab, "tokenizer.ggml.merges": ["\u0100 \u0101"],
             "tokenizer.ggml.bos_token_id": o.vocab - 2, "tokenizer.ggml.eos_token_id": o.vocab - 1}
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(listed), len(about))
    header += b"".join(metadata(k, v) for k, v in about.items())
    for name, shape, _, number, at, _, _ in listed:
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, at)
    file.write(header + bytes(-len(header) % ALIGNMENT))
    rng = random.Random(0)
    patterns = {kind: b"".join(block(kind, rng) for _ in range(PATTERN_BLOCKS)) for kind in kinds}
    for _, _, kind, _, _, blocks, size in listed:
        times, rest = divmod(blocks, PATTERN_BLOCKS)
        for _ in range(times):
            file.write(patterns[kind])
        file.write(patterns[kind][:rest * size] + bytes(-blocks * size % ALIGNMENT))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out")
    p.add_argument("--type", choices=sorted(FILE_TYPES), default="q4_0")
    for flag, value in (("layers", 16), ("hidden", 2048), ("ffn", 8192), ("heads", 32), ("kv-heads", 8),
                        ("head-dim", 64), ("vocab", 128256)):
        p.add_argument("--" + flag, type=int, default=value)
    o = p.parse_args()
    with open(o.out, "wb") as file:
        write(o, file)


main()
