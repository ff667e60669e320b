#!/usr/bin/env python3
"""Expected descriptions of published config.json files, as transformers reads them.

usage: golden_configs.py DIRECTORY OUT    needs torch and transformers (5.17)

Copies each supported configuration of DIRECTORY to OUT and writes OUT/expected.json:
{file: {facts}} and, for the others, {file: "unsupported"}. Rotary frequencies come from the
functions that transformers' own models call.
"""
import json
import os
import shutil
import sys

from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SUPPORTED = """llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 gemma3_text gemma3
phi3 gpt2 gpt_neox opt olmo2 granite starcoder2 stablelm cohere glm4 deepseek_v2 deepseek_v3
gpt_oss smollm3 olmo3 olmoe cohere2 exaone4 glm4_moe ernie4_5 ernie4_5_moe hunyuan_v1_dense seed_oss
apertus arcee nemotron phi phimoe falcon minimax_m2 granitemoe gpt_bigcode gptj""".split()
WINDOW_EVERYWHERE = ("mistral", "mixtral", "phi3", "starcoder2")


def frequencies(config, layer_type, head_dim):
    """[first, middle, last] inverse frequencies, how many, and the attention factor."""
    p = config.rope_parameters
    if layer_type is not None:
        p = p[layer_type]
    kind = p["rope_type"]
    if kind in ("default", "gptj"):
        dim = getattr(config, "rotary_dim", None) or int(head_dim * (p.get("partial_rotary_factor") or 1.0))
        f, scale = [(p.get("rope_theta") or 10000.0) ** (-2 * i / dim) for i in range(dim // 2)], 1.0
    else:
        f, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", layer_type=layer_type)
        f = f.tolist()
    return {"count": len(f), "ends": [f[0], f[len(f) // 2], f[-1]], "factor": float(scale)}


def windows(config, layers):
    window = getattr(config, "sliding_window", None) or 0
    if window >= config.max_position_embeddings:
        window = 0
    if config.model_type in WINDOW_EVERYWHERE:
        return [window] * layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * layers
    return [window if t == "sliding_attention" else 0 for t in types]


def facts(config):
    get = lambda *names: next((getattr(config, n) for n in names if getattr(config, n, None) is not None), None)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    mla = hasattr(config, "kv_lora_rank")
    head_dim = config.qk_head_dim if mla else get("head_dim") or config.hidden_size // heads
    out = {
        "layers": layers,
        "hidden": config.hidden_size,
        "vocab": config.vocab_size,
        "heads": heads,
        "kv_heads": heads if mla else get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "value_dim": config.v_head_dim if mla else head_dim,
        "context": config.max_position_embeddings,
        "tied": bool(config.tie_word_embeddings),
        "windows": windows(config, layers),
    }
    if getattr(config, "rope_parameters", None):
        nested = "full_attention" in config.rope_parameters
        rotated = config.qk_rope_head_dim if mla else head_dim
        kinds = ["full_attention", "sliding_attention"] if nested else [None]
        out["ropes"] = [frequencies(config, k, rotated) for k in kinds]
    experts = get("n_routed_experts", "num_local_experts", "num_experts")
    if experts:
        out["experts"] = experts
        out["experts_per_token"] = config.num_experts_per_tok
    return out


def main():
    source, out = sys.argv[1:3]
    expected = {}
    for name in sorted(os.listdir(source)):
        path = os.path.join(source, name)
        raw = json.load(open(path))
        if raw.get("model_type") not in SUPPORTED:
            if "architectures" in raw and "model_type" in raw and raw["model_type"] not in [
                json.load(open(os.path.join(out, n)))["model_type"] for n in expected if expected[n] == "unsupported"
            ]:
                shutil.copy(path, os.path.join(out, name))
                expected[name] = "unsupported"
            continue
        scaling = raw.get("rope_scaling") or {}
        if scaling.get("type") == "su":  # LongRoPE's first name, which 5.17 no longer takes
            scaling["type"] = "longrope"
        config = AutoConfig.for_model(**raw)
        shutil.copy(path, os.path.join(out, name))
        expected[name] = facts(getattr(config, "text_config", None) or config)
    json.dump(expected, open(os.path.join(out, "expected.json"), "w"), indent=None, separators=(",", ":"))
    print(len(expected), "configurations,", sum(v == "unsupported" for v in expected.values()), "unsupported")


main()
