#!/usr/bin/env python3
"""Golden outputs of a P-EAGLE head (arXiv:2602.01469), whose weights are a formula.

usage: golden_heads.py OUT.json                               needs torch

A plain computation in F32, written from the definition: EAGLE-3's input, several layers, and rows
of the mask token with learned features behind the last known row. OUT holds the head's config.json,
its tensors (for each: shape, scale and offset; the formula is that of tools/golden_seeded.py), d2t,
and for each step: how many tokens are known, how many drafts are wanted, the drafts as ids of the
target, and the first logits of each of their rows. src/speculative/parallel_head_test.cc reads it.
"""
import json
import sys

import torch
from golden_seeded import seeded

HIDDEN, FF, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 3
TARGET_VOCAB, DRAFT_VOCAB, TAPS = 288, 40, 2
MASK = TARGET_VOCAB  # behind the target's vocabulary: the head has an embedding of its own
STEPS = [(9, 4), (11, 5), (12, 1), (17, 6)]  # tokens known, drafts
SHOWN = 6

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
    "intermediate_size": FF, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": TARGET_VOCAB,
    "draft_vocab_size": DRAFT_VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "ptd_token_id": MASK,
    "eagle_aux_hidden_state_layer_ids": [0, 1],
}


def tensors():
    width = TAPS * HIDDEN
    described = {
        "embed_tokens.weight": [[TARGET_VOCAB + 1, HIDDEN], 1.0, 0.0],
        "fc.weight": [[HIDDEN, width], 0.2, 0.0],
        "mask_hidden": [[1, width], 1.0, 0.0],
        "layers.0.hidden_norm.weight": [[HIDDEN], 0.3, 1.0],
        "norm.weight": [[HIDDEN], 0.3, 1.0],
        "lm_head.weight": [[DRAFT_VOCAB, HIDDEN], 0.5, 0.0],
    }
    for i in range(LAYERS):
        size = 2 * HIDDEN if i == 0 else HIDDEN
        for name, shape in {
            "self_attn.q_proj": [HEADS * HEAD_DIM, size], "self_attn.k_proj": [KV_HEADS * HEAD_DIM, size],
            "self_attn.v_proj": [KV_HEADS * HEAD_DIM, size], "self_attn.o_proj": [HIDDEN, HEADS * HEAD_DIM],
            "mlp.gate_proj": [FF, HIDDEN], "mlp.up_proj": [FF, HIDDEN], "mlp.down_proj": [HIDDEN, FF],
        }.items():
            described[f"layers.{i}.{name}.weight"] = [shape, 0.3, 0.0]
        for name in ("input_layernorm", "post_attention_layernorm"):
            described[f"layers.{i}.{name}.weight"] = [[HIDDEN], 0.3, 1.0]
    return described


def rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight


def rotate(x):
    """x: [rows, heads, head_dim], at positions 0, 1, 2 ..."""
    half = HEAD_DIM // 2
    angle = torch.arange(x.shape[0])[:, None] * CONFIG["rope_theta"] ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def head(w, ids, features):
    """Logits of all rows: a row has the token behind its position, and the features at it."""
    x = features @ w["fc.weight"].T
    rows = len(ids)
    causal = torch.full((rows, rows), float("-inf")).triu(1)
    for i in range(LAYERS):
        p = {n.removeprefix(f"layers.{i}.").removesuffix(".weight"): t for n, t in w.items()
             if n.startswith(f"layers.{i}.")}
        if i == 0:
            own = torch.cat([rms(w["embed_tokens.weight"][ids], p["input_layernorm"]),
                             rms(x, p["hidden_norm"])], -1)
        else:
            own = rms(x, p["input_layernorm"])
        q = rotate((own @ p["self_attn.q_proj"].T).view(rows, HEADS, HEAD_DIM))
        k = rotate((own @ p["self_attn.k_proj"].T).view(rows, KV_HEADS, HEAD_DIM))
        v = (own @ p["self_attn.v_proj"].T).view(rows, KV_HEADS, HEAD_DIM)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        share = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM ** -0.5 + causal, -1)
        x = x + torch.einsum("hqk,khd->qhd", share, v).reshape(rows, -1) @ p["self_attn.o_proj"].T
        own = rms(x, p["post_attention_layernorm"])
        x = x + (torch.nn.functional.silu(own @ p["mlp.gate_proj"].T) * (own @ p["mlp.up_proj"].T)
                 ) @ p["mlp.down_proj"].T
    return rms(x, w["norm.weight"]) @ w["lm_head.weight"].T


def main():
    described = tensors()
    w = {n: seeded(n, *d).float() for n, d in described.items()}
    most = max(known for known, _ in STEPS)
    features = seeded("features", [most, TAPS * HIDDEN], 1.5, 0.0).float()
    tokens = [(7 * i * i + 3 * i + 5) % TARGET_VOCAB for i in range(most)]
    d2t = [6 * i for i in range(DRAFT_VOCAB)]
    steps = []
    for known, drafts in STEPS:
        ids = tokens[1:known] + [MASK] * (drafts - 1)
        masks = w["mask_hidden"].expand(drafts - 1, -1)
        logits = head(w, ids, torch.cat([features[:known - 1], masks]))[-drafts:]
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-2, "a near tie: take other scales"
        steps.append({"known": known, "drafts": [i + d2t[i] for i in logits.argmax(-1).tolist()],
                      "logits": [[round(v, 5) for v in row[:SHOWN].tolist()] for row in logits]})
    golden = {"config": CONFIG, "tensors": described, "d2t": d2t, "tokens": tokens, "features": 1.5,
              "steps": steps}
    with open(sys.argv[1], "w") as f:
        f.write(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
