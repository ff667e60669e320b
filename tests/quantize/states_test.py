"""Quantising models with states: their large matrices, and nothing else of the layers with states.

usage: states_test.py States

FRESHET_UNPACKED_DATA names the folder where tests/seeded_checkpoints.cc wrote its checkpoints.
"""
import json
import os
import random

from quantize_case import UNPACKED, QuantizeCase, main, read_tensors

SEEDED = os.path.join(UNPACKED, "seeded")
VOCABULARY = 96
# The matrices of each layer with states.
MODELS = {"lfm2": ("conv.in_proj", "conv.out_proj"), "mamba": ("mixer.in_proj", "mixer.x_proj", "mixer.out_proj"),
          "mamba2": ("mixer.in_proj", "mixer.out_proj"), "jamba": ("mamba.in_proj", "mamba.x_proj", "mamba.out_proj"),
          "falcon-h1": ("mamba.in_proj", "mamba.out_proj"), "bamba": ("mamba.in_proj", "mamba.out_proj"),
          "nemotron-h": ("mixer.in_proj", "mixer.out_proj"), "granitemoehybrid-dense": ("mamba.in_proj", "mamba.out_proj")}
KEPT = ("conv1d", "conv.conv", "A_log", ".D", "dt_bias", "dt_proj", "norm", "embed", "lm_head", "router")
# Schemes, their bits of evenly spaced integers, and the method.
SCHEMES = (("W8A8", 8, "rtn"), ("W4A16_G32", 4, "gptq"), ("W8A16_CHANNEL", 8, "awq"), ("FP8_DYNAMIC", 6, "rtn"))


class States(QuantizeCase):
    def ids(self, name="ids.json", windows=4, length=24, seed=3):
        rng = random.Random(seed)
        return self.write(name, json.dumps([[rng.randrange(3, VOCABULARY) for _ in range(length)]
                                            for _ in range(windows)]))

    def test_matrices_of_layers_with_states(self):
        ids = self.ids()
        for name, matrices in MODELS.items():
            model = os.path.join(SEEDED, name)
            base = self.logits(model, ids)
            before = read_tensors(os.path.join(model, "model.safetensors"))
            wanted = {t[:-len(".weight")] for t in before if any(t.endswith(m + ".weight") for m in matrices)}
            self.assertTrue(wanted, name)
            for scheme, bits, method in SCHEMES:
                if name == "lfm2" and scheme in ("W4A16_G32", "FP8_DYNAMIC"):
                    continue  # an MLP of 112 features has no whole groups
                with self.subTest(model=name, scheme=scheme):
                    out = self.path(f"{name}-{scheme}")
                    report = self.quantize(model, out, scheme, "--method", method, "--calibration", ids)
                    done = {linear["tensor"].removesuffix(".weight") for linear in report["linears"]}
                    self.assertLessEqual(wanted, done)
                    after = read_tensors(os.path.join(out, "model.safetensors"))
                    for tensor in before:
                        if any(part in tensor for part in KEPT) and method != "awq":
                            self.assertEqual(after[tensor], before[tensor], tensor)
                    error = self.distance(base, self.logits(out, ids))
                    self.assertGreater(error * 2 ** bits, 0.1)
                    self.assertLess(error * 2 ** bits, 32 if name == "jamba" else 16)  # other experts
                    if scheme == "W8A8":
                        served = self.distance(base, self.logits(out, ids, served=True))
                        self.assertLess(served * 2 ** bits, 48)

    def test_gguf_files_are_the_same_models(self):
        ids = self.ids()
        for name, architecture in (("lfm2", "lfm2"), ("mamba", "mamba"), ("mamba2", "mamba2")):
            model, out = os.path.join(SEEDED, name), self.path(name + ".gguf")
            self.succeeds("convert", model, "-o", out, "--type", "bf16")
            about = json.loads(self.succeeds("inspect", out, "--metadata"))
            self.assertEqual(about["general.architecture"], architecture)
            layers = json.loads(self.succeeds("inspect", out, "--json"))["layers"]
            self.assertEqual(layers, json.loads(self.succeeds("inspect", model, "--json"))["layers"])
            base = self.logits(model, ids)
            self.assertLess(self.distance(base, self.logits(out, ids)), 1e-6, name)
            # Small tensors stay as they are where matrices are quantised.
            small = self.path(name + "-q8.gguf")
            self.succeeds("convert", model, "-o", small, "--type", "Q8_0")
            self.assertLess(self.distance(base, self.logits(small, ids)), 0.05, name)

    def test_factors_of_keys_need_no_names_of_gguf_files(self):
        ids, model, out = self.ids(), os.path.join(SEEDED, "jamba"), self.path("scales.safetensors")
        self.succeeds("calibrate", model, ids, "--kv-scales", out)
        self.assertTrue(any(name.endswith(".k_channel_scale") for name in read_tensors(out)))
        self.assertIn("jamba", self.fails(2, "calibrate", model, ids, "-o", self.path("matrix.gguf")))


if __name__ == "__main__":
    main()
