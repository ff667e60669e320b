#!/usr/bin/env python3
"""Reads a GGUF file with the format's own package and compares its tensors with another checkpoint.

The reference is a GGUF file, a .safetensors file or a folder of them. Tensors are paired by name (or by
--names FILE, lines "gguf-name reference-name"). Prints each tensor's relative error and fails when a
tensor is missing, has another shape, or errs by more than --tolerance (0: the same numbers).

Needs: pip install gguf numpy. Usage: tools/check_gguf.py FILE.gguf REFERENCE [--tolerance 0.1]
"""
import argparse
import json
import pathlib
import sys

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize


def read_gguf(path):
    """Name -> F32 array, shape outermost first."""
    out = {}
    for t in GGUFReader(path).tensors:
        shape = tuple(int(d) for d in reversed(t.shape))
        out[t.name] = dequantize(t.data, t.tensor_type).astype(np.float32).reshape(shape)
    return out


def read_safetensors(path):
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    out = {}
    for name, t in json.loads(raw[8:end]).items():
        if name == "__metadata__":
            continue
        begin, stop = (end + o for o in t["data_offsets"])
        if t["dtype"] == "BF16":
            x = (np.frombuffer(raw[begin:stop], "<u2").astype(np.uint32) << 16).view(np.float32)
        elif t["dtype"] in ("F16", "F32"):
            x = np.frombuffer(raw[begin:stop], "<f2" if t["dtype"] == "F16" else "<f4")
        else:
            continue
        out[name] = x.astype(np.float32).reshape(t["shape"])
    return out


def read(path):
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
        return {k: v for f in files for k, v in read(f).items()}
    return read_gguf(path) if path.suffix == ".gguf" else read_safetensors(path)


def relative_error(a, b):
    scale = np.sqrt(np.mean(b.astype(np.float64) ** 2))
    error = np.sqrt(np.mean((a.astype(np.float64) - b) ** 2))
    return error / scale if scale > 0 else error


def main():
    args = argparse.ArgumentParser()
    args.add_argument("file", type=pathlib.Path)
    args.add_argument("reference", type=pathlib.Path)
    args.add_argument("--names", type=pathlib.Path)
    args.add_argument("--tolerance", type=float, default=0.0)
    args = args.parse_args()
    ours, theirs = read_gguf(args.file), read(args.reference)
    pairs = {name: name for name in ours}
    if args.names:
        pairs = dict(line.split() for line in args.names.read_text().splitlines() if line.strip())
    bad = 0
    for name, other in pairs.items():
        if name not in ours or other not in theirs:
            print(f"{name}: missing")
            bad += 1
        elif ours[name].shape != theirs[other].shape:
            print(f"{name}: shape {ours[name].shape}, expected {theirs[other].shape}")
            bad += 1
        else:
            e = relative_error(ours[name], theirs[other])
            bad += not e <= args.tolerance
            print(f"{name}: relative error {e:.3e}{'' if e <= args.tolerance else '  TOO LARGE'}")
    print(f"{len(pairs)} tensors, {bad} bad")
    return 1 if bad or not pairs else 0


if __name__ == "__main__":
    sys.exit(main())
