"""Tests of freshet eval logits on pictures: golden files as they are, features, wrong input.

usage: pictures_test.py [Class[.test] ...]    needs FRESHET, FRESHET_SOURCE_DIR and FRESHET_SEEDED
"""
import json
import os
import struct
import unittest

import cli_test
from cli_test import LLAMA

SEEDED = os.environ.get("FRESHET_SEEDED", "build/release/tests/data/seeded")


def load(path):
    """name -> (type, shape, bytes)"""
    with open(path, "rb") as f:
        data = f.read()
    size = struct.unpack("<Q", data[:8])[0]
    return {name: (e["dtype"], e["shape"], data[8 + size:][slice(*e["data_offsets"])])
            for name, e in json.loads(data[8:8 + size]).items() if name != "__metadata__"}


def save(path, tensors):
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))
    return path


def floats(tensor):
    return struct.unpack(f"<{len(tensor[2]) // 4}f", tensor[2])


class Pictures(cli_test.Case):
    def logits(self, model, inputs, *flags):
        out = self.path("out.safetensors")
        self.succeeds("eval", "logits", model, "--inputs", inputs, "-o", out, "--reference", *flags)
        return load(out)

    def test_golden_files_as_they_are(self):
        for name in ("llava", "qwen3-vl", "gemma3-vision", "mllama"):
            model = os.path.join(SEEDED, name)
            path = os.path.join(model, "golden.safetensors")
            golden, got = load(path), self.logits(model, path)
            for i in (0, 1):
                want, found = (floats(t[f"logits_{i}"]) for t in (golden, got))
                worst = max(abs(a - b) for a, b in zip(want, found))
                self.assertLess(worst, 2e-4 * max(map(abs, want)), f"{name}, input {i}")

    def test_pixel_values_stand_for_pictures(self):
        """What --features writes gives the same logits, bit for bit."""
        tables = {"llava": {}, "qwen3-vl": {"image_grid_thw_1": [[1, 10, 6], [1, 8, 8]]}}
        for name, own in tables.items():
            model = os.path.join(SEEDED, name)
            path = os.path.join(model, "golden.safetensors")
            seen = self.logits(model, path, "--features")
            self.assertNotIn("pixel_values_0", seen)  # text alone
            inputs = {n: t for n, t in load(path).items() if n.startswith("ids_")}
            inputs["pixel_values_1"] = seen["pixel_values_1"]
            for table, rows in own.items():
                numbers = [n for row in rows for n in row]
                inputs[table] = ("I64", [len(rows), 3], struct.pack(f"<{len(numbers)}q", *numbers))
            again = self.logits(model, save(self.path("pixels.safetensors"), inputs))
            self.assertEqual(seen["logits_1"], again["logits_1"], name)

    def test_wrong_input(self):
        model = os.path.join(SEEDED, "llava")
        golden = load(os.path.join(model, "golden.safetensors"))
        path, out = self.path("wrong.safetensors"), self.path("out.safetensors")

        def fails(changes, says, at=model):
            save(path, {**golden, **changes})
            self.fails(2, "eval", "logits", at, "--inputs", path, "-o", out, says=says)

        image = golden["image_1_0"]
        fails({"image_1_2": image}, "image tokens")
        fails({"image_1_0": ("U8", [28, 84, 1], image[2][:28 * 84])}, "must be U8")
        fails({"pixel_values_1": ("F32", [1, 3, 2, 2], bytes(48))}, "squares of 28 pixels")
        fails({}, "no tower", at=LLAMA)

    def test_inspect_names_the_tower(self):
        about = json.loads(self.succeeds("inspect", os.path.join(SEEDED, "qwen2-5-vl"), "--json"))
        self.assertEqual(about["vision"]["family"], "qwen2_5_vl")
        self.assertIn("tower of mllama: up to 4 tiles of 28 pixels",
                      self.succeeds("inspect", os.path.join(SEEDED, "mllama")))


if __name__ == "__main__":
    unittest.main()
