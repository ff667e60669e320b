"""Every scheme in every container that holds it, and every type of GGUF files: written, read back, and as near to
the model in 16 bits as the number of bits lets expect.

usage: formats_test.py Containers|Golden|Gguf
"""
import json
import os
import re
import unittest

from quantize_case import GOLDEN, QuantizeCase, random_llama, run

CONTAINERS = ("compressed-tensors", "gptq", "awq", "fp8", "modelopt", "bitsandbytes")
# The containers of each scheme, and the number of bits of evenly spaced integers with a like error.
SCHEMES = {
    "W8A16": (8, "compressed-tensors gptq"), "W7A16": (7, "compressed-tensors"),
    "W6A16": (6, "compressed-tensors"), "W5A16": (5, "compressed-tensors"),
    "W4A16": (4, "compressed-tensors gptq awq"), "W3A16": (3, "compressed-tensors gptq"),
    "W2A16": (2, "compressed-tensors gptq"), "W8A8": (8, "compressed-tensors bitsandbytes"),
    "W8A8_STATIC": (8, "compressed-tensors"), "W4A8": (4, "compressed-tensors"),
    "FP8": (6, "compressed-tensors fp8 modelopt"), "FP8_DYNAMIC": (6, "compressed-tensors modelopt"),
    "FP8_BLOCK": (6, "compressed-tensors fp8"), "NVFP4": (4, "compressed-tensors modelopt"),
    "NVFP4A16": (4, "compressed-tensors modelopt"), "MXFP4": (4, "compressed-tensors"),
    "MXFP4A16": (4, "compressed-tensors"), "MXFP8": (6, "compressed-tensors"),
    "MXFP8A16": (6, "compressed-tensors"), "NF4": (4, "bitsandbytes"), "FP4": (4, "bitsandbytes"),
    "LLM_INT8": (8, "bitsandbytes"),
}
# Forms of them with suffixes.
FORMS = {
    "W4A16_G32": (4, "compressed-tensors gptq awq"), "W4A16_ASYM": (4, "compressed-tensors gptq awq"),
    "W2A16_G32_ASYM": (2, "gptq"), "W8A16_CHANNEL": (8, "compressed-tensors"),
    "W3A16_CHANNEL_ASYM": (3, "compressed-tensors gptq"), "W5A16_ASYM_G64": (5, "compressed-tensors"),
    "W4A8_G32": (4, "compressed-tensors"), "NF4_PLAIN": (4, "bitsandbytes"), "FP4_PLAIN": (4, "bitsandbytes"),
    "LLM_INT8_OUTLIERS": (8, "bitsandbytes"),
}
# Error over the logits' own size, of this model, in units of 2 to the power of -bits.
LEAST, MOST = 2.5, 5.5


def listed(message, between):
    return [word.split(" ")[0] for word in re.search(between, message).group(1).split(", ")]


class Containers(QuantizeCase):
    def test_every_scheme_is_here(self):
        line = self.fails(2, "quantize", os.path.join(GOLDEN, "llama"), "-o", self.path("o"), "--scheme", "W5A61")
        self.assertIn("did you mean W5A16?", line)
        self.assertEqual(listed(line, r"there are (.*?), and with a suffix"), list(SCHEMES))

    def test_written_and_read_back(self):
        model, ids = random_llama(self.path("m")), self.ids()
        base, errors = self.logits(model, ids), {}
        for scheme, (bits, containers) in {**SCHEMES, **FORMS}.items():
            for container in containers.split():
                with self.subTest(scheme=scheme, container=container):
                    out = self.path(f"{scheme}-{container}")
                    report = self.quantize(model, out, scheme, "--method", "rtn", "--format", container,
                                           "--calibration", ids)
                    self.assertEqual((report["scheme"], report["format"], report["method"]),
                                     (scheme, container, "rtn"))
                    self.assertEqual(len(report["linears"]), 14)
                    error = self.distance(base, self.logits(out, ids))
                    errors[scheme, container] = error
                    self.assertGreater(error * 2 ** bits, LEAST)
                    self.assertLess(error * 2 ** bits, MOST)
                    self.check_config(out, scheme, container)
        # Two ways to store the same numbers.
        for scheme in ("W8A16", "W4A16", "W3A16", "W2A16", "W4A16_ASYM", "FP8", "FP8_BLOCK", "NVFP4", "NVFP4A16"):
            of = [error for (name, container), error in errors.items() if name == scheme and container != "awq"]
            self.assertGreater(len(of), 1)
            self.assertEqual(len(set(of)), 1, scheme)

    def check_config(self, folder, scheme, container):
        with open(os.path.join(folder, "config.json")) as f:
            config = json.load(f)
        self.assertEqual(config["quantization_config"]["quant_method"], container)
        self.assertEqual((config["freshet"]["scheme"], config["freshet"]["method"]), (scheme, "rtn"))
        about = json.loads(self.succeeds("inspect", folder, "--json"))
        self.assertEqual(about["quantization"]["scheme"], scheme)
        self.assertEqual(about["quantization"]["method"], "rtn")
        self.assertEqual(about["quantization"]["format"], container)

    def test_other_pairs_are_refused(self):
        model = os.path.join(GOLDEN, "llama")
        for scheme, (_, containers) in SCHEMES.items():
            for container in set(CONTAINERS) - set(containers.split()):
                line = self.fails(2, "quantize", model, "-o", self.path("o"), "--scheme", scheme, "--method", "rtn",
                                  "--format", container, says=scheme)
                self.assertIn(container, line)
        self.assertEqual(self.left(), [])


class Golden(QuantizeCase):
    """Other architectures: norms of queries, experts, norms less one."""

    def test_architectures(self):
        # The choice of experts flips where two are nearly equal.
        for name, most in (("llama", 8), ("qwen3", 8), ("mixtral", 16), ("gemma", 8)):
            model, ids = os.path.join(GOLDEN, name), self.ids()
            base = self.logits(model, ids)
            for scheme, bits, container in (("W8A16_G32", 8, "compressed-tensors"), ("W4A16_G32", 4, "gptq"),
                                            ("W4A16_G32", 4, "awq"), ("FP8_DYNAMIC", 6, "compressed-tensors"),
                                            ("W8A8", 8, "compressed-tensors"), ("NVFP4", 4, "modelopt"),
                                            ("MXFP4", 4, "compressed-tensors")):
                with self.subTest(model=name, scheme=scheme, container=container):
                    out = self.path(f"{name}-{scheme}-{container}")
                    self.quantize(model, out, scheme, "--method", "rtn", "--format", container, "--calibration", ids)
                    error = self.distance(base, self.logits(out, ids)) * 2 ** bits
                    self.assertGreater(error, 0.2)
                    self.assertLess(error, most)
            with self.subTest(model=name, scheme="Q4_K_M"):
                out = self.path(name + ".gguf")
                self.quantize(model, out, "Q4_K_M", "--method", "rtn")
                error = self.distance(base, self.logits(out, ids)) * 2 ** 4
                self.assertGreater(error, 0.2)
                self.assertLess(error, most)


class Gguf(QuantizeCase):
    # Bits of integers with a like error where the name does not say it.
    BITS = {"mxfp4_moe": 8, "tq1_0": 1.3, "tq2_0": 1.3, "iq1_s": 1.6, "iq1_m": 1.6, "f32": None, "f16": None,
            "bf16": None}

    def test_every_type(self):
        model, ids = random_llama(self.path("m")), self.ids()
        base = self.logits(model, ids)
        line = self.fails(2, "quantize", model, "-o", self.path("o.gguf"), "--scheme", "nothing", "--format", "gguf")
        types = listed(line, r"the types are (.*)")
        self.assertGreater(len(types), 30)
        for name in types:
            with self.subTest(type=name):
                out = self.path(name + ".gguf")
                report = self.quantize(model, out, name, "--method", "rtn")
                self.assertEqual((report["format"], report["scheme"], report["bytes"]),
                                 ("gguf", name, os.path.getsize(out)))
                error = self.distance(base, self.logits(out, ids))
                bits = self.BITS[name] if name in self.BITS else int(re.search(r"q(\d)", name).group(1))
                about = json.loads(self.succeeds("inspect", out, "--json"))["quantization"]
                self.assertEqual((about["scheme"], about["method"], about["format"]), (name, "rtn", "gguf"))
                if bits is None:
                    self.assertLess(error, 1e-3)
                    continue
                self.assertGreater(error * 2 ** bits, 1.0)
                self.assertLess(error * 2 ** bits, MOST)


if __name__ == "__main__":
    unittest.main()
