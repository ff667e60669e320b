"""Tests of pictures on the command line: golden files as they are, features, wrong input, --mmproj.

usage: pictures_test.py [Class[.test] ...]    needs FRESHET, FRESHET_SOURCE_DIR and FRESHET_UNPACKED_DATA
"""
import json
import os
import shutil
import string
import struct
import unittest
import zlib

import cli_test
from cli_test import LLAMA, UNPACKED

SEEDED = os.path.join(UNPACKED, "seeded")


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


def write_gguf(path, metadata, tensors):
    """metadata: key -> int, float, bool, str or a list of floats; tensors: name -> (shape, F32 bytes)."""
    def text(s):
        return struct.pack("<Q", len(s)) + s.encode()

    def value(v):
        if isinstance(v, bool):
            return struct.pack("<IB", 7, v)
        if isinstance(v, int):
            return struct.pack("<II", 4, v)
        if isinstance(v, float):
            return struct.pack("<If", 6, v)
        if isinstance(v, str):
            return struct.pack("<I", 8) + text(v)
        return struct.pack(f"<IIQ{len(v)}f", 9, 6, len(v), *v)

    head, data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)), b""
    for key, v in metadata.items():
        head += text(key) + value(v)
    for name, (shape, numbers) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, len(data))
        data += numbers + b"\0" * (-len(numbers) % 32)
    with open(path, "wb") as f:
        f.write(head + b"\0" * (-len(head) % 32) + data)
    return path


# llama.cpp's names of LLaVA's tower.
NAMES = {"multi_modal_projector.linear_1": "mm.0", "multi_modal_projector.linear_2": "mm.2",
         "vision_tower.": "v.", "embeddings.class_embedding": "class_embd",
         "embeddings.patch_embedding": "patch_embd", "embeddings.position_embedding": "position_embd",
         "pre_layrnorm": "pre_ln", "encoder.layers.": "blk.", "layer_norm": "ln", "self_attn.out_proj": "attn_out",
         "self_attn.": "attn_", "_proj.": ".", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}


def write_llava_tower(folder, path):
    tensors = {}
    for name, (dtype, shape, data) in load(os.path.join(folder, "model.safetensors")).items():
        if "language_model" in name or ".2." in name or "post_layernorm" in name:  # not used
            continue
        for old, new in NAMES.items():
            name = name.replace(old, new)
        assert dtype == "BF16", dtype
        halves = [data[i:i + 2] for i in range(0, len(data), 2)]
        tensors[name] = (shape, b"".join(b"\0\0" + half for half in halves))
    key = "clip.vision."
    return write_gguf(path, {
        "general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": "mlp",
        key + "image_size": 28, key + "patch_size": 7, key + "embedding_length": 32,
        key + "feed_forward_length": 48, key + "block_count": 2, key + "attention.head_count": 4,
        key + "attention.layer_norm_epsilon": 1e-5, key + "image_mean": [0.48145466, 0.4578275, 0.40821073],
        key + "image_std": [0.26862954, 0.26130258, 0.27577711]}, tensors)


# A vocabulary of characters, and what stands for a picture.
CHARACTERS = string.ascii_letters + string.digits + ".,:;?!<>@/-_'()" + "\u0120\u010a"
TEMPLATE = ("{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
            "{% endfor %}{% endif %}{% endfor %}")


def make_llava(folder):
    """The seeded checkpoint with a tokenizer."""
    shutil.copytree(os.path.join(SEEDED, "llava"), folder)
    vocab = {c: i for i, c in enumerate(CHARACTERS)}
    vocab["ab"] = len(vocab)
    vocab.update({f"unused{i}": i for i in range(len(vocab), 95)})
    tokenizer = {
        "version": "1.0", "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": 95, "content": "<image>", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "byte_fallback": False, "vocab": vocab, "merges": ["a b"]},
    }
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as f:
        json.dump(tokenizer, f)
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}, f)
    return folder


def png(path, width=40, height=30):
    rows = b"".join(b"\0" + bytes((x * 7 + y * 13 + c * 50) % 256 for x in range(width) for c in range(3))
                    for y in range(height))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    with open(path, "wb") as f:
        f.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) +
                chunk(b"IEND", b""))
    return path


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

    def test_run_writes_what_the_logits_say(self):
        """The first id that run writes is the best of the golden logits of a prompt with pictures."""
        for name in ("llava", "qwen2-5-vl", "gemma3-vision", "mllama"):
            model = os.path.join(SEEDED, name)
            path = os.path.join(model, "golden.safetensors")
            lines = self.succeeds("run", model, "--inputs", path, "-n", "1", "--temp", "0", "--print-ids",
                                  "--reference").splitlines()
            for i in (0, 1):
                row = floats(load(path)[f"logits_{i}"])[-96:]
                self.assertEqual(json.loads(lines[i]), [row.index(max(row))], f"{name}, input {i}")

    def test_mmproj(self):
        """A GGUF model with its tower writes what the folder writes."""
        folder = make_llava(self.path("llava"))
        model, tower = self.path("model.gguf"), write_llava_tower(folder, self.path("mmproj.gguf"))
        converted = cli_test.run("convert", folder, "-o", model, "--type", "bf16")
        self.assertEqual(converted.returncode, 0, converted.stderr)
        self.assertIn("the tower for pictures is left out", converted.stderr)
        picture = ["--image", png(self.path("picture.png")), "What is this?", "-n", "12", "--temp", "0",
                   "--print-ids", "--ignore-eos"]
        want = self.succeeds("run", folder, *picture)
        self.assertEqual(self.succeeds("run", model, "--mmproj", tower, *picture), want)
        other = picture.copy()
        other[1] = png(self.path("other.png"), 90, 31)
        self.assertNotEqual(self.succeeds("run", model, "--mmproj", tower, *other), want)
        self.fails(2, "run", model, *picture, says="reads text only")
        self.fails(2, "run", folder, "--mmproj", tower, *picture, says="leave out --mmproj")
        self.fails(2, "run", tower, *picture, says="give the model's own file, and this one with --mmproj")
        odd = write_gguf(self.path("odd.gguf"), {"general.architecture": "clip", "clip.projector_type": "ldp"}, {})
        self.fails(2, "run", model, "--mmproj", odd, *picture, says="the projector 'ldp' are not read")

    def test_inspect_and_bench_take_mmproj(self):
        folder = make_llava(self.path("llava"))
        model, tower = self.path("model.gguf"), write_llava_tower(folder, self.path("mmproj.gguf"))
        self.succeeds("convert", folder, "-o", model, "--type", "bf16")
        alone = json.loads(self.succeeds("inspect", model, "--json"))
        both = json.loads(self.succeeds("inspect", model, "--mmproj", tower, "--json"))
        self.assertNotIn("vision", alone)
        self.assertEqual(both["vision"]["layers"],
                         json.loads(self.succeeds("inspect", folder, "--json"))["vision"]["layers"])
        self.assertGreater(both["bytes"], alone["bytes"])
        self.assertIn("pictures      tower of", self.succeeds("inspect", model, "--mmproj", tower, "--kernels"))
        for flags in ((), ("--engine",)):
            row = json.loads(self.succeeds("bench", model, "--mmproj", tower, "-p", "0", "-n", "2", "-r", "1", "--json",
                                           *flags))[0]
            self.assertEqual(row["n_gen"], 2)
        self.succeeds("bench", "throughput", model, "--mmproj", tower, "--num-prompts", "2", "--input-len", "4",
                      "--output-len", "2", "--disable-tqdm")
        self.fails(2, "inspect", folder, "--mmproj", tower, says="leave out --mmproj")
        self.fails(2, "bench", folder, "--mmproj", tower, says="leave out --mmproj")

    def test_inspect_names_the_tower(self):
        about = json.loads(self.succeeds("inspect", os.path.join(SEEDED, "qwen2-5-vl"), "--json"))
        self.assertEqual(about["vision"]["family"], "qwen2_5_vl")
        self.assertIn("tower of mllama: up to 4 tiles of 28 pixels",
                      self.succeeds("inspect", os.path.join(SEEDED, "mllama")))


if __name__ == "__main__":
    unittest.main()
