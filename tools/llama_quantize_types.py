#!/usr/bin/env python3
"""Write quant/recipes.json of tests/data/quant.tar.xz: the type that llama-quantize gives each tensor, for every file type.

    tools/llama_quantize_types.py LLAMA_QUANTIZE FRESHET OUT.json

LLAMA_QUANTIZE is the program of llama.cpp or of ik_llama.cpp (PyPI: ik-llama-cpp-python), FRESHET is this
project's program. Needs numpy and gguf. The models have random weights; a recipe reads only names and
shapes. Types are stored as one letter for each tensor.
"""
import json
import os
import re
import string
import struct
import subprocess
import sys
import tempfile

import gguf
import numpy as np

RECIPES = """F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q2_K_S Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K
IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ3_XXS IQ3_XS IQ3_S IQ3_M IQ4_NL IQ4_XS""".split()

BASE = dict(vocab_size=512, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=10000.0,
            hidden_act="silu", bos_token_id=1, eos_token_id=2, torch_dtype="bfloat16")
LLAMA = dict(BASE, architectures=["LlamaForCausalLM"], model_type="llama")
MODELS = {
    "gqa4": dict(LLAMA, num_hidden_layers=16, hidden_size=256, intermediate_size=512, num_attention_heads=8,
                 num_key_value_heads=2, head_dim=32, tie_word_embeddings=False),
    "tied": dict(LLAMA, num_hidden_layers=24, hidden_size=256, intermediate_size=512, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=64, tie_word_embeddings=True),
    "narrow": dict(LLAMA, num_hidden_layers=8, hidden_size=96, intermediate_size=256, num_attention_heads=3,
                   num_key_value_heads=1, head_dim=32, tie_word_embeddings=False),
    "80layers": dict(LLAMA, num_hidden_layers=80, hidden_size=256, intermediate_size=256, num_attention_heads=8,
                     num_key_value_heads=1, head_dim=32, tie_word_embeddings=False),
    "experts8": dict(BASE, architectures=["MixtralForCausalLM"], model_type="mixtral", num_hidden_layers=16,
                     hidden_size=256, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4,
                     head_dim=32, tie_word_embeddings=False, num_local_experts=8, num_experts_per_tok=2),
    "experts4": dict(BASE, architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", num_hidden_layers=16,
                     hidden_size=256, intermediate_size=256, moe_intermediate_size=256,
                     shared_expert_intermediate_size=256, num_attention_heads=4, num_key_value_heads=4,
                     tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
                     mlp_only_layers=[], norm_topk_prob=False, use_sliding_window=False),
}


def shapes(c):
    h, d = c["hidden_size"], c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    yield "model.embed_tokens.weight", (c["vocab_size"], h)
    yield "model.norm.weight", (h,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], h)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (h,)
        yield p + "post_attention_layernorm.weight", (h,)
        for name, rows, cols in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            yield p + f"self_attn.{name}_proj.weight", (rows, cols)
            if c["model_type"] == "qwen2_moe" and name != "o":
                yield p + f"self_attn.{name}_proj.bias", (rows,)
        if c["model_type"] == "llama":
            yield from mlp(p + "mlp.", h, c["intermediate_size"], "gate_proj", "up_proj", "down_proj")
        elif c["model_type"] == "mixtral":
            yield p + "block_sparse_moe.gate.weight", (c["num_local_experts"], h)
            for e in range(c["num_local_experts"]):
                yield from mlp(p + f"block_sparse_moe.experts.{e}.", h, c["intermediate_size"], "w1", "w3", "w2")
        else:
            yield p + "mlp.gate.weight", (c["num_experts"], h)
            yield p + "mlp.shared_expert_gate.weight", (1, h)
            yield from mlp(p + "mlp.shared_expert.", h, c["shared_expert_intermediate_size"],
                           "gate_proj", "up_proj", "down_proj")
            for e in range(c["num_experts"]):
                yield from mlp(p + f"mlp.experts.{e}.", h, c["moe_intermediate_size"],
                               "gate_proj", "up_proj", "down_proj")


def mlp(p, h, ff, gate, up, down):
    yield p + gate + ".weight", (ff, h)
    yield p + up + ".weight", (ff, h)
    yield p + down + ".weight", (h, ff)


def write_checkpoint(folder, config):
    rng = np.random.default_rng(1)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)
    header, blobs, offset = {}, [], 0
    for name, shape in shapes(config):
        data = (rng.standard_normal(shape) * 0.02).astype(np.float16).tobytes()
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
        blobs.append(data)
    head = json.dumps(header).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head + b"".join(blobs))


def write_importance(path, tensors):
    """The old form: i32 entries; each i32 length, name, i32 calls, i32 values, F32 values."""
    rng = np.random.default_rng(2)
    entries = []
    for t in tensors:
        shape = [int(n) for n in t.shape]  # innermost first
        if len(shape) < 2 or not t.name.startswith("blk."):
            continue
        n = shape[0] * (shape[2] if len(shape) > 2 else 1)
        values = rng.random(n).astype(np.float32) + 0.5
        name = t.name.encode()
        entries.append(struct.pack("<i", len(name)) + name + struct.pack("<ii", 1, n) + values.tobytes())
    with open(path, "wb") as f:
        f.write(struct.pack("<i", len(entries)) + b"".join(entries))


def types_of(path):
    """name -> type. gguf's reader refuses the types that only ik_llama.cpp has; they are called IK and a number."""
    with open(path, "rb") as f:
        data = f.read(1 << 22)
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    at = 8

    def number(code="<Q"):
        nonlocal at
        at += struct.calcsize(code)
        return struct.unpack_from(code, data, at - struct.calcsize(code))[0]

    def text():
        nonlocal at
        n = number()
        at += n
        return data[at - n:at].decode()

    def skip(kind):
        nonlocal at
        if kind == 8:
            text()
        elif kind == 9:
            inner, n = number("<I"), number()
            for _ in range(n):
                skip(inner)
        else:
            at += sizes[kind]

    tensors, keys = number(), number()
    for _ in range(keys):
        text()
        skip(number("<I"))
    known, out = {int(t): t.name for t in gguf.GGMLQuantizationType}, {}
    for _ in range(tensors):
        name = text()
        dimensions = number("<I")
        at += 8 * dimensions
        kind = number("<I")
        at += 8
        out[name] = known.get(kind, f"IK{kind}")
    return out


def announced(quantize, options, *arguments):
    """name -> type, as llama-quantize says before it starts; making low-bit files takes minutes."""
    done = subprocess.run([quantize, "--dry-run", *options, *arguments, "2"], check=False, capture_output=True,
                          text=True)
    if done.returncode != 0:  # it refuses some types without an importance matrix
        return None
    out = {}
    for part in re.split(r"\[ *\d+/ *\d+\] +", done.stderr)[1:]:
        name, before = re.match(r"(\S+) - \[.*?\], type = *(\w+)", part).groups()
        after = re.search(r"converting to (\w+)", part)
        out[name] = (after.group(1) if after else before).upper()
    return out


def facts(c, tensors):
    return {"layers": c["num_hidden_layers"],
            "heads_per_kv_head": c["num_attention_heads"] // c["num_key_value_heads"],
            "experts": c.get("num_local_experts", c.get("num_experts", 0)),
            "tied": c["tie_word_embeddings"],
            "tensors": [{"name": t.name, "shape": [int(n) for n in t.shape][::-1]} for t in tensors]}


def main():
    quantize, freshet, out = sys.argv[1:]
    letters, models = {}, {}
    for label, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(folder, config)
            source, made = os.path.join(folder, "f16.gguf"), os.path.join(folder, "out.gguf")
            importance = os.path.join(folder, "imatrix.dat")
            subprocess.run([freshet, "convert", folder, "-o", source, "--type", "f16"], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            tensors = gguf.GGUFReader(source).tensors
            write_importance(importance, tensors)
            models[label] = dict(facts(config, tensors), types={})
            for recipe in RECIPES:
                for with_importance in (False, True):
                    options = ["--imatrix", importance] if with_importance else []
                    types = announced(quantize, options, source, made, recipe)
                    if types is None:
                        assert not with_importance, recipe
                        continue
                    if recipe in ("Q4_K_M", "Q3_K_M"):
                        subprocess.run([quantize, *options, source, made, recipe, "2"], check=True,
                                       capture_output=True)
                        written = types_of(made)
                        different = {n: (types[n], t) for n, t in written.items() if not t.startswith("IK") and types[n] != t.upper()}
                        assert not different, (recipe, different)
                    row = "".join(letters.setdefault(types[t.name], string.ascii_letters[len(letters)])
                                  for t in tensors)
                    models[label]["types"][recipe + (" imatrix" if with_importance else "")] = row
            print(label, len(models[label]["types"]))
    with open(out, "w") as f:
        json.dump({"letters": {v: k for k, v in letters.items()}, "models": models}, f,
                  separators=(",", ":"))


if __name__ == "__main__":
    main()
