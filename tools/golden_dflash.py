#!/usr/bin/env python3
"""Golden outputs of DFlash heads (arXiv:2602.06036), whose weights are a formula.

usage: golden_dflash.py TARGET OUT.json                       needs torch and safetensors

A plain computation in F32, written from the definition: the target's features give keys and values
at their positions, and the last known token and masks, embedded by the target, are queries at the
positions behind them. TARGET is the golden gemma3 as tests/seeded_checkpoints.cc writes it, whose
embedding is scaled and tied: the head reads it as it is stored. OUT holds the tensors (for each: shape, scale and offset; the formula
is that of tools/golden_seeded.py) and two configurations with, for each step: how many tokens are
known, how many drafts are wanted, the drafts, and the first logits of each of their rows.
src/speculative/dflash_test.cc reads it.
"""
import json
import sys

import torch
from golden_seeded import seeded
from safetensors.torch import load_file

HIDDEN, FF, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 3
VOCAB, MASK, BLOCK, WINDOW, EPS, THETA = 288, 281, 7, 8, 1e-6, 10000.0
TAPS = [0, 1]  # layers of the target, from 0
STEPS = [(5, 4), (11, 6), (12, 1), (23, 6)]  # tokens known, drafts
SHOWN = 6

BASE = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": HIDDEN,
    "intermediate_size": FF, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
    "max_position_embeddings": 512, "rms_norm_eps": EPS, "hidden_act": "silu", "attention_bias": False,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": WINDOW,
    "use_sliding_window": True, "num_target_layers": 3,
}
# As the first heads were published, and as later ones are.
CONFIGS = [
    {**BASE, "rope_theta": THETA, "block_size": BLOCK,
     "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS}},
    {**BASE, "rope_parameters": {"rope_theta": THETA, "rope_type": "default"}, "is_causal": False,
     "dflash_config": {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": TAPS,
                       "output_multiplier": 0.25, "final_logit_softcapping": 3.0,
                       "input_embedding_scale": 2.0}},
]


def tensors():
    described = {"fc.weight": [[HIDDEN, len(TAPS) * HIDDEN], 0.2, 0.0],
                 "hidden_norm.weight": [[HIDDEN], 0.3, 1.0], "norm.weight": [[HIDDEN], 0.3, 1.0]}
    for i in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": [HEADS * HEAD_DIM, HIDDEN], "self_attn.k_proj": [KV_HEADS * HEAD_DIM, HIDDEN],
            "self_attn.v_proj": [KV_HEADS * HEAD_DIM, HIDDEN], "self_attn.o_proj": [HIDDEN, HEADS * HEAD_DIM],
            "mlp.gate_proj": [FF, HIDDEN], "mlp.up_proj": [FF, HIDDEN], "mlp.down_proj": [HIDDEN, FF],
        }.items():
            described[f"layers.{i}.{name}.weight"] = [shape, 0.25, 0.0]
        for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN),
                           ("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM)):
            described[f"layers.{i}.{name}.weight"] = [[size], 0.3, 1.0]
    return described


def rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x, first):
    """x: [rows, heads, head_dim], at positions first, first + 1 ..."""
    half = HEAD_DIM // 2
    angle = (first + torch.arange(x.shape[0]))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def visible(config, layer, known, rows):
    """[rows, known + rows]: what each row of the block sees."""
    q = known + torch.arange(rows)[:, None]
    k = torch.arange(known + rows)[None]
    slides = config["layer_types"][layer] == "sliding_attention"
    seen = torch.ones(rows, known + rows, dtype=torch.bool)
    if config.get("is_causal", slides):
        seen &= k <= q
    if slides:
        seen &= (q - k < WINDOW) & (k - q < WINDOW)
    return seen


def head(w, config, table, last, drafts, features):
    """Logits of the rows of the masks."""
    known, rows = len(features), drafts + 1
    own = config["dflash_config"]
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = table[[last] + [MASK] * drafts] * own.get("input_embedding_scale", 1.0)
    for i in range(LAYERS):
        p = {n.removeprefix(f"layers.{i}.").removesuffix(".weight"): t for n, t in w.items()
             if n.startswith(f"layers.{i}.")}
        y = rms(x, p["input_layernorm"])
        both = torch.cat([context, y])
        q = rotate(rms((y @ p["self_attn.q_proj"].T).view(rows, HEADS, HEAD_DIM), p["self_attn.q_norm"]), known)
        k = rotate(rms((both @ p["self_attn.k_proj"].T).view(-1, KV_HEADS, HEAD_DIM), p["self_attn.k_norm"]), 0)
        v = (both @ p["self_attn.v_proj"].T).view(-1, KV_HEADS, HEAD_DIM)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM ** -0.5
        share = torch.softmax(scores.masked_fill(~visible(config, i, known, rows), float("-inf")), -1)
        x = x + torch.einsum("hqk,khd->qhd", share, v).reshape(rows, -1) @ p["self_attn.o_proj"].T
        y = rms(x, p["post_attention_layernorm"])
        x = x + (torch.nn.functional.silu(y @ p["mlp.gate_proj"].T) * (y @ p["mlp.up_proj"].T)
                 ) @ p["mlp.down_proj"].T
    logits = rms(x[1:], w["norm.weight"]) @ table.T * own.get("output_multiplier", 1.0)
    cap = own.get("final_logit_softcapping")
    return torch.tanh(logits / cap) * cap if cap else logits


def main():
    target, out = sys.argv[1:]
    table = load_file(f"{target}/model.safetensors")["model.embed_tokens.weight"].float()
    described = tensors()
    w = {n: seeded(n, *d).float() for n, d in described.items()}
    most = max(known for known, _ in STEPS)
    features = seeded("features", [most, len(TAPS) * HIDDEN], 1.5, 0.0).float()
    tokens = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(most)]
    heads = []
    for config in CONFIGS:
        steps = []
        for known, drafts in STEPS:
            logits = head(w, config, table, tokens[known - 1], drafts, features[:known - 1])
            best = logits.topk(2).values
            assert (best[:, 0] - best[:, 1]).min() > 2e-3, "a near tie: take other scales"
            steps.append({"known": known, "drafts": logits.argmax(-1).tolist(),
                          "logits": [[round(v, 5) for v in row[:SHOWN].tolist()] for row in logits]})
        heads.append({"config": config, "steps": steps})
    golden = {"tensors": described, "tokens": tokens, "features": 1.5, "heads": heads}
    with open(out, "w") as f:
        f.write(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
