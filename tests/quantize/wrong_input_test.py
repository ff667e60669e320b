"""Wrong input of freshet quantize: one line that names it, and nothing left behind.

usage: wrong_input_test.py WrongWeights|WrongCalibration|WrongOptions|WrongOutput
"""
import json
import os
import resource
import shutil
import signal
import struct
import unittest

from quantize_case import GOLDEN, LAYER, QuantizeCase, random_llama, read_tensors, run, write_safetensors

LLAMA = os.path.join(GOLDEN, "llama")
TENSOR = LAYER(1) + "mlp.up_proj.weight"


class Case(QuantizeCase):
    def changed(self, name, tensor, change):
        """A golden Llama with other bytes in a tensor."""
        folder = self.copy("llama", name)
        path = os.path.join(folder, "model.safetensors")
        tensors = read_tensors(path)
        dtype, shape, data = tensors[tensor]
        tensors[tensor] = (dtype, shape, change(bytearray(data)))
        write_safetensors(path, tensors)
        return folder

    def refused(self, code, *arguments, says="", notes=0, **options):
        """One line, after at most as many notes; and no output."""
        result = run("quantize", *arguments, "--json", **options)
        self.assertEqual(result.returncode, code, f"{arguments}: {result.stderr}")
        lines = result.stderr.strip().split("\n")
        self.assertLessEqual(len(lines), 1 + notes, result.stderr)
        self.assertTrue(lines[-1].startswith("freshet: "), result.stderr)
        self.assertIn(says, lines[-1])
        self.assertEqual(result.stdout, "")
        return lines[-1]


class WrongWeights(Case):
    def test_nan_and_infinity_are_named(self):
        ids = self.ids()
        for name, bits in (("nan", 0x7fc0), ("inf", 0xff80)):
            def change(data, bits=bits):
                data[100:102] = struct.pack("<H", bits)
                return bytes(data)
            model = self.changed(name, TENSOR, change)
            for flags in (("--scheme", "W4A16_G32"), ("--scheme", "W4A16_G32", "--calibration", ids),
                          ("--scheme", "Q4_K_M"), ("--scheme", "NF4", "--ignore", "down_proj")):
                self.refused(2, model, "-o", self.path("o"), *flags, says=TENSOR, notes=1)
                shutil.rmtree(self.path("o.partial"), ignore_errors=True)
                self.assertFalse(os.path.exists(self.path("o")))

    def test_zeros(self):
        ids = self.ids()
        zero_row = self.changed("row", TENSOR, lambda d: bytes(128) + bytes(d[128:]))
        zero = self.changed("matrix", TENSOR, lambda d: bytes(len(d)))
        for model in (zero_row, zero):
            base = self.logits(model, ids)
            for scheme in ("W4A16_G32", "W4A16_G32_ASYM", "W8A8", "FP8", "NVFP4", "MXFP4", "LLM_INT8", "Q4_K_M", "IQ4_XS"):
                for method in ("rtn", "gptq"):
                    with self.subTest(model=model, scheme=scheme, method=method):
                        out = self.path(f"{os.path.basename(model)}-{scheme}-{method}")
                        self.quantize(model, out, scheme, "--method", method, "--calibration", ids)
                        self.assertLess(self.distance(base, self.logits(out, ids)), 0.5)

    def test_models_that_are_not_taken(self):
        done, gguf = self.path("done"), self.path("m.gguf")
        self.quantize(LLAMA, done, "W4A16_G32")
        self.succeeds("convert", LLAMA, "-o", gguf)
        out = ("-o", self.path("o"))
        self.refused(2, done, *out, "--scheme", "W4A16_G32", says="already")
        self.refused(2, gguf, *out, "--scheme", "W4A16_G32", says="Hugging Face folder")
        self.refused(2, os.path.join(GOLDEN, "gpt2"), *out, "--scheme", "W4A16_G32", says="stored [in, out]")
        self.refused(2, self.path("none"), *out, "--scheme", "W4A16_G32", says="none")
        self.assertEqual(self.left(), ["done", "m.gguf"])
        self.quantize(os.path.join(GOLDEN, "gpt2"), self.path("gpt2.gguf"), "Q4_K_M")


class WrongCalibration(Case):
    def model(self):
        return os.path.dirname(self.write_tokenizer(self.copy("llama", "m")))

    def write_tokenizer(self, folder):
        letters = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
        vocab = {chr(b): i for i, b in enumerate(letters)}
        vocab.update({chr(256 + i): len(letters) + i for i in range(256 - len(letters))})
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": level,
                     "post_processor": None, "decoder": {"type": "ByteLevel"},
                     "model": {"type": "BPE", "vocab": vocab, "merges": []}}
        path = os.path.join(folder, "tokenizer.json")
        with open(path, "w") as f:
            json.dump(tokenizer, f)
        return path

    def test_one_token(self):
        for scheme, method in (("W4A16_G32", "gptq"), ("W4A16_G32", "awq"), ("W8A8", "smoothquant"), ("FP8", "rtn"),
                               ("Q4_K_M", "imatrix+gptq")):
            with self.subTest(scheme=scheme, method=method):
                ids = self.write("one.json", "[[7]]")
                report = self.quantize(LLAMA, self.path(scheme + method), scheme, "--method", method, "--calibration", ids)
                self.assertTrue(all(l["relative_error"] >= 0 for l in report["linears"]))

    def test_texts_that_are_none(self):
        model, out = self.model(), ("-o", self.path("o"), "--scheme", "W4A16_G32")
        for name, content, says in (
                ("empty.txt", b"", "empty"), ("blank.txt", b" \n\n", "empty"),
                ("lines.jsonl", b'{"text": "one"}\n{"text": \n', "line 2"),
                ("key.jsonl", b'{"text": "one"}\n{"txt": "two"}\n', "line 2"),
                ("chat.jsonl", b'{"messages": []}\n', "chat template"),
                ("high.json", b"[[1, 2], [3, 288]]", "list 1"), ("ids.json", b"[[1, 2.5]]", "list 0"),
                ("none.json", b"[]", "no tokens"), ("binary.txt", bytes(range(256)) * 8, "UTF-8")):
            with self.subTest(name=name):
                line = self.refused(2, model, *out, "--calibration", self.write(name, content), says=says)
                self.assertIn(name, line)
                os.remove(self.path(name))
        self.refused(2, model, *out, "--calibration", self.path("absent.txt"), says="absent.txt")
        self.refused(1, model, *out, "--calibration", self.folder, says=self.folder)
        self.assertEqual(self.left(), ["m"])
        self.quantize(model, self.path("o"), "W4A16_G32", "--calibration", self.write("t.txt", "A short text."))


class WrongOptions(Case):
    def test_unknown_names(self):
        out = ("-o", self.path("o"))
        for flags, says in ((("--scheme", "W4A17"), "did you mean W4A16?"), (("--scheme", "Q4_K_N"), "q4_k_m"),
                            (("--scheme", "W4A16_G32", "--method", "gptk"), "did you mean gptq?"),
                            (("--scheme", "W4A16_G32", "--format", "awk"), "did you mean awq?"),
                            (("--scheme", "W4A16_G33"), "multiple of 8"), (("--scheme", "NF4_G32"), "no form with _G32"),
                            (("--scheme", "W4A16_G32", "--memory", "lots"), "lots"),
                            (("--scheme", "W4A16_G32", "--ignore", "("), "--ignore"),
                            (("--scheme", "W4A16_G32", "--ignore", "."), "nothing to quantise"),
                            (("--scheme", "W4A16"), "not a multiple of 128"), (("--scheme", "W4A16_G64"), "--ignore"),
                            (("--scheme", "FP8"), "--calibration"), (("--scheme", "W4A16_G32", "--format", "fp8"), "W4A16_G32"),
                            (("--scheme", "W4A16_G32", "--token-embedding-type", "q8_0"), "--token-embedding-type")):
            with self.subTest(flags=flags):
                self.refused(2, LLAMA, *out, *flags, says=says)
        line = self.refused(2, LLAMA, *out, "--scheme", "FP8_BLOCK", says="not a multiple of 128")
        self.assertNotIn("FP8_BLOCK_G32", line)  # there is none
        self.assertEqual(self.left(), [])


class WrongOutput(Case):
    FLAGS = ("--scheme", "W4A16_G32")

    def test_what_exists(self):
        out, file = self.path("o"), self.write("file", "mine")
        self.quantize(LLAMA, out, "W4A16_G32")
        before = self.files(out)
        self.refused(2, LLAMA, "-o", out, "--scheme", "W8A16_G32", says="--force")
        self.assertEqual(self.files(out), before)
        self.quantize(LLAMA, out, "W8A16_G32", "--force")
        self.assertGreater(os.path.getsize(os.path.join(out, "model.safetensors")), len(before["model.safetensors"]))
        self.refused(2, LLAMA, "-o", file, *self.FLAGS, says="is a file")
        self.refused(2, LLAMA, "-o", out, "--scheme", "Q4_K_M", says="is a folder")
        self.refused(2, LLAMA, "-o", file, "--scheme", "Q4_K_M", says="--force")
        mine = self.path("mine")
        os.mkdir(mine)
        with open(os.path.join(mine, "thesis.txt"), "w") as f:
            f.write("years of work")
        self.refused(2, LLAMA, "-o", mine, *self.FLAGS, "--force", says="config.json")
        self.assertEqual(os.listdir(mine), ["thesis.txt"])
        self.assertEqual(self.left(), ["file", "mine", "o"])

    def test_the_source(self):
        model = self.copy("llama", "m")
        before = self.files(model)
        for out in (model, model + "/", model + "/inside", self.folder):
            self.refused(2, model, "-o", out, *self.FLAGS, "--force", says="the model that is read")
        self.assertEqual((self.files(model), self.left()), (before, ["m"]))

    def test_names(self):
        """A relative one, and one that ends with a slash."""
        model = os.path.abspath(LLAMA)
        for name in ("a", "./b", "c/"):
            self.succeeds("quantize", model, "-o", name, *self.FLAGS, "--json", cwd=self.folder)
        self.assertEqual(self.left(), ["a", "b", "c"])
        self.assertEqual(self.files(self.path("a")), self.files(self.path("c")))

    def test_where_nothing_can_be_written(self):
        file = self.write("file", "mine")
        for out in (os.path.join(file, "o"), "/proc/o"):
            self.refused(2, LLAMA, "-o", out, *self.FLAGS, says=out)
        self.assertEqual(self.left(), ["file"])

    def test_a_full_disk(self):
        def limit(size):
            def set_limit():
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            return set_limit
        model = random_llama(self.path("m"))
        size = os.path.getsize(os.path.join(model, "model.safetensors"))
        for name, scheme, most in (("part", "W8A16_G32", 20_000), ("output", "W8A16", size // 3),
                                   ("file.gguf", "Q8_0", 20_000), ("output.gguf", "Q4_K_M", 500_000)):
            with self.subTest(name=name):
                out = self.path(name)
                self.refused(1, model, "-o", out, "--scheme", scheme, preexec_fn=limit(most), says="cannot write", notes=1)
                self.assertFalse(os.path.exists(out))
                self.assertLessEqual(set(self.left()), {"m", name + ".partial"})
                shutil.rmtree(out + ".partial", ignore_errors=True)
        self.refused(1, model, "-o", self.path("o"), "--scheme", "W4A16", "--memory", "0", "--calibration", self.ids(),
                     preexec_fn=limit(200_000), says="cannot write", notes=1)


if __name__ == "__main__":
    unittest.main()
