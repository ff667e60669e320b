#!/usr/bin/env python3
"""A tiny llama as an INT8 checkpoint (W8A8), and what transformers makes of it in F64.

usage: golden_int8.py SOURCE OUT      needs torch and transformers

Makes OUT/{config.json, model.safetensors, golden.safetensors} of the golden model in SOURCE: its
linear layers but the head as compressed-tensors writes them (int-quantized, a BF16 scale a row). In
the reference each of these is a module of its own: a token's numbers are rounded to whole ones within +-127 of its
greatest magnitude, multiplied as whole numbers, and scaled. The ids are the golden model's.
"""
import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


class W8A8(torch.nn.Module):
    def __init__(self, codes, scale):
        super().__init__()
        self.codes, self.scale = codes.double(), scale.double()

    def forward(self, x):
        step = x.abs().amax(-1, keepdim=True) / 127
        return torch.round(x / step) @ self.codes.T * (step * self.scale.T)


def main():
    source, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, attn_implementation="eager")
    tensors = load_file(source / "model.safetensors")
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        w = tensors[name + ".weight"].float()
        scale = (w.abs().amax(-1, keepdim=True) / 127.5).bfloat16()
        codes = torch.clamp(torch.round(w / scale.float()), -128, 127).to(torch.int8)
        tensors[name + ".weight"], tensors[name + ".weight_scale"] = codes, scale
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, W8A8(codes, scale))
    golden = {}
    with torch.no_grad():
        for name, ids in load_file(source / "golden.safetensors").items():
            if not name.startswith("ids_"):
                continue
            number, all_ids = name[4:], ids
            golden[name] = ids
            golden["logits_" + number] = model(ids[None]).logits[0].float().contiguous()
            for _ in range(8):
                all_ids = torch.cat([all_ids, model(all_ids[None]).logits[0, -1:].argmax(-1)])
            golden["greedy_" + number] = all_ids[len(ids):].contiguous()
    config = json.loads((source / "config.json").read_text())
    args = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {**args, "dynamic": False, "strategy": "channel"},
            "input_activations": {**args, "dynamic": True, "strategy": "token"}}}}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(tensors, out / "model.safetensors")
    save_file(golden, out / "golden.safetensors")


if __name__ == "__main__":
    main()
