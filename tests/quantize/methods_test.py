"""What calibrated methods gain, and that nothing but the model, the options and the text changes a result.

usage: methods_test.py Methods|Results
"""
import array
import json
import os
import unittest

from quantize_case import LAYER, LINEARS, QuantizeCase, bf16, random_llama, read_tensors, write_safetensors


class Methods(QuantizeCase):
    def test_each_gains(self):
        """The error of outputs and, on other tokens than the calibration's, of the logits."""
        model = random_llama(self.path("m"))
        ids, other = self.ids(windows=24, length=64), self.ids("other.json", seed=4)
        base = self.logits(model, other)
        for scheme, methods in (("W4A16", ("rtn", "gptq", "awq", "awq+gptq")), ("W3A16", ("rtn", "gptq", "imatrix")),
                                ("W8A8", ("rtn", "gptq", "smoothquant+gptq")), ("NVFP4A16", ("rtn", "gptq")),
                                ("Q4_K_M", ("rtn", "imatrix", "gptq", "imatrix+gptq")),
                                ("Q3_K_M", ("rtn", "imatrix", "imatrix+gptq"))):
            errors, reports = {}, {}
            for method in methods:
                out = self.path(f"{scheme}-{method}")
                reports[method] = self.quantize(model, out, scheme, "--method", method, "--calibration", ids)
                self.assertEqual(reports[method]["method"], method)
                self.assertTrue(all(l["tokens"] == (0 if method == "rtn" else 24 * 64)
                                    for l in reports[method]["linears"]), method)
                errors[method] = self.distance(base, self.logits(out, other))
            for method in methods[1:]:
                with self.subTest(scheme=scheme, method=method, errors=errors):
                    self.assertLess(errors[method], errors["rtn"])
                    if "awq" in method or "smoothquant" in method:
                        continue  # errors of other matrices: theirs are scaled
                    self.assertLess(reports[method]["mean_relative_error"], reports["rtn"]["mean_relative_error"])

    def test_outlier_columns(self):
        """Inputs of two channels are far above the others: rounded to 8 bits with them, the others lose most bits."""
        model, ids = random_llama(self.path("m")), self.ids()
        tensors = read_tensors(os.path.join(model, "model.safetensors"))
        for layer in range(2):
            for name in ("input_layernorm", "post_attention_layernorm"):
                kind, shape, data = tensors[LAYER(layer) + name + ".weight"]
                values = array.array("H", data)
                values[7] = values[200] = bf16(150.0)
                tensors[LAYER(layer) + name + ".weight"] = (kind, shape, values.tobytes())
        write_safetensors(os.path.join(model, "model.safetensors"), tensors)
        base = self.logits(model, ids)
        errors = {}
        for scheme in ("W8A8", "LLM_INT8", "LLM_INT8_OUTLIERS"):
            out = self.path(scheme)
            flags = ("--outlier-threshold", "60") if scheme == "LLM_INT8_OUTLIERS" else ()
            report = self.quantize(model, out, scheme, "--method", "rtn", "--calibration", ids, *flags)
            errors[scheme] = self.distance(base, self.logits(out, ids, served=True))
        self.assertLess(errors["LLM_INT8_OUTLIERS"] * 4, errors["W8A8"], errors)
        self.assertLess(errors["LLM_INT8_OUTLIERS"] * 1.5, errors["LLM_INT8"], errors)  # blocks are rounded together
        found = {l["tensor"]: l.get("outlier_columns", 0) for l in report["linears"]}
        for layer in range(2):
            for name in LINEARS:
                reads_norm = name not in ("self_attn.o_proj", "mlp.down_proj")
                self.assertGreaterEqual(found[LAYER(layer) + name + ".weight"], 2 if reads_norm else 0, name)
        stored = read_tensors(os.path.join(out, "model.safetensors"))
        kind, shape, data = stored[LAYER(0) + "self_attn.q_proj.outlier_columns"]
        self.assertEqual((kind, list(array.array("i", data))), ("I32", [7, 200]))
        self.assertEqual(stored[LAYER(0) + "self_attn.q_proj.outlier_weight"][:2], ("BF16", [256, 2]))
        about = json.loads(self.succeeds("inspect", out, "--json"))["quantization"]
        self.assertEqual((about["scheme"], about["outlier_threshold"]), ("LLM_INT8_OUTLIERS", 60))
        self.assertEqual(about["outlier_columns"], sum(found.values()))

    def test_outlier_options(self):
        model = random_llama(self.path("m"), hidden=64, ffn=128, layers=1)
        flags = ("quantize", model, "-o", self.path("o"), "--scheme")
        self.fails(2, *flags, "LLM_INT8_OUTLIERS", says="needs --calibration FILE: that tells which columns")
        self.fails(2, *flags, "W8A8", "--outlier-threshold", "6", says="is for --scheme LLM_INT8_OUTLIERS")
        self.fails(2, *flags, "Q4_K_M", "--outlier-threshold", "6", says="is for --scheme LLM_INT8_OUTLIERS")
        self.fails(2, *flags, "W8A8_OUTLIERS", says="W8A8 has no form with _OUTLIERS")

    def test_a_device_changes_nothing(self):
        """auto: a GPU, or the processor where there is none."""
        model, ids = random_llama(self.path("m"), hidden=64, ffn=128, layers=1), self.ids()
        files = []
        for device in ("cpu", "auto"):
            out = self.path(device)
            self.quantize(model, out, "W4A16_G32", "--calibration", ids, "--device", device, "--name", "m")
            files.append(self.files(out))
        self.assertEqual(*files)
        self.fails(2, "quantize", model, "-o", self.path("o"), "--scheme", "W8A8", "--device", "tpu", says="tpu")

    def test_combinations(self):
        model, ids = random_llama(self.path("m"), hidden=64, ffn=128, layers=1), self.ids()
        flags = ("--scheme", "W4A16_G32", "--calibration", ids)
        for method, name in (("gptq+awq", "awq+gptq"), ("imatrix+gptq", "imatrix+gptq"), ("rtn+awq", "awq"),
                             ("gptq+smoothquant", "smoothquant+gptq"), ("awq+imatrix", "awq+imatrix")):
            report = self.quantize(model, self.path(method), "W4A16_G32", "--method", method, "--calibration", ids)
            self.assertEqual(report["method"], name)
        for method, says in (("rtn+gptq", "rtn does not go with gptq"), ("awq+smoothquant", "use one"),
                             ("gptq+", "'' is not a method"), ("gtpq", "did you mean gptq?")):
            self.fails(2, "quantize", model, "-o", self.path("o"), "--method", method, *flags, says=says)
        for method in ("gptq", "awq", "imatrix", "smoothquant"):
            self.fails(2, "quantize", model, "-o", self.path("o"), "--method", method, "--scheme", "W4A16_G32",
                       says="--calibration")


class Results(QuantizeCase):
    def test_neither_threads_nor_memory_change_a_bit(self):
        model, ids = random_llama(self.path("m"), layers=3), self.ids(windows=20, length=60)
        for scheme, method in (("W4A16", "gptq"), ("W4A16", "awq"), ("W8A8", "smoothquant"), ("Q4_K_M", "imatrix+gptq"),
                               ("LLM_INT8_OUTLIERS", "rtn")):
            results = []
            for flags in (("-t", "1"), ("-t", "2"), ("-t", "2", "--memory", "0")):
                out = self.path(f"{scheme}-{method}-{len(results)}")
                report = self.quantize(model, out, scheme, "--method", method, "--calibration", ids, "--name", "m", *flags)
                del report["output"]
                if os.path.isdir(out):
                    results.append((report, self.files(out)))
                else:
                    with open(out, "rb") as f:
                        results.append((report, f.read()))
            with self.subTest(scheme=scheme, method=method):
                self.assertEqual(results[0], results[1])
                self.assertEqual(results[0], results[2])

    def test_an_interrupted_run_continues(self):
        model, ids = random_llama(self.path("m"), layers=6, hidden=384, ffn=768), self.ids(windows=40, length=64)
        for scheme, method, wanted in (("W4A16", "gptq", "whole"), ("W4A16", "awq+gptq", "awq"),
                                       ("Q4_K_M", "imatrix+gptq", "q.gguf")):
            with self.subTest(scheme=scheme, method=method):
                flags = ("--scheme", scheme, "--method", method, "--calibration", ids, "--json", "--name", "m")
                whole, out = self.path(wanted), self.path("stopped-" + wanted)
                report = json.loads(self.succeeds("quantize", model, "-o", whole, *flags))
                self.assertEqual(report["resumed_parts"], 0)
                command = ("quantize", model, "-o", out, *flags)
                self.assertEqual(self.interrupted(command, out), "")
                self.assertFalse(os.path.exists(out))
                continued = json.loads(self.succeeds(*command))
                self.assertGreater(continued["resumed_parts"], 0)
                self.assertFalse(os.path.exists(out + ".partial"))
                for key in ("output", "resumed_parts"):
                    del report[key], continued[key]
                self.assertEqual(continued, report)
                for a, b in self.pairs(whole, out):
                    with open(a, "rb") as f, open(b, "rb") as g:
                        self.assertEqual(f.read() == g.read(), True, b)

    def pairs(self, a, b):
        if not os.path.isdir(a):
            return [(a, b)]
        self.assertEqual(sorted(os.listdir(a)), sorted(os.listdir(b)))
        return [(os.path.join(a, name), os.path.join(b, name)) for name in os.listdir(a)]

    def test_other_options_start_anew(self):
        """What is finished is taken for the same command only."""
        model, ids = random_llama(self.path("m"), layers=6, hidden=384, ffn=768), self.ids(windows=40, length=64)
        out = self.path("o")
        flags = ("quantize", model, "-o", out, "--method", "gptq", "--calibration", ids, "--json", "--scheme")
        self.interrupted((*flags, "W4A16"), out)
        self.assertEqual(json.loads(self.succeeds(*flags, "W3A16"))["resumed_parts"], 0)

    def test_another_importance_matrix_starts_anew(self):
        model = random_llama(self.path("m"), layers=6, hidden=384, ffn=768)
        files = []
        for seed in (3, 4):
            files.append(self.path(f"{seed}.gguf"))
            self.succeeds("calibrate", model, self.ids(f"{seed}.json", windows=2, seed=seed), "-o", files[-1])
        for other, resumed in ((files[1], False), (files[0], True)):
            out = self.path(f"o{resumed}.gguf")
            flags = ("quantize", model, "-o", out, "--scheme", "IQ3_S", "--method", "imatrix", "--json", "--imatrix")
            self.interrupted((*flags, files[0]), out)
            self.assertEqual(json.loads(self.succeeds(*flags, other))["resumed_parts"] > 0, resumed)

    def test_tensors_without_importance(self):
        """--include-weights and --exclude-weights: the tensors that are named are those of rtn, or of imatrix."""
        model, matrix = random_llama(self.path("m")), self.path("imatrix.gguf")
        self.succeeds("calibrate", model, self.ids(), "-o", matrix)

        def errors(name, method, *flags):
            report = self.quantize(model, self.path(name), "Q4_K_M", "--method", method, *flags)
            return {line["tensor"]: line["relative_error"] for line in report["linears"]}

        plain = errors("rtn.gguf", "rtn")
        weighted = errors("weighted.gguf", "imatrix", "--imatrix", matrix)
        self.assertEqual([name for name in plain if plain[name] == weighted[name]], [])
        for option, named, others in (("--exclude-weights", plain, weighted), ("--include-weights", weighted, plain)):
            some = errors(option[2:] + ".gguf", "imatrix", "--imatrix", matrix, option, "ffn_up")
            for name, error in some.items():
                self.assertEqual(error, named[name] if "up_proj" in name else others[name], (option, name))


if __name__ == "__main__":
    unittest.main()
