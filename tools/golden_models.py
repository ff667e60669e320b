#!/usr/bin/env python3
"""Tiny checkpoints with random weights and transformers' outputs for them.

usage: golden_models.py variants OUT [name ...]       needs torch and transformers (5.17)
       golden_models.py sources OUT [name ...]        ... (5.24): what golden_seeded.py starts from
       golden_models.py gguf OUT LLAMA_CPP [name ...]  ... and a checkout of llama.cpp

Makes OUT/<name>/{config.json, model.safetensors, golden.safetensors}. golden.safetensors holds
ids_i [T] I64, logits_i [T, V] F32 at every position and greedy_i [8] I64. Weights are BF16; the
reference computes in F32 on the same values. The variants are options that a type's usual
configuration does not touch. "gguf" keeps, in place of configuration and weights, the model.gguf
that llama.cpp's converter makes of them.
"""
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 96
LENGTHS = (3, 37)
GREEDY = 8


def make(model_type, **options):
    base = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return AutoConfig.for_model(model_type, **{**base, **options})


def dense(model_type, **options):
    base = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=64, max_position_embeddings=128, tie_word_embeddings=False)
    return make(model_type, **{**base, **options})


def rope(kind, **options):
    return dict(rope_theta=10000.0, rope_type=kind, **options)


def latent(model_type, **options):
    base = dict(num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=16,
                qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8, num_experts_per_tok=3,
                n_shared_experts=2, moe_intermediate_size=32, first_k_dense_replace=1,
                routed_scaling_factor=2.0, attention_bias=True)
    return dense(model_type, **{**base, **options})


VARIANTS = {
    "llama-dynamic": lambda: dense("llama", rope_parameters=rope("dynamic", factor=2.0), max_position_embeddings=16),
    "llama-yarn": lambda: dense("llama", rope_parameters=rope(
        "yarn", factor=8.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.5,
        beta_fast=16, beta_slow=2, truncate=False)),
    "stablelm-qk": lambda: dense("stablelm", qk_layernorm=True, use_parallel_residual=True, use_qkv_bias=True),
    "opt-post-norm": lambda: make(
        "opt", hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=16, do_layer_norm_before=False),
    "opt-bare": lambda: make(
        "opt", hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=32, enable_bias=False,
        layer_norm_elementwise_affine=False),
    "gpt2-scaled": lambda: make(
        "gpt2", n_embd=32, n_layer=3, n_head=4, n_positions=128, n_inner=48,
        scale_attn_by_inverse_layer_idx=True, activation_function="relu"),
    "phi3-long": lambda: dense(
        "phi3", original_max_position_embeddings=16, sliding_window=20,
        rope_parameters=rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 2.5, 3.0, 4.0])),
    "qwen2-window": lambda: dense("qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "qwen3-bias": lambda: dense("qwen3", head_dim=16, attention_bias=True),
    "qwen2-moe-mixed": lambda: dense(
        "qwen2_moe", num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, decoder_sparse_step=2, mlp_only_layers=[3],
        norm_topk_prob=True, qkv_bias=False),
    "gemma3-stretched": lambda: dense(
        "gemma3_text", num_hidden_layers=3, head_dim=16, sliding_window=10, query_pre_attn_scalar=64,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": dict(rope("linear", factor=8.0), rope_theta=1e6),
                         "sliding_attention": dict(rope("default"), rope_theta=5000.0)},
        final_logit_softcapping=20.0, tie_word_embeddings=True),
    "gemma2-uncapped": lambda: dense(
        "gemma2", head_dim=16, sliding_window=10, query_pre_attn_scalar=16,
        attn_logit_softcapping=None, final_logit_softcapping=None),
    "cohere-norms": lambda: dense("cohere", use_qk_norm=True, attention_bias=True, logit_scale=0.5),
    "glm4-quarter": lambda: dense("glm4", head_dim=16, partial_rotary_factor=0.25, attention_bias=False),
    "granite-bias": lambda: dense(
        "granite", embedding_multiplier=3.0, attention_multiplier=0.1, residual_multiplier=0.5,
        logits_scaling=3.0, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "starcoder2-window": lambda: dense("starcoder2", use_bias=False, sliding_window=10, tie_word_embeddings=True),
    "gpt-neox-serial": lambda: dense(
        "gpt_neox", num_key_value_heads=4, attention_bias=False, use_parallel_residual=False),
    "mixtral-window": lambda: dense("mixtral", num_local_experts=4, num_experts_per_tok=1, sliding_window=10, head_dim=24),
    "deepseek-v2-groups": lambda: latent(
        "deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2,
        rope_parameters=rope("yarn", factor=4.0, mscale=0.707, mscale_all_dim=0.707,
                             original_max_position_embeddings=32)),
    "deepseek-v3-direct": lambda: latent(
        "deepseek_v3", q_lora_rank=None, n_group=2, topk_group=1, norm_topk_prob=False, rope_interleave=False,
        rope_parameters=rope("yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.5, original_max_position_embeddings=32)),
    "gpt-oss-order": lambda: dense(
        "gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=3, sliding_window=10,
        attention_bias=False, layer_types=["full_attention", "sliding_attention"],
        rope_parameters=rope("default")),
}


GGUF = {
    "llama": lambda: dense("llama", num_hidden_layers=1, attention_bias=True),
    "llama3-rope": lambda: dense("llama", num_hidden_layers=1, head_dim=16, tie_word_embeddings=True, rope_parameters=rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)),
    "mixtral": lambda: dense("mixtral", num_hidden_layers=1, num_local_experts=4),
    "qwen2-moe": lambda: dense("qwen2_moe", num_hidden_layers=1, num_experts=4, num_experts_per_tok=2,
                               moe_intermediate_size=32, shared_expert_intermediate_size=32),
    "qwen3": lambda: dense("qwen3", num_hidden_layers=1, head_dim=16),
    "gemma2": lambda: dense("gemma2", head_dim=16, sliding_window=10, query_pre_attn_scalar=16, tie_word_embeddings=True),
    "gemma3": lambda: dense("gemma3_text", num_hidden_layers=6, hidden_size=16, num_attention_heads=2,
                            num_key_value_heads=1, intermediate_size=32, head_dim=16, sliding_window=10,
                            query_pre_attn_scalar=16, tie_word_embeddings=True),
    "phi3": lambda: dense("phi3", num_hidden_layers=1),
    "gpt2": lambda: make("gpt2", n_embd=32, n_layer=1, n_head=4, n_positions=64, n_ctx=64),
    "gpt-neox": lambda: dense("gpt_neox", num_hidden_layers=1, num_key_value_heads=4, rotary_pct=0.5),
    "olmo2": lambda: dense("olmo2", num_hidden_layers=1),
    "granite": lambda: dense("granite", num_hidden_layers=1, embedding_multiplier=3.0, attention_multiplier=0.1,
                             residual_multiplier=0.5, logits_scaling=4.0),
    "starcoder2": lambda: dense("starcoder2", num_hidden_layers=1),
    "stablelm": lambda: dense("stablelm", num_hidden_layers=1, use_qkv_bias=True),
    "cohere": lambda: dense("cohere", num_hidden_layers=1, use_qk_norm=True, tie_word_embeddings=True),
    "glm4": lambda: dense("glm4", num_hidden_layers=1, head_dim=16, partial_rotary_factor=0.5),
    "deepseek-v2": lambda: latent(
        "deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2, hidden_size=16,
        intermediate_size=32, moe_intermediate_size=16,
        rope_parameters=rope("yarn", factor=4.0, mscale=0.707, mscale_all_dim=0.707,
                             original_max_position_embeddings=32)),
    "deepseek-v3": lambda: latent("deepseek_v3", n_group=4, topk_group=2, hidden_size=16, intermediate_size=32,
                                  moe_intermediate_size=16, attention_bias=False),
    "gpt-oss": lambda: dense("gpt_oss", hidden_size=16, intermediate_size=32, head_dim=16, num_local_experts=4,
                             num_experts_per_tok=2, sliding_window=10),
}


def zamba2(**options):
    base = dict(hidden_size=32, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4,
                intermediate_size=48, max_position_embeddings=128, mamba_d_state=16, n_mamba_heads=4,
                mamba_ngroups=2, chunk_size=16, adapter_rank=8,
                layers_block_type=["hybrid" if i in (1, 2, 4, 5) else "mamba" for i in range(6)])
    return make("zamba2", **{**base, **options})


SOURCES = {
    "zamba2": lambda: zamba2(num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True),
    "zamba2-plain": lambda: zamba2(num_key_value_heads=2, num_mem_blocks=1, mamba_ngroups=1, add_bias_linear=True),
}


def spread_weights(model, generator, spread=1.2):
    """Wider than the default initialisation, so that a wrong operation shows in the logits."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() >= 2:
            p.copy_(noise * (spread / math.sqrt(p.shape[-1])))
        else:
            p.add_(noise * (0.1 if "norm" in name or "ln" in name or name.endswith("weight") else 0.05))
    for name, b in model.named_buffers():
        if "correction_bias" in name:
            b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    for p in model.parameters():
        p.copy_(p.to(torch.bfloat16).float())


@torch.no_grad()
def write(name, config, out, seed=11, lengths=LENGTHS, spread=1.2):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    spread_weights(model, generator, spread)
    half = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.bfloat16)
    state = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    half.load_state_dict(state)
    folder = os.path.join(out, name)
    half.save_pretrained(folder, safe_serialization=True)
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    golden = {}
    for i, length in enumerate(lengths):
        ids = torch.randint(3, VOCAB, (1, length), generator=generator)
        golden[f"ids_{i}"] = ids[0].clone()
        golden[f"logits_{i}"] = model(ids, use_cache=False).logits[0].float().contiguous()
        x = ids
        for _ in range(GREEDY):
            x = torch.cat([x, model(x, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
        golden[f"greedy_{i}"] = x[0, length:].clone()
    save_file(golden, os.path.join(folder, "golden.safetensors"))
    generation = os.path.join(folder, "generation_config.json")
    if os.path.exists(generation):
        os.remove(generation)
    print(name, json.dumps({"parameters": sum(p.numel() for p in model.parameters())}))


def convert(folder, out):
    """folder's checkpoint as out/model.gguf, without a vocabulary."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    load = ModelBase.load_hparams

    def hparams(directory, *rest, **options):
        h = load(directory, *rest, **options)
        if h.get("model_type") == "gpt_neox":  # the converter reads the older key only
            h["rotary_pct"] = h["rope_parameters"]["partial_rotary_factor"]
        return h

    ModelBase.load_hparams = staticmethod(hparams)
    directory = pathlib.Path(folder)
    with open(directory / "tokenizer.json", "w") as f:  # Gemma's converter counts its entries
        json.dump({"model": {"vocab": {str(i): i for i in range(VOCAB)}}, "added_tokens": []}, f)
    architecture = get_model_architecture(ModelBase.load_hparams(directory, False), ModelType.TEXT)
    model_class = get_model_class(architecture, mmproj=False)
    model_class.set_vocab = lambda self: None
    model_class(directory, gguf.LlamaFileType.MOSTLY_BF16, pathlib.Path(out) / "model.gguf").write()
    ModelBase.load_hparams = staticmethod(load)


def write_gguf(name, config, out):
    folder = os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        write(name, config, temporary)
        made = os.path.join(temporary, name)
        shutil.copy(os.path.join(made, "golden.safetensors"), folder)
        convert(made, folder)


def main():
    kind, out, rest = sys.argv[1], sys.argv[2], sys.argv[3:]
    torch.use_deterministic_algorithms(True)
    if kind == "gguf":
        sys.path[:0] = [rest[0], os.path.join(rest[0], "gguf-py")]
    chosen, names = {"variants": (VARIANTS, rest), "sources": (SOURCES, rest), "gguf": (GGUF, rest[1:])}[kind]
    for name, config in chosen.items():
        if names and name not in names:
            continue
        if kind == "sources":
            write(name, config(), out, lengths=(9, 24), spread=0.8)
        else:
            (write if kind == "variants" else write_gguf)(name, config(), out)


main()
