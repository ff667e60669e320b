"""Quantising gated delta nets (Qwen3-Next, Qwen3.5), lightning attention (MiniMax) and shared blocks (Zamba2).

usage: hybrids_test.py Hybrids|SharedBlocks

FRESHET_UNPACKED_DATA names the folder where tests/seeded_checkpoints.cc wrote its checkpoints.
"""
import array
import json
import math
import os
import random
import shutil
import struct

from quantize_case import UNPACKED, QuantizeCase, bf16, main, read_tensors, write_safetensors

SEEDED = os.path.join(UNPACKED, "seeded")
VOCABULARY = 96
DELTA = ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj")
# Of each model: matrices of layers with states that are quantised, and what stays as it is.
QUANTISED = {"qwen3-next": DELTA, "qwen3-5": DELTA, "qwen3-5-moe": DELTA,
             "minimax": ("qkv_proj", "output_gate", "out_proj"),
             "zamba2": ("in_proj", "out_proj", "linear", "_list.0.0", "_list.3.1", "gate_up_proj", "o_proj"),
             "zamba2-plain": ("in_proj", "out_proj", "linear", "gate_up_proj", "o_proj")}
KEPT = ("in_proj_ba", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias", "mamba.D", "norm", "embed", "lm_head",
        "mlp.gate.", "block_sparse_moe.gate", "shared_expert_gate")


def f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def numbers(tensor):
    kind, _, data = tensor
    if kind == "F16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    if kind == "BF16":
        return [struct.unpack("<f", struct.pack("<I", v << 16))[0] for v in array.array("H", data)]
    return array.array({"F32": "f", "I8": "b", "I32": "i", "F8_E4M3": "B"}[kind], data).tolist()


def e4m3(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0 ** -9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 128 else size


def dequantised(tensors, stem):
    """[rows, cols] of a matrix that compressed-tensors stores, as F32."""
    scale_kind, (rows, groups), _ = scales = tensors[stem + ".weight_scale"]
    factors = numbers(scales)
    if stem + ".weight_packed" in tensors:  # 4 bits, lowest first, each plus 8
        _, (_, words), _ = packed = tensors[stem + ".weight_packed"]
        codes = [(word >> 4 * i & 15) - 8 for word in numbers(packed) for i in range(8)]
        cols = 8 * words
    else:
        kind, (_, cols), _ = stored = tensors[stem + ".weight"]
        codes = numbers(stored) if kind == "I8" else [e4m3(c) for c in numbers(stored)]
    group = cols // groups
    values = [f32(codes[r * cols + c] * factors[r * groups + c // group]) for r in range(rows) for c in range(cols)]
    return "F32", [rows, cols], array.array("f", values).tobytes()


class HybridCase(QuantizeCase):
    def ids(self, name="ids.json", windows=8, length=40, seed=3):
        rng = random.Random(seed)
        return self.write(name, json.dumps([[rng.randrange(3, VOCABULARY) for _ in range(length)]
                                            for _ in range(windows)]))

    def model(self, name):
        return os.path.join(SEEDED, name)

    def without_quantisation(self, folder, to):
        """The same numbers as a model in F32."""
        tensors, out = read_tensors(os.path.join(folder, "model.safetensors")), {}
        for name, tensor in tensors.items():
            stem = name.removesuffix("_scale").removesuffix("_packed").removesuffix("_shape").removesuffix(".weight")
            if stem + ".weight_scale" in tensors:
                out[stem + ".weight"] = dequantised(tensors, stem)
            else:
                out[name] = tensor
        with open(os.path.join(folder, "config.json")) as f:
            config = json.load(f)
        del config["quantization_config"], config["freshet"]
        os.makedirs(to)
        with open(os.path.join(to, "config.json"), "w") as f:
            json.dump(config, f)
        write_safetensors(os.path.join(to, "model.safetensors"), out)
        return to

    def check_same_numbers(self, model, scheme, method, ids, *flags):
        """The logits of the file are those of its numbers in F32, bit for bit; returns the report and the error."""
        out = self.path(f"{os.path.basename(model)}-{scheme}-{method}")
        report = self.quantize(model, out, scheme, "--method", method, "--calibration", ids, *flags)
        got = self.logits(out, ids)
        self.assertEqual(got, self.logits(self.without_quantisation(out, out + "-f32"), ids))
        return report, self.distance(self.logits(model, ids), got)


class Hybrids(HybridCase):
    def test_the_file_holds_what_was_measured(self):
        ids = self.ids()
        # Other experts are chosen where two are nearly equal, and then logits differ much.
        for name, scheme, method, bits, most in (
                ("qwen3-next", "W8A8", "rtn", 8, 128), ("qwen3-next", "W8A8", "gptq", 8, 128),
                ("qwen3-5", "W4A16_G32", "gptq", 4, 8), ("qwen3-5", "W4A16_G32", "awq", 4, 8),
                ("qwen3-5", "FP8_DYNAMIC", "rtn", 6, 16), ("qwen3-5-moe", "W4A16_G32", "rtn", 4, 16),
                ("minimax", "W4A16_G32", "awq+gptq", 4, 16), ("minimax", "FP8_DYNAMIC", "rtn", 6, 16),
                ("zamba2", "W8A8", "gptq", 8, 16), ("zamba2-plain", "W8A8", "smoothquant", 8, 16)):
            with self.subTest(model=name, scheme=scheme, method=method):
                report, error = self.check_same_numbers(self.model(name), scheme, method, ids)
                self.assertEqual(report["method"], method)
                self.assertGreater(error * 2 ** bits, 0.1)
                self.assertLess(error * 2 ** bits, most)

    def test_factors_of_steps_that_others_quantised(self):
        """We leave them; some published files do not."""
        ids = self.ids()
        for name, modules in (("qwen3-next", ("in_proj_ba",)), ("qwen3-5", ("in_proj_a", "in_proj_b"))):
            with self.subTest(model=name):
                out = self.path(name)
                self.quantize(self.model(name), out, "W8A8", "--method", "rtn", "--calibration", ids)
                before = self.logits(out, ids)
                path = os.path.join(out, "model.safetensors")
                tensors = read_tensors(path)
                stems = [t.removesuffix(".weight") for t in tensors
                         if t.endswith(tuple(module + ".weight" for module in modules))]
                self.assertEqual(len(stems), 3 * len(modules))
                for stem in stems:
                    values, (rows, cols) = numbers(tensors[stem + ".weight"]), tensors[stem + ".weight"][1]
                    scales = [f32(max(map(abs, values[r * cols:(r + 1) * cols])) / 127) for r in range(rows)]
                    codes = array.array("b", (round(v / scales[i // cols]) for i, v in enumerate(values)))
                    tensors[stem + ".weight"] = ("I8", [rows, cols], codes.tobytes())
                    tensors[stem + ".weight_scale"] = ("F32", [rows, 1], array.array("f", scales).tobytes())
                write_safetensors(path, tensors)
                with open(os.path.join(out, "config.json")) as f:
                    config = json.load(f)
                config["quantization_config"]["ignore"] = [m for m in config["quantization_config"]["ignore"]
                                                           if m not in stems]
                with open(os.path.join(out, "config.json"), "w") as f:
                    json.dump(config, f)
                after = self.logits(out, ids)
                self.assertNotEqual(after, before)
                self.assertEqual(after, self.logits(self.without_quantisation(out, out + "-f32"), ids))

    def test_what_is_quantised_and_what_stays(self):
        ids = self.ids()
        for name, matrices in QUANTISED.items():
            with self.subTest(model=name):
                model, out = self.model(name), self.path(name)
                report = self.quantize(model, out, "W8A8", "--method", "rtn", "--calibration", ids)
                before = read_tensors(os.path.join(model, "model.safetensors"))
                after = read_tensors(os.path.join(out, "model.safetensors"))
                wanted = {t for t in before if t.endswith(tuple(m + ".weight" for m in matrices))}
                self.assertTrue(wanted)
                done = [linear["tensor"] for linear in report["linears"]]
                self.assertEqual(len(done), len(set(done)))
                self.assertLessEqual(wanted, set(done))
                kept = [t for t in before if any(part in t for part in KEPT)]
                self.assertTrue(kept)
                for tensor in kept:
                    self.assertEqual(after[tensor], before[tensor], tensor)
                self.assertEqual(set(before) - set(done) - set(kept) - {t for t in before if t.endswith("bias")}, set())
                with open(os.path.join(out, "config.json")) as f:
                    ignored = json.load(f)["quantization_config"]["ignore"]
                if name.startswith("qwen3"):
                    stays = ("in_proj_ba",) if name == "qwen3-next" else ("in_proj_a", "in_proj_b")
                    for module in stays:
                        self.assertIn("model.layers.0.linear_attn." + module, ignored)

    def test_feedback_gains(self):
        """The error of outputs on the calibration text, and of logits on another."""
        ids, other = self.ids(windows=24, length=64), self.ids("other.json", windows=16, seed=4)
        flags = {"qwen3-next": ("--ignore", "down_proj"), "zamba2": ("--ignore", "adapter|down_proj"),
                 "zamba2-plain": ("--ignore", "adapter|down_proj")}
        for name in QUANTISED:
            errors, losses, base = {}, {}, self.logits(self.model(name), other)
            for method in ("rtn", "gptq"):
                out = self.path(f"{name}-{method}")
                report = self.quantize(self.model(name), out, "W4A16_G32", "--method", method, "--calibration", ids,
                                       *flags.get(name, ()))
                errors[method] = self.distance(base, self.logits(out, other))
                losses[method] = report["mean_relative_error"]
            with self.subTest(model=name, errors=errors, losses=losses):
                self.assertLess(losses["gptq"], 0.9 * losses["rtn"])
                if "qwen3-next" not in name and "moe" not in name:  # those choose other experts
                    self.assertLess(errors["gptq"], errors["rtn"])

    def test_scales_are_folded(self):
        """Scaled channels change the logits by no more than rounding: a wrong fold would show."""
        ids = self.ids()
        # Where norms have loud channels, and what gets the inverse scales.
        for name, changes in (("qwen3-5", ("input_layernorm", "in_proj_a", "in_proj_b")),
                              ("qwen3-next", ("input_layernorm", "in_proj_ba", "mlp.gate.")),
                              ("minimax", ("self_attn.norm",)),
                              ("zamba2", ("input_layernorm", "pre_ff_layernorm", "mamba.norm", "linear_q_adapter_list",
                                          "gate_up_proj_adapter_list.0.0", "gate_up_proj_adapter_list.2.0"))):
            with self.subTest(model=name):
                model, errors = self.louder(name), {}
                before = read_tensors(os.path.join(model, "model.safetensors"))
                base = self.logits(model, ids)
                for method in ("rtn", "awq"):
                    out = self.path(f"{name}-{method}")
                    report = self.quantize(model, out, "W8A16_CHANNEL", "--method", method, "--calibration", ids,
                                           "--ignore", "adapter")
                    errors[method] = self.distance(base, self.logits(out, ids))
                self.assertLess(errors["awq"], errors["rtn"], errors)
                after = read_tensors(os.path.join(out, "model.safetensors"))
                changed = {t for t in before if t in after and after[t] != before[t]}
                for part in changes:
                    self.assertTrue(any(part in t for t in changed), part)
                notes = {linear.get("note") for linear in report["linears"]}
                self.assertEqual("not scaled: the norm in front is the residual stream itself" in notes,
                                 name == "minimax")
                if name == "minimax":
                    self.assertFalse(any("layernorm" in t for t in changed), changed)

    def louder(self, name):
        """A model two of whose channels are eight times as loud behind each norm."""
        source, folder = self.model(name), self.path(name + "-loud")
        tensors = read_tensors(os.path.join(source, "model.safetensors"))
        for tensor, (kind, shape, data) in tensors.items():
            if tensor.endswith(("layernorm.weight", "mamba.norm.weight", "self_attn.norm.weight")):
                values = array.array("H", data)
                less = 1.0 if name.startswith("qwen3") else 0.0
                values[3] = values[20] = bf16(8.0 - less)
                tensors[tensor] = (kind, shape, values.tobytes())
        shutil.copytree(source, folder)
        write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
        return folder

    def test_losses_are_measured(self):
        """eval compare and eval quant, on a text of letters."""
        letters = "abcdefghijklmnopqrstuvwxyz"
        vocabulary = {"\u0120": 3, **{letter: 4 + i for i, letter in enumerate(letters)}}
        tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None,
                     "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
                     "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
        rng = random.Random(8)
        text = self.write("text.txt", "".join(rng.choice(letters + "  ") for _ in range(600)))
        for name in ("qwen3-5", "minimax", "zamba2"):
            with self.subTest(model=name):
                model = shutil.copytree(self.model(name), self.path(name))
                with open(os.path.join(model, "tokenizer.json"), "w") as f:
                    json.dump(tokenizer, f)
                found = {}
                for scheme in ("W8A8", "W8A16_CHANNEL"):
                    out = self.path(f"{name}-{scheme}")
                    self.quantize(model, out, scheme, "--method", "gptq", "--calibration", text)
                    found[scheme] = json.loads(self.succeeds("eval", "compare", model, out, text, "--window", "64",
                                                             "--json"))
                    self.assertGreater(found[scheme]["kl_divergence"], 0)
                    self.assertLess(found[scheme]["kl_divergence"], 0.05)
                    self.assertGreater(found[scheme]["bits_per_weight"], 8)
                    self.assertLess(found[scheme]["bits_per_weight"], 11)  # and scales of short rows
                picture = self.path(name + ".svg")
                self.succeeds("eval", "quant", model, *(self.path(f"{name}-{scheme}") for scheme in found), "--text",
                              text, "--window", "64", "-o", picture)
                self.assertTrue(os.path.getsize(picture))

    def test_outliers_of_joined_matrices(self):
        """Queries, keys, values and gates of Qwen3.5 are two tensors and one matrix: their outliers go together."""
        ids, model, out = self.ids(), self.model("qwen3-5"), self.path("o")
        report = self.quantize(model, out, "LLM_INT8_OUTLIERS", "--method", "rtn", "--calibration", ids,
                               "--outlier-threshold", "2")
        found = {linear["tensor"]: linear.get("outlier_columns", 0) for linear in report["linears"]}
        stem = "model.layers.1.linear_attn.in_proj_"
        self.assertGreater(found[stem + "qkv.weight"], 0)
        self.assertEqual(found[stem + "qkv.weight"], found[stem + "z.weight"])
        base = self.logits(model, ids)
        self.assertLess(self.distance(base, self.logits(out, ids, served=True)) * 2 ** 8, 16)
        listed = json.loads(self.succeeds("inspect", out, "--kernels", "--json"))
        names = json.dumps(listed)
        self.assertIn(stem + "qkv.weight, outlier columns", names)
        # Another tool may store those of one of them in another type.
        path = os.path.join(out, "model.safetensors")
        tensors = read_tensors(path)
        name = stem + "z.outlier_weight"
        kind, shape, _ = tensors[name]
        self.assertEqual(kind, "F16")
        tensors[name] = ("BF16", shape, array.array("H", map(bf16, numbers(tensors[name]))).tobytes())
        write_safetensors(path, tensors)
        self.assertLess(self.distance(base, self.logits(out, ids, served=True)) * 2 ** 8, 16)

    def test_what_is_not_done_says_so(self):
        ids = self.ids()
        flags = ("-o", self.path("o"), "--calibration", ids)
        self.fails(2, "quantize", self.model("minimax"), "--scheme", "W8A8", "--method", "smoothquant", *flags,
                   says="no norm of minimax can take scales")
        self.fails(2, "quantize", self.model("qwen3-5"), "--scheme", "W8A8", "--ignore", "in_proj_z", *flags,
                   says="they run as one matrix, name both")
        self.fails(2, "quantize", self.model("zamba2"), "--scheme", "W4A16_G32", "--ignore", "down_proj", *flags,
                   says="adapter")
        self.assertEqual(self.left(), ["ids.json"])


class SharedBlocks(HybridCase):
    def wide(self):
        """The seeded Zamba2 with twice the widths, and adapters of rank 32: groups of 32 fit."""
        source, folder, rng = self.model("zamba2"), self.path("wide"), random.Random(11)
        with open(os.path.join(source, "config.json")) as f:
            config = json.load(f)
        for key in ("hidden_size", "intermediate_size", "attention_head_dim", "attention_hidden_size", "kv_channels",
                    "mamba_d_state", "n_mamba_heads"):
            config[key] *= 2
        config["intermediate_size"], config["adapter_rank"] = 96, 32
        tensors = {}
        for name, tensor in read_tensors(os.path.join(source, "model.safetensors")).items():
            values = numbers(tensor)
            mean = math.fsum(values) / len(values)
            deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
            if len(tensor[1]) == 2:
                deviation *= 2 ** -0.5  # rows are twice as long
            shape = [2 * n for n in tensor[1]]
            if "embed" in name:
                shape[0] = VOCABULARY
            elif "conv1d.weight" in name:
                shape[1:] = tensor[1][1:]
            elif "adapter" in name:
                shape[1 if name.endswith(".1.weight") else 0] = 32
            data = array.array("H", (bf16(rng.gauss(mean, deviation)) for _ in range(math.prod(shape))))
            tensors[name] = ("BF16", shape, data.tobytes())
        os.makedirs(folder)
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(config, f)
        write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
        return folder

    def test_each_matrix_once_over_all_its_uses(self):
        ids, model = self.ids(), self.wide()
        report, _ = self.check_same_numbers(model, "W4A16_G32", "gptq", ids)
        tokens = {linear["tensor"]: linear["tokens"] for linear in report["linears"]}
        self.assertEqual(len(tokens), len(report["linears"]))
        for tensor, count in tokens.items():
            shared = "shared_transformer" in tensor and "adapter" not in tensor
            self.assertEqual(count, 8 * 40 * (2 if shared else 1), tensor)
        self.assertEqual(sum("adapter" in tensor for tensor in tokens), 4 * 4 * 2)

    def test_methods(self):
        ids, other, model = self.ids(windows=24, length=64), self.ids("other.json", windows=16, seed=4), self.wide()
        base, errors, losses = self.logits(model, other), {}, {}
        for method in ("rtn", "imatrix", "gptq", "awq", "awq+gptq"):
            out = self.path(method)
            losses[method] = self.quantize(model, out, "W4A16_G32", "--method", method, "--calibration",
                                           ids)["mean_relative_error"]
            errors[method] = self.distance(base, self.logits(out, other))
        self.assertLess(losses["gptq"], 0.9 * losses["rtn"], losses)
        for method in ("gptq", "awq+gptq"):
            self.assertLess(errors[method], errors["rtn"], errors)
        self.assertLess(errors["awq"], 1.1 * errors["rtn"], errors)
        # The same numbers in other containers, and formats with little noise.
        ways = {"W4A16_G32": "compressed-tensors gptq awq", "FP8": "compressed-tensors fp8 modelopt",
                "NVFP4A16": "compressed-tensors modelopt", "W8A16_G32": "gptq", "MXFP8": "compressed-tensors"}
        for scheme, containers in ways.items():
            of = set()
            for container in containers.split():
                out = self.path(f"{scheme}-{container}")
                self.quantize(model, out, scheme, "--method", "rtn", "--format", container, "--calibration", ids)
                of.add(self.distance(base, self.logits(out, other)))
            self.assertEqual(len(of), 1, scheme)
            if scheme in ("W8A16_G32", "MXFP8"):
                self.assertLess(of.pop(), 0.12 if scheme == "W8A16_G32" else 0.5, scheme)

    def test_threads_and_memory_change_no_bit(self):
        ids, files = self.ids(), []
        for flags in (("-t", "1"), ("-t", "2"), ("-t", "2", "--memory", "0")):
            out = self.path(f"o{len(files)}")
            self.quantize(self.model("zamba2"), out, "W8A8", "--method", "awq+gptq", "--calibration", ids, "--name",
                          "m", *flags)
            files.append(self.files(out))
        self.assertEqual(files[0], files[1])
        self.assertEqual(files[0], files[2])

    def test_an_interrupted_run_continues(self):
        """Blocks that are done serve the layers behind them."""
        ids, model = self.ids(windows=24, length=64), self.wide()
        flags = ("--scheme", "W4A16_G32", "--method", "awq+gptq", "--calibration", ids, "--json", "--name", "m")
        self.succeeds("quantize", model, "-o", self.path("whole"), *flags)
        out, command = self.path("stopped"), ("quantize", model, "-o", self.path("stopped"), *flags)
        for parts in (1, 2, 6):  # the blocks are parts 0 and 1
            self.interrupted(command, out, parts)
        self.assertGreaterEqual(json.loads(self.succeeds(*command))["resumed_parts"], 6)
        self.assertEqual(self.files(out), self.files(self.path("whole")))

    def test_a_matrix_that_is_stored_twice(self):
        model = shutil.copytree(self.model("zamba2"), self.path("twice"))
        path = os.path.join(model, "model.safetensors")
        tensors = read_tensors(path)
        stem = "model.layers.{}.shared_transformer.self_attn.q_proj.weight".format
        tensors[stem(4)] = tensors[stem(1)]
        write_safetensors(path, tensors)
        line = self.fails(2, "quantize", model, "-o", self.path("o"), "--scheme", "W8A8", "--method", "rtn",
                          says="are one matrix that layers share: save the model with each of them once")
        self.assertIn(stem(4), line)

    def test_factors_of_keys_and_values(self):
        """Each layer has its own, although the projections are shared."""
        ids, model, out = self.ids(), self.model("zamba2"), self.path("scales.safetensors")
        self.succeeds("calibrate", model, ids, "--kv-scales", out)
        stem = "model.layers.{}.shared_transformer.self_attn.{}".format
        measured = read_tensors(out)
        for layer in (1, 2, 4, 5):
            for name in ("k_scale", "v_scale", "k_channel_scale"):
                self.assertIn(stem(layer, name), measured)
        self.assertNotEqual(measured[stem(1, "k_scale")], measured[stem(4, "k_scale")])
        self.quantize(model, self.path("o"), "W8A8", "--method", "rtn", "--calibration", ids, "--kv-cache-scheme",
                      "fp8")
        written = read_tensors(os.path.join(self.path("o"), "model.safetensors"))
        for layer in (1, 2, 4, 5):  # of a model whose parts before are quantised
            self.assertAlmostEqual(numbers(written[stem(layer, "k_scale")])[0],
                                   numbers(measured[stem(layer, "k_scale")])[0], delta=0.002)


if __name__ == "__main__":
    main()
