#!/usr/bin/env python3
"""Golden models whose weights are a formula, so that the repository holds no weights.

usage: golden_seeded.py [--vocab N | --whole] [--routers F] SOURCE OUT NAME ...
needs torch and transformers (5.24)

SOURCE/<name>/ is a checkpoint of random weights with config.json and golden.safetensors (inputs
and outputs, as golden_models.py makes them). OUT/<name>/ gets config.json, weights.json (for each
tensor: shape, scale and offset, from the spread and the mean of the source's; the formula is that
of tests/seeded_checkpoints.cc) and golden.safetensors: transformers' outputs for the new weights,
in F32, for two of the source's inputs. Vocabularies shrink to N (96), to keep the outputs small;
--whole keeps them and all inputs, and adds 24 greedy ids instead of 8 (tests/data/golden). Routers
get F times their scale: where experts score almost equally, rounding selects another one, and other
weights may have no such place (tests/data/golden: 1.3 for deepseek-v3 and gpt-oss, 2.5 for mixtral).
Sources with a preprocessor_config.json read pictures: golden.safetensors gets image_i_k and not
pixel_values_i, which Pillow's form of the image processor makes.
"""
import json
import os
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

SOURCE_VOCAB = 288
VOCAB = 96
GREEDY = 8
LENGTHS = range(5, 64)
ROUTERS = 1.0
ROUTER_NAMES = ("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight")


def seeded(name, shape, scale, offset):
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    count = int(np.prod(shape)) if shape else 1
    with np.errstate(over="ignore"):
        x = np.uint64(h) + np.arange(count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) >> np.uint64(40)
    values = offset + scale * (x.astype(np.float64) / 8388608.0 - 1.0)
    return torch.from_numpy(values.astype(np.float32)).bfloat16().reshape(shape)


def shrink(shape):
    # Llama 3.2 Vision embeds eight ids behind its vocabulary.
    sizes = {SOURCE_VOCAB: VOCAB, SOURCE_VOCAB + 8: VOCAB + 8}
    return [sizes.get(n, n) for n in shape]


def shrink_special(token):
    """Ids around pictures keep their distance to the end of the vocabulary."""
    return token - SOURCE_VOCAB + VOCAB


SPECIAL = ("image_token_id", "image_token_index", "video_token_id", "boi_token_index",
           "eoi_token_index", "vision_start_token_id", "vision_end_token_id")


def describe(tensors):
    described = {}
    for name, t in tensors.items():
        t = t.double()
        spread = float(t.std()) if t.numel() > 1 else 0.0
        offset = float(f"{float(t.mean()):.3g}")
        if abs(offset) < spread / 4:
            offset = 0.0
        spread *= ROUTERS if name.endswith(ROUTER_NAMES) else 1.0
        described[name] = [shrink(t.shape), float(f"{spread * 3 ** 0.5:.3g}"), offset]
    return described


def write_config(source, to):
    config = json.loads((source / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        for key in ("vocab_size", "decoder_vocab_size"):
            if part.get(key) == SOURCE_VOCAB:
                part[key] = VOCAB
    for key in SPECIAL:
        if key in config:
            config[key] = shrink_special(config[key])
    for key in ("dtype", "transformers_version", "use_cache"):
        config.pop(key, None)
    (to / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return config


def outputs(model, given):
    """Outputs for one input, under the names of the source."""
    got = {}
    x = {n: v[None] for n, v in given.items()}
    score = type(model).__name__.endswith("Classification")
    causal = not score and "decoder_input_ids" not in x and model.can_generate()
    if score:
        got["score"] = model(**x).logits[0]
    elif causal or "decoder_input_ids" in x:
        got["logits"] = model(**x, use_cache=False).logits[0]
    else:
        hidden = model(**x).last_hidden_state[0]
        got["hidden"] = hidden
        got["mean"] = torch.nn.functional.normalize(hidden.mean(0), dim=0)
    if "logits" in got:
        key = "input_ids" if causal else "decoder_input_ids"
        ids = x[key] if causal else x[key][:, :1]
        start = ids.shape[1]
        for _ in range(GREEDY):
            logits = model(**{**x, key: ids}, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
        got["greedy"] = ids[0, start:]
    return {n: v.float() if v.is_floating_point() else v for n, v in got.items()}


def inputs(source):
    """The inputs of the source's cases, by the names of transformers."""
    golden = load_file(source / "golden.safetensors")
    names = {"ids": "input_ids", "decoder_ids": "decoder_input_ids",
             "token_type_ids": "token_type_ids"}
    for i in range(8):
        if f"ids_{i}" not in golden and f"input_features_{i}" not in golden:
            continue
        case = {}
        if f"input_features_{i}" in golden:
            case["input_features"] = golden[f"input_features_{i}"]
        for name, key in names.items():
            if f"{name}_{i}" in golden:
                ids = golden[f"{name}_{i}"]
                case[key] = ids if name == "token_type_ids" else torch.where(
                    ids < VOCAB, ids, 3 + ids % (VOCAB - 3))
        if len(case.get("input_ids", case.get("decoder_input_ids"))) in LENGTHS:
            yield case
            if "input_features" in case:
                return  # they are large


def picture_inputs(source, config):
    """As inputs(), of a model that reads pictures: text alone, and the last short case with some.
    Also the pictures themselves, by name."""
    from PIL import Image

    golden = load_file(source / "golden.safetensors")
    settings = json.loads((source / "preprocessor_config.json").read_text())
    processor = getattr(transformers, settings["image_processor_type"] + "Pil").from_dict(settings)
    nested = config["model_type"] in ("mllama", "idefics3", "smolvlm")
    special = {golden_id for golden_id in range(SOURCE_VOCAB - 4, SOURCE_VOCAB + 1)}
    last = max(i for i in range(1, 4) if len(golden.get(f"ids_{i}", range(64))) < 64)
    for i in (0, last):
        ids = [shrink_special(t) if t in special else 3 + t % (VOCAB - 8)
               for t in golden[f"ids_{i}"].tolist()]
        x, images = {"input_ids": torch.tensor([ids])}, {}
        while f"image_{i}_{len(images)}" in golden:
            images[f"image_#_{len(images)}"] = golden[f"image_{i}_{len(images)}"]
        if images:
            pictures = [Image.fromarray(p.numpy()) for p in images.values()]
            made = processor(images=[pictures] if nested else pictures, return_tensors="pt")
            for name in ("pixel_values", "image_grid_thw", "image_sizes", "aspect_ratio_ids",
                         "aspect_ratio_mask", "pixel_attention_mask"):
                if name in made:
                    x[name] = made[name]
            if f"cross_attention_mask_{i}" in golden:
                x["cross_attention_mask"] = golden[f"cross_attention_mask_{i}"][None]
        yield x, images


def picture_logits(model, x, ids, config):
    x = {**x, "input_ids": ids}
    is_image = ids == config.get("image_token_id", config.get("image_token_index"))
    if config["model_type"] == "gemma3":
        x["token_type_ids"] = is_image.long()
    if config["model_type"].startswith("qwen"):
        x["mm_token_type_ids"] = is_image.int()
    if "cross_attention_mask" in x:
        mask = x["cross_attention_mask"]
        more = ids.shape[1] - mask.shape[1]
        x["cross_attention_mask"] = torch.cat([mask, mask[:, -1:].expand(-1, more, -1, -1)], 1)
    return model(**x, use_cache=False).logits[0].float()


def picture_cases(model, source, config):
    for x, images in picture_inputs(source, config):
        ids = x["input_ids"]
        case = {**images, "ids_#": ids[0], "logits_#": picture_logits(model, x, ids, config)}
        start = ids.shape[1]
        for _ in range(GREEDY):
            best = picture_logits(model, x, ids, config)[-1:].argmax(-1, keepdim=True)
            if best >= VOCAB - 4:
                break  # an image token by chance
            ids = torch.cat([ids, best], 1)
        yield {**case, "greedy_#": ids[0, start:]}


def make(source, to):
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    config = write_config(source, to)
    described = describe(load_file(source / "model.safetensors"))
    lines = (f'{json.dumps(n)}: {json.dumps(d, separators=(",", ":"))}'
             for n, d in described.items())
    (to / "weights.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    cls = getattr(transformers, config["architectures"][0])
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(to / "config.json", folder)
        save_file({n: seeded(n, *d) for n, d in described.items()},
                  os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        model, report = cls.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True,
            # Falcon's eager path adds ALiBi twice.
            attn_implementation="sdpa" if config.get("alibi") else "eager")
    # MiniMax makes tables of decays from its configuration.
    missing = {k for k in report["missing_keys"] if not k.endswith(("_decay", "slope_rate"))}
    unread = missing or report["unexpected_keys"]
    assert not unread, f"{to.name}: {report}"
    model.eval()
    golden = {}
    names = {"input_ids": "ids", "decoder_input_ids": "decoder_ids"}
    if (source / "preprocessor_config.json").exists() and "vision_config" in config:
        shutil.copy(source / "preprocessor_config.json", to)
        os.chmod(to / "preprocessor_config.json", 0o644)
        for i, case in enumerate(picture_cases(model, source, config)):
            golden.update({n.replace("#", str(i)): v.clone() for n, v in case.items()})
        assert all(v.isfinite().all() for v in golden.values() if v.is_floating_point())
        return write_golden(golden, described, to)
    for i, case in enumerate(inputs(source)):
        for name, value in {**case, **outputs(model, case)}.items():
            assert not value.is_floating_point() or value.isfinite().all(), name
            golden[f"{names.get(name, name)}_{i}"] = value.contiguous()
    write_golden(golden, described, to)


def write_golden(golden, described, to):
    assert golden, "the source has no inputs that fit"
    save_file(golden, to / "golden.safetensors")
    os.chmod(to / "golden.safetensors", 0o644)
    size = sum(f.stat().st_size for f in to.iterdir())
    last = next(v for n, v in golden.items() if n.split("_")[0] in ("logits", "hidden", "score"))
    print(f"{to.name}: {size} bytes, {len(described)} tensors, largest {last.abs().max():.2f}")


def main():
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    global VOCAB, GREEDY, LENGTHS, ROUTERS
    args = sys.argv[1:]
    if args[0] == "--vocab":
        VOCAB, args = int(args[1]), args[2:]
    elif args[0] == "--whole":
        VOCAB, GREEDY, LENGTHS, args = SOURCE_VOCAB, 24, range(1, 1 << 20), args[1:]
    if args[0] == "--routers":
        ROUTERS, args = float(args[1]), args[2:]
    source, out = map(pathlib.Path, args[:2])
    for name in args[2:]:
        make(source / name, out / name)


if __name__ == "__main__":
    main()
