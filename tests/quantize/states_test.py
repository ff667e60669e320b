"""Quantising models with states: their large matrices, and nothing else of the layers with states.

usage: states_test.py States

FRESHET_UNPACKED_DATA names the folder where tests/seeded_checkpoints.cc wrote its checkpoints.
"""
import array
import json
import os
import random
import shutil
import struct

from quantize_case import UNPACKED, QuantizeCase, bf16, load_safetensors, main, read_tensors, write_safetensors

SEEDED = os.path.join(UNPACKED, "seeded")
VOCABULARY = 96
# The matrices of each layer with states.
MODELS = {"lfm2": ("conv.in_proj", "conv.out_proj"), "mamba": ("mixer.in_proj", "mixer.x_proj", "mixer.out_proj"),
          "mamba2": ("mixer.in_proj", "mixer.out_proj"), "jamba": ("mamba.in_proj", "mamba.x_proj", "mamba.out_proj"),
          "falcon-h1": ("mamba.in_proj", "mamba.out_proj"), "bamba": ("mamba.in_proj", "mamba.out_proj"),
          "nemotron-h": ("mixer.in_proj", "mixer.out_proj"), "granitemoehybrid-dense": ("mamba.in_proj", "mamba.out_proj")}
KEPT = ("conv1d", "conv.conv", "A_log", ".D", "dt_bias", "dt_proj", "norm", "embed", "lm_head", "router")
# The architectures of GGUF files.
GGUF = {"lfm2": "lfm2", "lfm2-moe": "lfm2moe", "mamba": "mamba", "mamba2": "mamba2", "qwen3-next": "qwen3next", "qwen3-5": "qwen35",
        "qwen3-5-moe": "qwen35moe", "granitemoehybrid": "granitehybrid", "granitemoehybrid-dense": "granitehybrid",
        "bamba": "granitehybrid", "nemotron-h": "nemotron_h", "falcon-h1": "falcon-h1", "jamba": "jamba"}
SMALL = ("_norm", "conv1d", "shortconv.conv", "ffn_gate_inp")
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
        for name, architecture in GGUF.items():
            model, out = os.path.join(SEEDED, name), self.path(name + ".gguf")
            # Falcon-H1's multipliers go into its weights, which BF16 would round again.
            self.succeeds("convert", model, "-o", out, "--type", "f32" if name == "falcon-h1" else "bf16")
            about = json.loads(self.succeeds("inspect", out, "--metadata"))
            self.assertEqual(about["general.architecture"], architecture)
            layers = json.loads(self.succeeds("inspect", out, "--json"))["layers"]
            self.assertEqual(layers, json.loads(self.succeeds("inspect", model, "--json"))["layers"])
            # The logits are transformers'.
            golden = load_safetensors(os.path.join(model, "golden.safetensors"))
            ids = self.write("golden.json", json.dumps([list(golden[f"ids_{i}"][1]) for i in range(2)]))
            for i, got in enumerate(self.logits(out, ids)):
                want = golden[f"logits_{i}"][1]
                largest = max(abs(x) for x in want)
                self.assertLess(max(abs(x - y) for x, y in zip(want, got)), 2e-4 * largest, name)

    def test_granite_without_states_is_granite(self):
        source = os.path.join(SEEDED, "granitemoehybrid-dense")
        with open(os.path.join(source, "config.json"), encoding="utf-8") as f:
            config = json.load(f)
        attends = config["layer_types"].index("full_attention")
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
        for kind, reason in (("rope", None), ("nope", "position_embedding_type")):
            model, out = self.path(kind), self.path(kind + ".gguf")
            os.makedirs(model)
            config["position_embedding_type"] = kind
            self.write(os.path.join(kind, "config.json"), json.dumps(config))
            tensors = read_tensors(os.path.join(source, "model.safetensors"))
            made = {name: t for name, t in tensors.items() if ".layers." not in name}
            for name, tensor in tensors.items():
                if f".layers.{attends}." in name:
                    for layer in range(config["num_hidden_layers"]):
                        made[name.replace(f".layers.{attends}.", f".layers.{layer}.")] = tensor
            write_safetensors(os.path.join(model, "model.safetensors"), made)
            if reason:
                self.assertIn(reason, self.fails(2, "convert", model, "-o", out, "--type", "bf16"))
                continue
            self.succeeds("convert", model, "-o", out, "--type", "bf16")
            about = json.loads(self.succeeds("inspect", out, "--metadata"))
            self.assertEqual(about["general.architecture"], "granite")
            ids = self.ids()
            self.assertLess(self.distance(self.logits(model, ids), self.logits(out, ids)), 1e-5)

    def test_small_tensors_stay_where_matrices_are_quantised(self):
        ids = self.ids()
        for name in GGUF:
            model, out = os.path.join(SEEDED, name), self.path(name + "-q8.gguf")
            base = self.logits(model, ids)
            self.succeeds("convert", model, "-o", out, "--type", "Q8_0")
            tensors = json.loads(self.succeeds("inspect", out, "--tensors", "--json"))["tensors"]
            for tensor in tensors:
                if any(part in tensor["name"] for part in SMALL) or not tensor["name"].endswith("weight"):
                    self.assertEqual(tensor["format"], "F32", (name, tensor))
            self.assertTrue(any(t["format"] == "Q8_0" and "blk." in t["name"] for t in tensors), name)
            # These choose other experts; llama.cpp is as far from what they were.
            limit = {"jamba": 0.3, "qwen3-5-moe": 0.3, "qwen3-next": 0.8}.get(name, 0.1)
            self.assertLess(self.distance(base, self.logits(out, ids)), limit, name)

    def test_methods_write_gguf_files(self):
        ids = self.ids()
        for name in ("falcon-h1", "nemotron-h", "granitemoehybrid-dense", "bamba"):
            model, out = os.path.join(SEEDED, name), self.path(name + ".gguf")
            base = self.logits(model, ids)
            self.quantize(model, out, "Q8_0", "--calibration", ids)
            self.assertLess(self.distance(base, self.logits(out, ids)), 0.1, name)

    def test_methods_make_the_numbers_that_the_file_holds(self):
        """Falcon-H1's multipliers are in its weights; the delta nets' value heads are tiled in the columns of ssm_out."""
        ids = self.ids(windows=16, length=64)
        for name, tensors in (("falcon-h1", "ssm_in|ssm_out|attn_k|attn_output|ffn_gate|ffn_down"), ("qwen3-5", "ssm_out"),
                              ("qwen3-next", "ssm_out"), ("qwen3-5-moe", "ssm_out")):
            model = os.path.join(SEEDED, name)
            base, of = self.logits(model, ids), {}
            flags = ("--tensor-type", f"({tensors})=q4_0", "--tensor-type", ".=f32")
            self.succeeds("convert", model, "-o", self.path("convert.gguf"), "--type", "Q4_0", *flags)
            of["convert"] = self.logits(self.path("convert.gguf"), ids)
            for method in ("rtn", "gptq"):
                out = self.path(f"{method}.gguf")
                self.quantize(model, out, "Q4_0", "--method", method, "--calibration", ids, "--force", *flags)
                of[method] = self.logits(out, ids)
            os.remove(self.path("convert.gguf"))
            self.assertTrue(of["rtn"] == of["convert"], name)
            self.assertFalse(of["gptq"] == of["rtn"], name)
            if name in ("falcon-h1", "qwen3-5"):  # the others choose other experts, whatever the error
                self.assertLess(self.distance(base, of["gptq"]), self.distance(base, of["rtn"]), name)

    def changed(self, name, to, settings, change):
        """A model with other settings and tensors."""
        model = shutil.copytree(os.path.join(SEEDED, name), self.path(to))
        with open(os.path.join(model, "config.json"), encoding="utf-8") as f:
            config = json.load(f)
        config.update(settings)
        self.write(os.path.join(to, "config.json"), json.dumps(config))
        tensors = read_tensors(os.path.join(model, "model.safetensors"))
        change(tensors)
        write_safetensors(os.path.join(model, "model.safetensors"), tensors)
        return model

    def test_scales_of_channels_fit_the_numbers_of_the_file(self):
        def louder(tensors):
            less_one = any("linear_attn" in name for name in tensors)  # as Qwen's are stored
            for name, (kind, shape, data) in tensors.items():
                if ".layers." in name and name.endswith("layernorm.weight"):
                    values = [struct.unpack("<f", struct.pack("<I", v << 16))[0] for v in array.array("H", data)]
                    for channel in (3, 7, 11):
                        values[channel] = values[channel] * 6 + less_one * 5
                    tensors[name] = kind, shape, array.array("H", map(bf16, values)).tobytes()

        ids = self.ids(windows=16, length=64)
        for name in ("falcon-h1", "qwen3-5"):
            model = self.changed(name, name, {}, louder)
            base, error = self.logits(model, ids), {}
            for method in ("rtn", "awq", "gptq", "awq+gptq"):
                out = self.path(f"{name}-{method}.gguf")
                self.quantize(model, out, "Q4_0", "--method", method, "--calibration", ids)
                error[method] = self.distance(base, self.logits(out, ids))
            self.assertLess(error["awq"], error["rtn"], name)
            self.assertLess(error["awq+gptq"], error["rtn"], name)

    def test_what_gguf_files_cannot_hold_is_refused(self):
        def dense(tensors):
            hidden, stem = 64, "model.layers.0.mlp."
            for name in [name for name in tensors if name.startswith(stem)]:
                del tensors[name]
            for name, shape in (("gate", [96, hidden]), ("up", [96, hidden]), ("down", [hidden, 96])):
                tensors[f"{stem}{name}_proj.weight"] = "BF16", shape, bytes(2 * 96 * hidden)

        def biases(tensors):
            for name, (_, shape, _) in list(tensors.items()):
                if name.endswith(("mamba.in_proj.weight", "mamba.out_proj.weight")):
                    tensors[name.removesuffix("weight") + "bias"] = "BF16", shape[:1], bytes(2 * shape[0])

        for i, (name, settings, change, reason) in enumerate((
                ("qwen3-next", {"norm_topk_prob": False}, lambda _: None, "'norm_topk_prob' has no place"),
                ("qwen3-next", {"mlp_only_layers": [0], "intermediate_size": 96}, dense, "'mlp_only_layers'"),
                ("jamba", {"mamba_proj_bias": True}, biases, "mamba.in_proj.bias' has no place"))):
            model = self.changed(name, str(i), settings, change)
            self.logits(model, self.ids())  # itself it runs
            self.fails(2, "convert", model, "-o", self.path("o.gguf"), "--type", "bf16", says=reason)

    def test_factors_of_keys_need_no_names_of_gguf_files(self):
        ids, model, out = self.ids(), os.path.join(SEEDED, "baichuan-13b"), self.path("scales.safetensors")
        self.succeeds("calibrate", model, ids, "--kv-scales", out)
        self.assertTrue(any(name.endswith(".k_channel_scale") for name in read_tensors(out)))
        self.assertIn("baichuan", self.fails(2, "calibrate", model, ids, "-o", self.path("matrix.gguf")))


if __name__ == "__main__":
    main()
