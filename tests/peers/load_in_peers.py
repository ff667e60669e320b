"""Loads folders that `freshet quantize` wrote in transformers (with compressed-tensors or bitsandbytes) and
compares the logits with Freshet's reference path.

Needs: torch, transformers, compressed-tensors and bitsandbytes; `make test-peers` installs them.
usage: load_in_peers.py FRESHET
"""
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

IDS = [1] + list(range(3, 60))
# Scheme, format, and how far logits may be apart, as a share of the largest: where transformers computes in
# BF16, much. Activations stay as they are: the reference path does not quantise them.
# transformers 5.24 with compressed-tensors 0.20 fails on packed zero points (_ASYM), also on its own files.
CASES = [
    ("W4A16_G32", "compressed-tensors", 1e-4),
    ("W4A16_CHANNEL", "compressed-tensors", 1e-4),
    ("W8A16_G32", "compressed-tensors", 1e-4),
    ("W2A16_G32", "compressed-tensors", 1e-4),
    ("W3A16_G32", "compressed-tensors", 1e-4),
    ("W5A16_G32", "compressed-tensors", 1e-4),
    ("W6A16_G32", "compressed-tensors", 1e-4),
    ("W8A8", "compressed-tensors", 1e-4),
    ("FP8_DYNAMIC", "compressed-tensors", 1e-4),
    ("FP8_BLOCK", "compressed-tensors", 3e-2),
    ("NVFP4A16", "compressed-tensors", 3e-2),
    ("MXFP4A16", "compressed-tensors", 3e-2),
    ("MXFP8A16", "compressed-tensors", 3e-2),
    ("NF4", "bitsandbytes", 2e-2),
    ("NF4_PLAIN", "bitsandbytes", 2e-2),
]


def logits_of(freshet, model, folder):
    ids, out = folder / "ids.json", folder / "logits.safetensors"
    ids.write_text(json.dumps([IDS]))
    subprocess.run([freshet, "eval", "logits", model, "--ids", ids, "-o", out, "--reference"], check=True,
                   capture_output=True)
    data = out.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    entry = json.loads(data[8:8 + size])["logits_0"]
    first, last = entry["data_offsets"]
    return np.frombuffer(data[8 + size + first:8 + size + last], dtype=np.float32).reshape(entry["shape"])


def small_llama(folder):
    """Two layers of random weights."""
    rng = np.random.default_rng(1)
    hidden, ff, vocab = 256, 512, 300
    tensors = {"model.embed_tokens.weight": rng.normal(0, 0.5, (vocab, hidden)),
               "lm_head.weight": rng.normal(0, 0.08, (vocab, hidden)), "model.norm.weight": np.ones(hidden)}
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (128, hidden),
              "self_attn.v_proj": (128, hidden), "self_attn.o_proj": (hidden, hidden),
              "mlp.gate_proj": (ff, hidden), "mlp.up_proj": (ff, hidden), "mlp.down_proj": (hidden, ff)}
    for layer in range(2):
        stem = f"model.layers.{layer}."
        for name, shape in shapes.items():
            tensors[f"{stem}{name}.weight"] = rng.normal(0, shape[1] ** -0.5, shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}{norm}.weight"] = np.ones(hidden)
    folder.mkdir()
    save_file({name: t.astype(np.float32) for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": ff, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 32, "vocab_size": vocab, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32"}))
    return folder


def leave_activations(path):
    config = json.loads(path.read_text())
    for group in config["quantization_config"].get("config_groups", {}).values():
        group["input_activations"] = None
    path.write_text(json.dumps(config))


def main():
    freshet = sys.argv[1]
    failed = 0
    for scheme, form, most in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            model = small_llama(folder / "model")
            out = folder / "out"
            made = subprocess.run([freshet, "quantize", model, "-o", out, "--scheme", scheme, "--format", form],
                                  capture_output=True, text=True, check=False)
            if made.returncode != 0:
                print(f"{scheme:18} {form:20} FAILED: {made.stderr.strip()}")
                failed += 1
                continue
            try:
                leave_activations(out / "config.json")
                dtype = torch.float32 if most < 1e-2 else torch.bfloat16
                peer = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
                with torch.no_grad():
                    theirs = peer(torch.tensor([IDS])).logits[0].float().numpy()
            except Exception as error:  # whatever the peer throws is the finding
                print(f"{scheme:18} {form:20} FAILED to load: {type(error).__name__}: {error}")
                failed += 1
                continue
            ours = logits_of(freshet, out, folder)
            apart = float(np.abs(ours - theirs).max() / np.abs(ours).max())
            failed += apart > most
            print(f"{scheme:18} {form:20} {apart:.2e} {'FAILED' if apart > most else 'ok'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
