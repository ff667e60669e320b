"""Formats for a size, chosen by what errors in each tensor cost the model."""
import math
import os
import re
import struct
import unittest

import quantize_case
from quantize_case import LAYER, QuantizeCase, bf16, random_llama, read_tensors, write_safetensors

QUIET = LAYER(1) + "mlp.down_proj.weight"  # almost no part of the residual stream


def quieter(tensor, factor):
    dtype, shape, data = tensor
    numbers = [struct.unpack("<f", struct.pack("<I", v << 16))[0] for (v,) in struct.iter_unpack("<H", data)]
    return dtype, shape, struct.pack(f"<{len(numbers)}H", *(bf16(v * factor) for v in numbers))


class Targets(QuantizeCase):
    def divergence(self, base, other):
        """The mean of KL(base || other) over tokens, in nats."""
        vocabulary, total, tokens = quantize_case.VOCABULARY, 0.0, 0
        for one, two in zip(base, other):
            for at in range(0, len(one), vocabulary):
                p, q = one[at:at + vocabulary], two[at:at + vocabulary]
                of_p, of_q = (max(x) + math.log(math.fsum(math.exp(v - max(x)) for v in x)) for x in (p, q))
                total += math.fsum(math.exp(a - of_p) * ((a - of_p) - (b - of_q)) for a, b in zip(p, q))
                tokens += 1
        return total / tokens

    def test_by_measured_loss(self):
        model = random_llama(self.path("m"))
        tensors = read_tensors(model + "/model.safetensors")
        tensors[QUIET] = quieter(tensors[QUIET], 1 / 64)
        write_safetensors(model + "/model.safetensors", tensors)
        text, other = self.ids(), self.ids("other.json", windows=2, seed=4)
        base = self.logits(model, other)
        flags = ("--method", "imatrix", "--calibration", text)
        self.quantize(model, self.path("fixed.gguf"), "Q4_K_M", *flags)
        size = os.path.getsize(self.path("fixed.gguf"))
        report = self.quantize(model, self.path("chosen.gguf"), "Q4_K_M", *flags, "--target-size", str(size))
        self.assertLessEqual(os.path.getsize(self.path("chosen.gguf")), size)
        fixed, chosen = (self.divergence(base, self.logits(self.path(name + ".gguf"), other))
                         for name in ("fixed", "chosen"))
        self.assertLess(chosen, fixed)
        bits = {line["tensor"]: int(re.search(r"q(\d)", line["format"]).group(1)) for line in report["linears"]}
        self.assertLess(bits[QUIET], min(b for name, b in bits.items() if ".0." in name))
        # The same for any number of threads.
        self.quantize(model, self.path("one.gguf"), "Q4_K_M", *flags, "--target-size", str(size), "-t", "1")
        with open(self.path("one.gguf"), "rb") as one, open(self.path("chosen.gguf"), "rb") as two:
            self.assertEqual(one.read() == two.read(), True)


if __name__ == "__main__":
    quantize_case.main()
