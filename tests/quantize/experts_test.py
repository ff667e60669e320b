"""Second moments of experts, a few at a time: less memory, the same bits."""
import array
import json
import os
import random
import subprocess
import unittest

import quantize_case
from quantize_case import FRESHET, LAYER, QuantizeCase, bf16, llama_config, write_safetensors

EXPERTS, HIDDEN, FFN, LAYERS = 16, 128, 512, 2


def random_mixtral(folder):
    rng = random.Random(1)
    config = llama_config(HIDDEN, FFN, LAYERS, 4, 2)
    config.update({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": EXPERTS,
                   "num_experts_per_tok": 2, "sliding_window": None})
    numbers = [bf16(rng.gauss(0, 0.06)) for _ in range(4096)]

    def matrix(rows, cols):
        return ("BF16", [rows, cols], array.array("H", rng.choices(numbers, k=rows * cols)).tobytes())

    norm = ("BF16", [HIDDEN], array.array("H", [bf16(1.0)] * HIDDEN).tobytes())
    rows = quantize_case.VOCABULARY
    tensors = {"model.embed_tokens.weight": matrix(rows, HIDDEN), "model.norm.weight": norm,
               "lm_head.weight": matrix(rows, HIDDEN)}
    for layer in range(LAYERS):
        stem = LAYER(layer)
        for name, shape in (("q", (HIDDEN, HIDDEN)), ("k", (HIDDEN // 2, HIDDEN)), ("v", (HIDDEN // 2, HIDDEN)),
                            ("o", (HIDDEN, HIDDEN))):
            tensors[f"{stem}self_attn.{name}_proj.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[stem + name + ".weight"] = norm
        tensors[stem + "block_sparse_moe.gate.weight"] = matrix(EXPERTS, HIDDEN)
        for e in range(EXPERTS):
            for name, shape in (("w1", (FFN, HIDDEN)), ("w2", (HIDDEN, FFN)), ("w3", (FFN, HIDDEN))):
                tensors[f"{stem}block_sparse_moe.experts.{e}.{name}.weight"] = matrix(*shape)
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    return folder


class Experts(QuantizeCase):
    def run_once(self, model, out, ids, memory):
        """The report, and the most memory that the program took."""
        with open(self.path("report.json"), "w") as report:
            process = subprocess.Popen([FRESHET, "quantize", model, "-o", out, "--scheme", "W4A16_G32", "--method",
                                        "gptq", "--calibration", ids, "--memory", memory, "--json", "-t", "2"],
                                       stdout=report, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(process.returncode, 0)
        with open(self.path("report.json")) as f:
            return json.load(f), usage.ru_maxrss * 1024

    def test_one_at_a_time(self):
        model, ids = random_mixtral(self.path("m")), self.ids(windows=16)
        together, most = self.run_once(model, self.path("together"), ids, "1GiB")
        alone, least = self.run_once(model, self.path("alone"), ids, "1MiB")
        self.assertEqual(together["linears"], alone["linears"])
        self.assertEqual(self.files(self.path("together")), self.files(self.path("alone")))
        notes = [line.get("note", "") for line in alone["linears"] if "experts" in line["tensor"]]
        shared = sum("few tokens" in note for note in notes)
        self.assertTrue(0 < shared < len(notes), shared)  # both kinds of experts
        moments = EXPERTS * 4 * (HIDDEN ** 2 + FFN ** 2)
        # Other phases take about as much as the moments of all experts, which hides a part of them.
        self.assertGreater(most - least, moments / 4)


if __name__ == "__main__":
    quantize_case.main()
