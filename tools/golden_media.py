#!/usr/bin/env python3
"""Writes tests/data/media/golden.json: what Pillow and transformers make of generated pictures and sound.

usage: golden_media.py          Needs numpy, Pillow 13 and transformers 5.24 with torch (Whisper's features).

Pictures come from a formula (picture() here and in src/media/test_pictures.h); only checksums of what
becomes of them are stored: CRC-32 of the pixels, or of the F32 values in the order of the machine.
Small files in tests/fuzz/corpus/fuzz_picture are written, too, with the checksum of their decoded pixels.
"""
import io
import json
import struct
import types
import zlib
from pathlib import Path

import numpy as np
import transformers as tf
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests/fuzz/corpus/fuzz_picture"
COUNT = 200
U = np.uint32


def picture(i, width=0, height=0):
    """Noise, gradients with steep edges, a checkerboard, or single bright lines."""
    width, height = width or 1 + i * 37 % 97, height or 1 + i * 61 % 89
    y, x, c = np.meshgrid(np.arange(height, dtype=U), np.arange(width, dtype=U), np.arange(3, dtype=U), indexing="ij")
    n = U(i)
    if i % 4 == 0:
        v = x * U(374761393) + y * U(668265263) + c * U(2246822519) + n * U(3266489917)
        v = (v ^ (v >> U(13))) * U(1274126177)
        v = v ^ (v >> U(16))
    elif i % 4 == 1:
        v = (x * U(7) + y * U(3) * (c + U(1)) + n * U(11)) >> U(1)
    elif i % 4 == 2:
        v = ((x // U(3 + i % 5) + y // U(2 + i % 7) + c) & U(1)) * U(255)
    else:
        v = np.where((x % U(9) == c) | (y % U(11) == U(2)), U(250), U(5) + c * U(3))
    return (v & U(255)).astype(np.uint8)


def crc(array):
    return f"{zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"


def resampled():
    """200 pictures by filter, each to another size; every seventh keeps its width, every ninth its height."""
    out = {}
    for name in ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"):
        sums = []
        for i in range(COUNT):
            p = Image.fromarray(picture(i))
            width = p.width if i % 7 == 0 else 1 + i * 53 % 120
            height = p.height if i % 9 == 0 else 1 + i * 71 % 110
            sums.append(crc(np.asarray(p.resize((width, height), getattr(Image.Resampling, name.upper())))))
        out[name] = " ".join(sums)
    return out


def families():
    clip = dict(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    square = dict(size={"height": 28, "width": 28})
    qwen = dict(size={"shortest_edge": 256, "longest_edge": 1024}, patch_size=4, merge_size=2, temporal_patch_size=2)
    tower = dict(image_size=28, patch_size=7)
    half = [0.5] * 3
    return {
        "llava": ("CLIPImageProcessor", clip, dict(model_type="llava", vision_config=dict(model_type="clip_vision_model", **tower))),
        "llava-crop": ("CLIPImageProcessor", dict(size={"shortest_edge": 20}, crop_size={"height": 31, "width": 24}, resample=2),
                       dict(model_type="llava", vision_feature_select_strategy="full", vision_config=dict(model_type="clip_vision_model", **tower))),
        "llava-pad": ("LlavaImageProcessor", dict(clip, do_pad=True), dict(model_type="llava", vision_config=dict(model_type="clip_vision_model", **tower))),
        "llava-next": ("LlavaNextImageProcessor", dict(clip, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]),
                       dict(model_type="llava_next", vision_config=dict(model_type="clip_vision_model", **tower))),
        "gemma3": ("Gemma3ImageProcessor", square, dict(model_type="gemma3", mm_tokens_per_image=4)),
        "siglip": ("SiglipImageProcessor", dict(size={"height": 30, "width": 22}, do_normalize=False), dict(model_type="llava", vision_config=dict(model_type="siglip_vision_model", **tower))),
        "qwen2-5-vl": ("Qwen2VLImageProcessor", qwen, dict(model_type="qwen2_5_vl")),
        "qwen3-vl": ("Qwen2VLImageProcessor", dict(qwen, image_mean=half, image_std=half, patch_size=3, temporal_patch_size=1), dict(model_type="qwen3_vl")),
        "idefics3": ("Idefics3ImageProcessor", dict(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}), dict(model_type="idefics3", scale_factor=2, vision_config=tower)),
        "smolvlm": ("SmolVLMImageProcessor", dict(size={"longest_edge": 90}, max_image_size={"longest_edge": 28}), dict(model_type="smolvlm", scale_factor=4, vision_config=tower)),
        "idefics3-whole": ("Idefics3ImageProcessor", dict(size={"longest_edge": 50}, max_image_size={"longest_edge": 28}, do_image_splitting=False), dict(model_type="idefics3", vision_config=tower)),
        "mllama": ("MllamaImageProcessor", dict(square, max_image_tiles=4), dict(model_type="mllama")),
        "mllama-6": ("MllamaImageProcessor", dict(size={"height": 20, "width": 20}, max_image_tiles=6, image_mean=[0.48145466, 0.4578275, 0.40821073],
                                                  image_std=[0.26862954, 0.26130258, 0.27577711]), dict(model_type="mllama")),
        "pixtral": ("PixtralImageProcessor", dict(size={"longest_edge": 50}, patch_size={"height": 6, "width": 6}),
                    dict(model_type="llava", vision_config=dict(model_type="pixtral", patch_size=6))),
        "mistral3": ("PixtralImageProcessor", dict(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8}),
                     dict(model_type="mistral3", spatial_merge_size=2, vision_config=dict(model_type="pixtral", patch_size=4))),
    }


def llava_next_rows(p, settings, made):
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor as P
    me = types.SimpleNamespace(image_processor=types.SimpleNamespace(image_grid_pinpoints=settings["image_grid_pinpoints"]), patch_size=7, num_additional_image_tokens=1)
    me._get_unpadded_features = types.MethodType(P._get_unpadded_features, me)
    return P._get_number_of_features(me, p.height, p.width, 28, 28) - 1


def patches(values, patch, merge):
    """[3, height, width] in the order of merged patches, as a tower reads them."""
    _, h, w = values.shape
    v = values.reshape(3, h // patch // merge, merge, patch, w // patch // merge, merge, patch)
    return v.transpose(1, 4, 2, 5, 0, 3, 6)


def processed():
    out = {}
    for name, (kind, settings, config) in families().items():
        processor = getattr(tf, kind + "Pil")(**settings)
        sums, layouts = [], []
        for i in range(COUNT):
            p = Image.fromarray(picture(i))
            nested = [[p]] if kind[:4] in ("Idef", "Smol", "Mlla") else [p]
            extra = dict(return_row_col_info=True) if kind[:4] in ("Idef", "Smol") else {}
            try:
                made = processor(images=nested, return_tensors="np", **extra)
            except (ValueError, ZeroDivisionError):
                sums.append("-"), layouts.append("-")
                continue
            values = np.asarray(made["pixel_values"], dtype=np.float32)
            if kind[:4] in ("Idef", "Smol", "Mlla") or name == "llava-next":
                values = values[0]
            if kind[:4] == "Pixt":
                patch, merge = config["vision_config"]["patch_size"], config.get("spatial_merge_size", 1)
                layouts.append("x".join(str(int(v) // patch) for v in made["image_sizes"][0]))
                values = patches(values[0], patch, merge)
            sums.append(crc(values))
            if "image_grid_thw" in made:
                layouts.append("x".join(str(v) for v in made["image_grid_thw"][0][1:]))
            elif "rows" in made:
                layouts.append(f"{made['rows'][0][0]}x{made['cols'][0][0]}")
            elif "aspect_ratio_ids" in made:
                layouts.append(f"{made['aspect_ratio_ids'][0][0]}x{made['aspect_ratio_mask'][0][0].sum()}")
            elif name == "llava-next":
                layouts.append(f"{len(values)}x{llava_next_rows(p, settings, made)}")
        out[name] = {"preprocessor": json.loads(processor.to_json_string()), "config": config, "values": " ".join(sums)}
        if layouts:
            out[name]["layout"] = " ".join(layouts)
        print(name, len(set(sums)), sums.count("-"), "refused", sorted(set(layouts))[:9])
    return out


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, bits, color, rows, extra=b""):
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)) + extra +
            chunk(b"IDAT", zlib.compress(b"".join(b"\0" + r for r in rows), 9)) + chunk(b"IEND", b""))


def interlaced(p):
    """Adam7 of an 8-bit RGB picture."""
    h, w = p.shape[:2]
    raw = b""
    for y0, x0, dy, dx in ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)):
        part = p[y0::dy, x0::dx]
        raw += b"".join(b"\0" + row.tobytes() for row in part if part.shape[1])
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 2, 0, 0, 1)) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b""))


def files():
    a = picture(9, 13, 11)
    grey, alpha = a[..., 0], picture(4, 13, 11)[..., :1]
    rgba = Image.fromarray(np.concatenate([a, alpha], -1), "RGBA")

    def saved(p, kind, **options):
        f = io.BytesIO()
        p.save(f, kind, **options)
        return f.getvalue()
    wide = lambda *v: struct.pack(f">{len(v)}H", *v)
    palette = chunk(b"PLTE", bytes(range(10, 40)))
    rgb, turned = Image.fromarray(a), Image.Exif()
    noise = Image.fromarray(picture(8, 13, 11))
    turned[274] = 6
    return {
        "rgb.png": saved(rgb, "PNG"), "rgba.png": saved(rgba, "PNG"), "grey.png": saved(Image.fromarray(grey), "PNG"),
        "grey_alpha.png": saved(Image.fromarray(np.stack([grey, alpha[..., 0]], -1), "LA"), "PNG"),
        "palette.png": saved(rgb.quantize(9), "PNG"), "interlaced.png": interlaced(a),
        "short_palette.png": png(4, 1, 8, 3, [bytes([0, 1, 9, 200])], palette),
        "palette_transparent.png": png(4, 2, 2, 3, [b"\x1b", b"\xe4"], palette + chunk(b"tRNS", b"\0\x80")),
        "grey1.png": png(11, 2, 1, 0, [b"\x5a\x40", b"\xff\xe0"]), "grey2.png": png(5, 1, 2, 0, [b"\x1b\x80"]), "grey4.png": png(3, 1, 4, 0, [b"\x1f\xa0"]),
        "grey16.png": png(5, 1, 16, 0, [wide(5, 255, 256, 40000, 65535)]), "grey_alpha16.png": png(2, 1, 16, 4, [wide(4660, 300, 40000, 65535)]),
        "rgb16.png": png(2, 1, 16, 2, [wide(4660, 300, 40000, 65535, 128, 127)]), "rgba16.png": png(1, 1, 16, 6, [wide(4660, 300, 40000, 7)]),
        "grey_key.png": png(2, 1, 8, 0, [b"\x09\xc8"], chunk(b"tRNS", b"\0\x09")), "gamma.png": png(2, 1, 8, 0, [b"\x09\xc8"], chunk(b"gAMA", struct.pack(">I", 30000))),
        "baseline.jpg": saved(noise, "JPEG", quality=90), "progressive.jpg": saved(noise, "JPEG", progressive=True), "full_chroma.jpg": saved(noise, "JPEG", subsampling=0),
        "grey.jpg": saved(Image.fromarray(grey), "JPEG"), "cmyk.jpg": saved(rgba.convert("RGB").convert("CMYK"), "JPEG", quality=60), "restarts.jpg": saved(noise, "JPEG", restart_marker_rows=1),
        "turned.jpg": saved(noise, "JPEG", exif=turned),
        "lossy.webp": saved(noise, "WEBP", quality=70), "lossless.webp": saved(noise, "WEBP", lossless=True), "lossy_alpha.webp": saved(rgba, "WEBP", quality=50),
        "lossless_alpha.webp": saved(rgba, "WEBP", lossless=True, exact=True),
    }


def decoded():
    CORPUS.mkdir(parents=True, exist_ok=True)
    out = {}
    for name, data in files().items():
        (CORPUS / name).write_bytes(data)
        p = Image.open(io.BytesIO(data)).convert("RGB")
        out[name] = f"{p.width}x{p.height} {crc(np.asarray(p))}"
    print({name: len(data) for name, data in files().items()})
    return out


def sound(count):
    """A chirp, clicks and noise of 16 bits by integers, then silence."""
    n = np.arange(count, dtype=np.int64)
    noise = (n * 1103515245 + 12345) % 2147483648 % 601 - 300
    saw = n * (n // 64 + 20) % 16001 - 8000
    return np.where(n % 4000 < 3000, saw + noise, noise // 40 * (n % 4000 < 3600)).astype(np.int16)


def mel():
    out = {}
    for mels in (80, 128):
        extractor = tf.WhisperFeatureExtractor(feature_size=mels, chunk_length=1)
        f = extractor((sound(13000).astype(np.float32) / 32768), sampling_rate=16000, return_tensors="np").input_features[0]
        out[str(mels)] = [round(float(v), 6) for v in f.reshape(-1)[::23]]
    return out


if __name__ == "__main__":
    folder = ROOT / "tests/data/media"
    folder.mkdir(parents=True, exist_ok=True)
    golden = {"resampled": resampled(), "processed": processed(), "decoded": decoded(), "mel": mel()}
    text = json.dumps(golden, separators=(",", ":")).replace('"processed"', '\n"processed"').replace('"decoded"', '\n"decoded"').replace('"mel"', '\n"mel"')
    (folder / "golden.json").write_text(text + "\n")
    print((folder / "golden.json").stat().st_size, "bytes")
