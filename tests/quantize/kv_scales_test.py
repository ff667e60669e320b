"""Factors of keys and values for FP8 caches: what is measured, where it is written, and what serving makes of it.

A cache stores E4M3 of key / k_scale and reads it times k_scale (compressed-tensors' static quantisation). So a model
whose keys are 2^a times larger, with queries 2^a times smaller and a k_scale 2^a times larger, has the same numbers
in its cache, and the same logits.
"""
import json
import math
import os
import shutil
import struct
import unittest

import quantize_case
from quantize_case import QuantizeCase, load_safetensors, random_llama, read_tensors, run, write_safetensors


def from_bf16(data):
    return [struct.unpack("<f", struct.pack("<I", v << 16))[0] for v in struct.unpack(f"<{len(data) // 2}H", data)]


def times(tensor, factor):
    dtype, shape, data = tensor
    values = [quantize_case.bf16(v * factor) for v in from_bf16(data)]
    return dtype, shape, struct.pack(f"<{len(values)}H", *values)


def one(value):
    return "F32", [1], struct.pack("<f", value)


def rotated(x, position, dim):
    out = list(x)
    for head in range(0, len(x), dim):
        for i in range(dim // 2):
            angle = position * 10000.0 ** (-2 * i / dim)
            a, b = x[head + i], x[head + i + dim // 2]
            out[head + i] = a * math.cos(angle) - b * math.sin(angle)
            out[head + i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def queries_keys_and_values(tensors, config, ids):
    """Of the first layer, a list of each with a row for each token, from the definitions."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    rows = {}
    for name in ("model.embed_tokens", *(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")):
        _, (count, width), data = tensors[name + ".weight"]
        numbers = from_bf16(data)
        rows[name.split(".")[-1]] = [numbers[r * width:(r + 1) * width] for r in range(count)]
    weight = from_bf16(tensors["model.layers.0.input_layernorm.weight"][2])
    all_q, all_k, all_v = [], [], []
    for window in ids:
        for position, token in enumerate(window):
            x = rows["embed_tokens"][token]
            norm = math.sqrt(math.fsum(v * v for v in x) / hidden + config["rms_norm_eps"])
            x = [v / norm * w for v, w in zip(x, weight)]
            q, k, v = ([math.fsum(a * b for a, b in zip(row, x)) for row in rows[part + "_proj"]] for part in "qkv")
            all_q.append(rotated(q, position, dim))
            all_k.append(rotated(k, position, dim))
            all_v.append(v)
    return all_q, all_k, all_v


def channel_factors(queries, keys, config):
    """The root of the keys' standard magnitude over that of the queries of their group."""
    dim, group = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
    out = []
    for head in range(0, len(keys[0]), dim):
        factors = []
        for i in range(head, head + dim):
            k = math.fsum(row[i] ** 2 for row in keys)
            q = math.fsum(row[head * group + g * dim + i - head] ** 2 for row in queries for g in range(group)) / group
            factors.append((k / q) ** 0.25)
        mean = math.exp(math.fsum(map(math.log, factors)) / dim)
        out += [f / mean for f in factors]
    return out


class KvScales(QuantizeCase):
    def cached_logits(self, model, ids, cache, flags=("--reference",)):
        out = self.path("cached.safetensors")
        self.succeeds("eval", "logits", model, "--ids", ids, "-o", out, *flags, "--kv-cache-dtype", cache)
        tensors = load_safetensors(out)
        return [tensors[f"logits_{i}"][1] for i in range(len(tensors))]

    def variant(self, name, tensors, config):
        os.makedirs(self.path(name))
        self.write(name + "/config.json", json.dumps(config))
        write_safetensors(self.path(name) + "/model.safetensors", tensors)
        return self.path(name)

    def test_measured_and_written(self):
        model = random_llama(self.path("m"), hidden=64, ffn=64, layers=1)
        ids = self.ids(windows=2, length=12)
        tensors = read_tensors(model + "/model.safetensors")
        with open(model + "/config.json") as f:
            config = json.load(f)
        with open(ids) as f:
            _, keys, values = queries_keys_and_values(tensors, config, json.load(f))
        key, value = (max(abs(x) for row in rows for x in row) for rows in (keys, values))
        for form, names in (("compressed-tensors", ("k_scale", "v_scale")),
                            ("modelopt", ("k_proj.k_scale", "v_proj.v_scale"))):
            out = self.path(form)
            self.quantize(model, out, "FP8_DYNAMIC", "--method", "rtn", "--format", form, "--calibration", ids,
                          "--kv-cache-scheme", "fp8")
            made = read_tensors(out + "/model.safetensors")
            for name, most in zip(names, (key, value)):
                dtype, shape, data = made["model.layers.0.self_attn." + name]
                self.assertEqual((dtype, shape), ("F32", [1]))
                self.assertAlmostEqual(struct.unpack("<f", data)[0] / (most / 448), 1.0, delta=0.01)
            with open(out + "/config.json") as f:
                scheme = json.load(f)["quantization_config"]["kv_cache_scheme"]
            self.assertEqual((scheme["num_bits"], scheme["type"], scheme["dynamic"]), (8, "float", False))

    def test_calibrated_alone(self):
        model = random_llama(self.path("m"), hidden=64, ffn=64, layers=2)
        first, second = self.ids("1.json", windows=2, seed=1), self.ids("2.json", windows=2, seed=2)
        files = [self.path(f"{i}.safetensors") for i in range(3)]
        for ids, out in zip((first, second), files):
            self.succeeds("calibrate", model, ids, "--kv-scales", out)
        self.succeeds("calibrate", "--merge", files[0], "--merge", files[1], "--kv-scales", files[2])
        one_text, other, both = (read_tensors(f) for f in files)
        # What quantising stores for the same text: later layers see quantised ones there.
        self.quantize(model, self.path("fp8"), "FP8_DYNAMIC", "--method", "rtn", "--calibration", first,
                      "--kv-cache-scheme", "fp8")
        made = read_tensors(self.path("fp8") + "/model.safetensors")
        stored = {k: v for k, v in made.items() if k.endswith((".k_scale", ".v_scale"))}
        channels = [f"model.layers.{layer}.self_attn.k_channel_scale" for layer in range(2)]
        self.assertEqual(sorted(one_text), sorted([*stored, *channels]))
        self.assertEqual(len(stored), 4)
        for name, (_, _, data) in stored.items():
            if ".0." in name:
                self.assertEqual(one_text[name][2], data)
            ratio = struct.unpack("<f", one_text[name][2])[0] / struct.unpack("<f", data)[0]
            self.assertAlmostEqual(ratio, 1.0, delta=0.1)
        for name in channels:
            one, two, mean = (struct.unpack("<32f", t[name][2]) for t in (one_text, other, both))
            for a, b, c in zip(one, two, mean):
                self.assertAlmostEqual(c / math.sqrt(a * b), 1.0, delta=1e-5)
        for name, (_, shape, data) in both.items():
            if name in channels:
                continue
            self.assertEqual(shape, [1])
            self.assertEqual(data, max((t[name][2] for t in (one_text, other)), key=lambda d: struct.unpack("<f", d)))
        # In the model's folder they are read with it, and go into what is quantised from it.
        plain = self.cached_logits(model, first, "fp8")
        tensors = read_tensors(model + "/model.safetensors")
        with open(model + "/config.json") as f:
            inside = self.cached_logits(self.variant("inside", {**tensors, **both}, json.load(f)), first, "fp8")
        shutil.copy(files[2], model + "/kv_scales.safetensors")
        self.assertEqual(self.cached_logits(model, first, "fp8"), inside)
        self.assertNotEqual(plain, inside)
        self.quantize(model, self.path("kept"), "FP8_DYNAMIC", "--method", "rtn")
        kept = read_tensors(self.path("kept") + "/model.safetensors")
        # Channels of keys stay in their file: other engines refuse tensors that they don't know.
        self.assertEqual({k: v for k, v in kept.items() if k in both},
                         {k: v for k, v in both.items() if k not in channels})
        line = self.fails(2, "calibrate", model, first)
        self.assertIn("--kv-scales", line)
        line = self.fails(2, "calibrate", "--merge", files[0], "-o", self.path("i.gguf"))
        self.assertIn("scales are written by --kv-scales", line)
        # Made again with the file in place, and left out of a GGUF file with a warning.
        again = self.path("again.safetensors")
        self.succeeds("calibrate", model, first, "--kv-scales", again)
        self.assertEqual(read_tensors(again), read_tensors(files[0]))
        done = run("convert", model, "-o", self.path("m.gguf"), "--type", "f16")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("left out", done.stderr)

    def test_served(self):
        for architecture in ("llama", "llama-bias", "qwen3"):
            with self.subTest(architecture=architecture):
                self.check_served(architecture)

    def random_model(self, architecture):
        """Its tensors and its configuration."""
        base = random_llama(self.path(f"base-{architecture}"))
        tensors = read_tensors(base + "/model.safetensors")
        with open(base + "/config.json") as f:
            config = json.load(f)
        norms = architecture == "qwen3"
        if norms:
            config.update({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
        config["attention_bias"] = architecture == "llama-bias"
        for layer in range(2):
            stem = f"model.layers.{layer}.self_attn."
            dim = config["head_dim"]
            for part in "qk" if norms else "":
                values = [quantize_case.bf16(1 + i % 8 / 16) for i in range(dim)]
                tensors[f"{stem}{part}_norm.weight"] = ("BF16", [dim], struct.pack(f"<{dim}H", *values))
            for part in "qkvo" if config["attention_bias"] else "":
                rows = tensors[f"{stem}{part}_proj.weight"][1][0]
                values = [quantize_case.bf16(i % 5 / 8 - 0.25) for i in range(rows)]
                tensors[f"{stem}{part}_proj.bias"] = ("BF16", [rows], struct.pack(f"<{rows}H", *values))
        return tensors, config

    def check_served(self, architecture):
        tensors, config = self.random_model(architecture)
        ids, norms = self.ids(windows=2), architecture == "qwen3"
        exact = self.cached_logits(self.variant("plain-" + architecture, tensors, config), ids, "f32")
        # As it is, with factors; and with keys and values far outside of E4M3's range.
        small, large = dict(tensors), dict(tensors)
        for layer in range(2):
            stem = f"model.layers.{layer}.self_attn."
            for to, power in ((small, 0), (large, 14)):
                to[stem + "k_scale"], to[stem + "v_scale"] = one(2.0 ** (power - 5)), one(0.0223 * 2.0 ** power)
            keys = ("k_norm.weight", "q_norm.weight") if norms else ("k_proj.weight", "q_proj.weight")
            for name, factor in ((keys[0], 2.0 ** 14), (keys[1], 2.0 ** -14), ("v_proj.weight", 2.0 ** 14),
                                 ("o_proj.weight", 2.0 ** -14)):
                large[stem + name] = times(large[stem + name], factor)
            if config["attention_bias"]:
                for name, factor in (("k", 2.0 ** 14), ("q", 2.0 ** -14), ("v", 2.0 ** 14)):
                    name = f"{stem}{name}_proj.bias"
                    large[name] = times(large[name], factor)
        small = self.variant("small-" + architecture, small, config)
        in_range = self.cached_logits(small, ids, "fp8")
        self.assertLess(self.distance(exact, in_range), 0.06)
        self.assertGreater(self.distance(exact, in_range), 0.0005)
        self.assertEqual(self.cached_logits(small, ids, "f32"), exact)  # other caches need no factors
        served = self.cached_logits(self.variant("large-" + architecture, large, config), ids, "fp8")
        self.assertLess(self.distance(in_range, served), 1e-5)
        without = {k: v for k, v in read_tensors(self.path("large-" + architecture) + "/model.safetensors").items()
                   if not k.endswith("_scale")}
        lost = self.cached_logits(self.variant("lost-" + architecture, without, config), ids, "fp8")
        self.assertGreater(self.distance(exact, lost), 3 * self.distance(exact, in_range))

    def test_channels_measured(self):
        model = random_llama(self.path("m"), hidden=64, ffn=64, layers=1)
        ids, out = self.ids(windows=2, length=12), self.path("out.safetensors")
        self.succeeds("calibrate", model, ids, "--kv-scales", out)
        with open(model + "/config.json") as f:
            config = json.load(f)
        with open(ids) as f:
            queries, keys, _ = queries_keys_and_values(read_tensors(model + "/model.safetensors"), config, json.load(f))
        dtype, shape, data = read_tensors(out)["model.layers.0.self_attn.k_channel_scale"]
        self.assertEqual((dtype, shape), ("F32", [32]))
        for got, wanted in zip(struct.unpack("<32f", data), channel_factors(queries, keys, config)):
            self.assertAlmostEqual(got / wanted, 1.0, delta=0.01)

    def scaled_channels(self, tensors, config, powers):
        """A model whose keys are 2^power times larger in the channels of each half of a head, and queries smaller."""
        out, dim = dict(tensors), config["head_dim"]
        for layer in range(config["num_hidden_layers"]):
            stem = f"model.layers.{layer}.self_attn."
            for part, sign in (("k", 1), ("q", -1)):
                for name in (part + "_proj.weight", part + "_proj.bias", part + "_norm.weight"):
                    normed = f"{stem}{part}_norm.weight" in tensors
                    if stem + name not in tensors or normed != name.endswith("norm.weight"):
                        continue
                    dtype, shape, data = tensors[stem + name]
                    width = shape[1] if len(shape) == 2 else 1
                    values = [quantize_case.bf16(v * 2.0 ** (sign * powers[i // width % dim % (dim // 2)]))
                              for i, v in enumerate(from_bf16(data))]
                    out[stem + name] = dtype, shape, struct.pack(f"<{len(values)}H", *values)
        return out

    def test_channels_served(self):
        """Factors that are powers of two undo a model's own powers of two: the same bits in the cache and after it."""
        for architecture in ("llama", "llama-bias", "qwen3"):
            tensors, config = self.random_model(architecture)
            ids, dim = self.ids(windows=2), config["head_dim"]
            powers = [(i * 5) % 7 if i % 3 == 0 else 0 for i in range(dim // 2)]
            spread = self.scaled_channels(tensors, config, powers)
            factors = [2.0 ** powers[i % (dim // 2)] for i in range(dim)] * config["num_key_value_heads"]
            held = {f"model.layers.{layer}.self_attn.k_channel_scale":
                    ("F32", [len(factors)], struct.pack(f"<{len(factors)}f", *factors)) for layer in range(2)}
            plain = self.variant("channels-plain-" + architecture, tensors, config)
            alone = self.variant("channels-alone-" + architecture, spread, config)
            model = self.variant("channels-held-" + architecture, spread, config)
            write_safetensors(model + "/kv_scales.safetensors", held)
            exact = self.cached_logits(plain, ids, "f32")
            self.assertEqual(self.cached_logits(model, ids, "f16"), self.cached_logits(alone, ids, "f16"))
            for cache in ("int8", "int4", "k8v4"):
                with self.subTest(architecture=architecture, cache=cache):
                    wanted = self.cached_logits(plain, ids, cache)
                    for flags in (("--reference",), ()):
                        self.assertEqual(self.cached_logits(model, ids, cache, flags),
                                         self.cached_logits(plain, ids, cache, flags))
                    lost = self.distance(exact, self.cached_logits(alone, ids, cache))
                    self.assertGreater(lost, 1.5 * self.distance(exact, wanted))
                    # Measured factors find the spread by themselves.
                    if cache == "int4":
                        measured = self.variant("channels-measured-" + architecture, spread, config)
                        self.succeeds("calibrate", measured, ids, "--kv-scales", measured + "/kv_scales.safetensors")
                        self.assertLess(self.distance(exact, self.cached_logits(measured, ids, cache)), 0.75 * lost)

    def test_refused(self):
        model, ids = random_llama(self.path("m"), hidden=64, ffn=64, layers=1), self.ids(windows=1)
        for flags, words in (
                (("--scheme", "Q4_0", "--calibration", ids), "GGUF files have no factors"),
                (("--scheme", "NF4", "--calibration", ids), "--format bitsandbytes has no factors"),
                (("--scheme", "FP8_DYNAMIC"), "needs --calibration FILE")):
            line = self.fails(2, "quantize", model, "-o", self.path("o"), *flags, "--kv-cache-scheme", "fp8")
            self.assertIn(words, line)
        line = self.fails(2, "quantize", model, "-o", self.path("o"), "--scheme", "NF4", "--kv-cache-scheme", "int4")
        self.assertIn("there is fp8", line)
        tensors = read_tensors(model + "/model.safetensors")
        with open(model + "/config.json") as f:
            config = json.load(f)
        tensors["model.layers.0.self_attn.k_scale"] = one(-1.0)
        done = run("eval", "logits", self.variant("negative", tensors, config), "--ids", ids, "-o", self.path("l"))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("self_attn.k_scale' is -1", done.stderr)
        for values, words in (([1.0] * 31 + [-1.0], "has a -1"), ([1.0] * 16, "k_channel_scale")):
            data = struct.pack(f"<{len(values)}f", *values)
            wrong = self.variant(f"channels{len(values)}", {k: v for k, v in tensors.items() if "k_scale" not in k},
                                 config)
            write_safetensors(wrong + "/kv_scales.safetensors",
                              {"model.layers.0.self_attn.k_channel_scale": ("F32", [len(values)], data)})
            done = run("eval", "logits", wrong, "--ids", ids, "-o", self.path("l"))
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(words, done.stderr)
        # A factor for each head is not dropped silently.
        tensors["model.layers.0.self_attn.k_scale"] = ("F32", [2], struct.pack("<2f", 1.0, 2.0))
        done = run("eval", "logits", self.variant("heads", tensors, config), "--ids", ids, "-o", self.path("l"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("self_attn.k_scale' is not used", done.stderr)


if __name__ == "__main__":
    quantize_case.main()
