"""What the tests of freshet quantize share: small models made here, and the distance of their logits."""
import array
import glob
import json
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../cli"))

from cli_test import FRESHET, GOLDEN, UNPACKED, Case, load_safetensors, run  # noqa: E402

VOCABULARY = 288
LAYER = "model.layers.{}.".format
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def bf16(value):
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            f.write(data)


def read_tensors(path):
    """name -> (dtype, shape, bytes)"""
    with open(path, "rb") as f:
        data = f.read()
    size = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            out[name] = (entry["dtype"], entry["shape"], data[8 + size + first:8 + size + last])
    return out


def llama_config(hidden, ffn, layers, heads, kv_heads, vocabulary=VOCABULARY):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
            "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads,
            "vocab_size": vocabulary, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "hidden_act": "silu",
            "tie_word_embeddings": False}


def random_llama(folder, hidden=256, ffn=512, layers=2, heads=4, kv_heads=2, seed=1):
    """A Llama in BF16. Some input channels are louder than others, as in models that were trained."""
    rng = random.Random(seed)
    config = llama_config(hidden, ffn, layers, heads, kv_heads)
    table = {}

    def matrix(rows, cols, deviation):
        if deviation not in table:
            table[deviation] = [bf16(rng.gauss(0, deviation)) for _ in range(4096)]
        return ("BF16", [rows, cols], array.array("H", rng.choices(table[deviation], k=rows * cols)).tobytes())

    def norm():
        values = [bf16(4.0 if rng.random() < 0.06 else rng.uniform(0.5, 1.2)) for _ in range(hidden)]
        return ("BF16", [hidden], array.array("H", values).tobytes())

    kv = hidden // heads * kv_heads
    shapes = dict(zip(LINEARS, ((hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden),
                                (ffn, hidden), (ffn, hidden), (hidden, ffn))))
    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, hidden, 1.0)}
    for layer in range(layers):
        for name, (rows, cols) in shapes.items():
            tensors[LAYER(layer) + name + ".weight"] = matrix(rows, cols, round(cols ** -0.5, 4))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[LAYER(layer) + name + ".weight"] = norm()
    tensors["model.norm.weight"] = norm()
    tensors["lm_head.weight"] = matrix(VOCABULARY, hidden, round(hidden ** -0.5, 4))
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    return folder


class QuantizeCase(Case):
    """Errors of one program call have one line; the reason comes last where notes come before it."""

    def ids(self, name="ids.json", windows=6, length=40, seed=3):
        rng = random.Random(seed)
        lists = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(windows)]
        return self.write(name, json.dumps(lists))

    def quantize(self, model, output, scheme, *flags, **options):
        out = self.succeeds("quantize", model, "-o", output, "--scheme", scheme, "--json", *flags, **options)
        self.assertFalse(os.path.exists(output + ".partial"))
        return json.loads(out)

    def interrupted(self, command, output, parts=1):
        """Ctrl-C as soon as some parts are there; what it printed. A run that ends first is begun again."""
        for _ in range(10):
            process = subprocess.Popen([FRESHET, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            end = time.time() + 300
            while process.poll() is None and len(glob.glob(output + ".partial/part-*.safetensors")) < parts:
                self.assertLess(time.time(), end)
                time.sleep(0.002)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=300)
            if process.returncode != 0:
                self.assertEqual(process.returncode, 130, errors)
                self.assertIn("the same command continues there", errors)
                return out
            shutil.rmtree(output) if os.path.isdir(output) else os.remove(output)
        self.fail("every run finished before it could be interrupted")

    def logits(self, model, ids, served=False):
        out = self.path("logits.safetensors")
        flags = () if served else ("--reference",)  # served: activations are rounded as the format's kernels do
        self.succeeds("eval", "logits", model, "--ids", ids, "-o", out, *flags)
        tensors = load_safetensors(out)
        return [tensors[f"logits_{i}"][1] for i in range(len(tensors))]

    def distance(self, base, other):
        """The error's root mean square in units of the logits'."""
        error = energy = 0.0
        for a, b in zip(base, other):
            self.assertEqual(len(a), len(b))
            error += math.fsum((x - y) * (x - y) for x, y in zip(a, b))
            energy += math.fsum(x * x for x in a)
        return math.sqrt(error / energy)

    def files(self, folder):
        out = {}
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), "rb") as f:
                out[name] = f.read()
        return out

    def copy(self, golden, name):
        return shutil.copytree(os.path.join(GOLDEN, golden), self.path(name))

    def left(self):
        return sorted(os.listdir(self.folder))


def main():
    unittest.main(verbosity=1)
