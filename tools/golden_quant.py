#!/usr/bin/env python3
"""Writes what tests/data/quant.tar.xz holds (tools/pack_test_data packs it): what the storage formats must decode to, and how well others encode.

For each format of the GGUF package that we read: NAME.blocks (random blocks with the edge cases of
their scales) and NAME.f32 (the numbers that gguf.quants.dequantize makes of them). input.f32 holds
numbers of several distributions and rmse.txt the error of gguf.quants.quantize on each of them,
a line "format distribution rmse" each; distributions lie in order, ROWS numbers each. With --ggml,
the library's own encoders are measured too, and those of formats that the package cannot write.

FP8 is compared with ml_dtypes' E4M3: fp8.blocks, fp8.f32 and lines of rmse.txt, all that --fp8 writes;
INT8, a row each, with the rule of compressed-tensors, all that --int8 writes.
The IQ and TQ formats have random blocks of their own: all that --iq writes, with lines of rmse.txt that
hold the error of the package or, with --ggml, of the library given equal importances.
INT4 groups are decoded by numpy, and encoded by the rule of compressed-tensors for asymmetric groups:
int4_*.blocks and .f32 and lines of rmse.txt, all that --int4 writes.
The formats of published safetensors files (FP8 and integers in small groups, MXFP8, NVFP4, NF4, FP4) are
decoded by numpy and ml_dtypes and encoded by the plain rules of compressed-tensors and bitsandbytes: scales
that just cover a block; all that --published writes.

Needs: pip install gguf ml_dtypes numpy. Usage: tools/golden_quant.py [--out FOLDER]
       [--iq] [--ggml libggml-base.so | --fp8 | --int4 | --int8 | --published]
"""
import argparse
import ctypes
import pathlib

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import quants

# Byte offsets of the f16 fields of a block.
F16_FIELDS = {
    T.F16: [0], T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
    T.IQ4_NL: [0], T.IQ4_XS: [0],
}
OTHERS = [T.F32, T.BF16, T.MXFP4]
GRIDS = {
    T.IQ1_S: [0], T.IQ1_M: [], T.IQ2_XXS: [0], T.IQ2_XS: [0], T.IQ2_S: [0], T.IQ3_XXS: [0],
    T.IQ3_S: [0], T.TQ1_0: [52], T.TQ2_0: [64],
}
# +0, -0, least and greatest subnormal, least normal, one, greatest of both signs.
EDGES = np.array([0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF], np.uint16)
ROWS = 4096


def put_scale_of_iq1_m(b, d):
    """A nibble of the F16 is the upper nibble of each of the last four words."""
    words = b[:, 48:].copy().view("<u2")
    for i in range(4):
        words[:, i] = (words[:, i] & 0x0FFF) | (((d >> (4 * i)) & 15) << 12)
    b[:, 48:] = words.view(np.uint8)


def grid_blocks_of(kind, rng):
    b = rng.integers(0, 256, (24, quants.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    b[1] = 0
    b[2] = 255
    d = (rng.standard_normal(len(b)) * 0.05).astype(np.float16).view(np.uint16)
    d[3:3 + len(EDGES)] = EDGES
    for offset in GRIDS[kind]:
        b[:, offset:offset + 2] = d.view(np.uint8).reshape(-1, 2)
    if kind == T.IQ1_M:
        put_scale_of_iq1_m(b, d)
    return b


def blocks_of(kind, rng):
    size, bytes_ = quants.GGML_QUANT_SIZES[kind]
    n = 512 if size == 1 else 40 if size == 32 else 20
    b = rng.integers(0, 256, (n, bytes_), dtype=np.uint8)
    b[1] = 0
    b[2] = 255
    for offset in F16_FIELDS.get(kind, []):
        d = (rng.standard_normal(n) * 0.05).astype(np.float16).view(np.uint16)
        d[3:3 + len(EDGES)] = np.roll(EDGES, offset)
        if size == 1:
            d[20:] = rng.integers(0, 65536, n - 20, dtype=np.uint16)
            nan = (d & 0x7FFF) > 0x7C00
            d[nan] &= 0x7BFF
        b[:, offset:offset + 2] = d.view(np.uint8).reshape(n, 2)
    if kind == T.MXFP4:
        b[:, 0] = rng.integers(100, 140, n)
        b[3:9, 0] = [0, 1, 2, 127, 253, 254]
    if kind in (T.F32, T.BF16):
        values = rng.standard_normal(n).astype(np.float32)
        values[:8] = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-40, 3.4e38, 1.0]
        b = values.view(np.uint8).reshape(n, 4)
        b = b if kind == T.F32 else np.ascontiguousarray(b[:, 2:])
    return b


def decode(kind, b):
    if kind == T.F32:
        return b.view(np.float32).reshape(-1)
    if kind == T.F16:
        return b.view(np.float16).astype(np.float32).reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return quants.dequantize(b.reshape(-1), kind).reshape(-1)


def inputs(rng):
    sparse = rng.standard_normal(ROWS) * (rng.random(ROWS) < 0.1)
    outliers = rng.standard_normal(ROWS)
    outliers[::97] *= 20
    return {
        "normal": rng.standard_normal(ROWS) * 0.02,
        "laplace": rng.laplace(0, 0.02, ROWS),
        "uniform": rng.uniform(-1, 1, ROWS),
        "shifted": rng.standard_normal(ROWS) * 0.1 + 3,
        "sparse": sparse,
        "outliers": outliers,
        "student": rng.standard_t(3, ROWS) * 0.01,
        "tiny": rng.standard_normal(ROWS) * 1e-4,
    }


def encode_ggml(library, kind, x, importance=None):
    """x in rows of 256, as ggml_quantize_chunk encodes them."""
    if importance is not None:
        importance = importance.ctypes.data_as(ctypes.c_void_p)
    size, bytes_ = quants.GGML_QUANT_SIZES[kind]
    out = np.zeros(x.size // size * bytes_, np.uint8)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk(
        ctypes.c_int(kind.value), x.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(0), ctypes.c_int64(x.size // 256),
        ctypes.c_int64(256), importance)
    return out


def rmse(kind, x, encoded):
    blocks = np.frombuffer(encoded.tobytes(), np.uint8).reshape(-1, quants.GGML_QUANT_SIZES[kind][1])
    return np.sqrt(np.mean((x.astype(np.float64) - decode(kind, blocks)) ** 2))


def errors(rows, library):
    python = [T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.MXFP4]
    native = [T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS]
    for kind in python + (native if library else []):
        for name, x in rows.items():
            e = rmse(kind, x, quants.quantize(x, kind)) if kind in python else np.inf
            if library and kind not in (T.F16, T.BF16):
                e = min(e, rmse(kind, x, encode_ggml(library, kind, x)))
            yield f"{kind.name.lower()} {name} {e:.9e}\n"


def iq(out, library):
    rng = np.random.default_rng(23)
    for kind in GRIDS:
        name = kind.name.lower()
        b = grid_blocks_of(kind, rng)
        (out / f"{name}.blocks").write_bytes(b.tobytes())
        (out / f"{name}.f32").write_bytes(decode(kind, b).astype("<f4").tobytes())
    rows = np.frombuffer((out / "input.f32").read_bytes(), "<f4").reshape(-1, ROWS)
    names = {kind.name.lower() for kind in GRIDS}
    lines = [s for s in (out / "rmse.txt").read_text().splitlines(True) if s.split()[0] not in names]
    equal = np.ones(256, np.float32)
    for kind in GRIDS:
        for name, x in zip(inputs(np.random.default_rng(20)), rows):
            package = kind in (T.TQ1_0, T.TQ2_0)
            e = rmse(kind, x, quants.quantize(x, kind)) if package else np.inf
            if library and not package:
                e = min(e, rmse(kind, x, encode_ggml(library, kind, x, equal)))
            lines.append(f"{kind.name.lower()} {name} {e:.9e}\n")
    (out / "rmse.txt").write_text("".join(lines), encoding="ascii")


def fp8(out):
    """128 codes, then an F32 scale; the error is that of scales which just cover a block."""
    import ml_dtypes
    e4m3 = ml_dtypes.float8_e4m3fn
    rng = np.random.default_rng(21)
    codes = rng.integers(0, 256, (20, 128), dtype=np.uint8)
    codes[(codes & 0x7f) == 0x7f] = 0x80
    codes[0] = np.delete(np.arange(256), [127, 255])[:128]
    codes[1] = np.delete(np.arange(256), [127, 255])[126:]
    scales = (rng.standard_normal((20, 1)) * 0.05).astype("<f4")
    scales[:6, 0] = [1, 1, 0, -0.0, 1e-40, 7e35]
    (out / "fp8.blocks").write_bytes(np.hstack([codes, scales.view(np.uint8)]).tobytes())
    (out / "fp8.f32").write_bytes((codes.view(e4m3).astype("<f4") * scales).tobytes())
    rows = np.frombuffer((out / "input.f32").read_bytes(), "<f4").reshape(-1, ROWS // 128, 128)
    lines = [s for s in (out / "rmse.txt").read_text().splitlines(True) if not s.startswith("fp8 ")]
    for name, x in zip(inputs(rng), rows):
        scale = np.abs(x).max(-1, keepdims=True) / np.float32(448)
        y = (x / np.where(scale > 0, scale, 1)).astype(e4m3).astype(np.float32) * scale
        error = np.sqrt(np.mean((x.astype(np.float64) - y) ** 2))
        lines.append(f"fp8 {name} {error:.9e}\n")
    (out / "rmse.txt").write_text("".join(lines), encoding="ascii")


def int4(out, group):
    """The upper 20 bits of an F32 and a zero point, then each 32 numbers as in Q4_0."""
    rng = np.random.default_rng(22 + group)
    n = 1024 // group
    scales = (rng.standard_normal(n) * 0.05).astype("<f4")
    scales[:6] = [1, 0, -0.0, 1e-40, 3e37, np.float32(2) ** -126]
    bits = scales.view("<u4") & 0xFFFFF000
    zeros = rng.integers(0, 16, n, dtype=np.uint32)
    q = rng.integers(0, 16, (n, group // 32, 2, 16), dtype=np.uint8)
    head = ((bits >> 8) | zeros).astype("<u4").view(np.uint8).reshape(n, 4)[:, [1, 2, 0]]
    nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(n, -1)
    numbers = q.reshape(n, group).astype(np.int32) - zeros.astype(np.int32)[:, None]
    (out / f"int4_g{group}.blocks").write_bytes(np.hstack([head, nibbles]).tobytes())
    decoded = numbers.astype("<f4") * bits.view("<f4")[:, None]
    (out / f"int4_g{group}.f32").write_bytes(decoded.tobytes())
    kind = f"int4_g{group} "
    rows = np.frombuffer((out / "input.f32").read_bytes(), "<f4").reshape(-1, ROWS // group, group)
    lines = [s for s in (out / "rmse.txt").read_text().splitlines(True) if not s.startswith(kind)]
    for name, x in zip(inputs(np.random.default_rng(20)), rows):
        low, high = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
        scale = np.where(high > low, (high - low) / np.float32(15), np.float32(1))
        zero = np.clip(np.round(-low / scale), 0, 15)
        y = (np.clip(np.round(x / scale) + zero, 0, 15) - zero) * scale
        lines.append(f"{kind}{name} {np.sqrt(np.mean((x.astype(np.float64) - y) ** 2)):.9e}\n")
    (out / "rmse.txt").write_text("".join(lines), encoding="ascii")


def int8(out):
    """An F32 scale, then codes; the error is that of the scale (greatest - least code) / 2 = 127.5 steps."""
    codes = np.concatenate([np.arange(-128, 128), np.arange(255, -1, -3) - 128]).astype(np.int8)
    scale = np.array([0.0137], "<f4")
    (out / "int8.blocks").write_bytes(scale.tobytes() + codes.tobytes())
    (out / "int8.f32").write_bytes((codes.astype("<f4") * scale).tobytes())
    rows = np.frombuffer((out / "input.f32").read_bytes(), "<f4").reshape(-1, ROWS)
    lines = [s for s in (out / "rmse.txt").read_text().splitlines(True) if not s.startswith("int8 ")]
    for name, x in zip(inputs(np.random.default_rng(20)), rows):
        scale = np.abs(x).max() / np.float32(127.5)
        y = np.clip(np.round(x / scale), -128, 127) * scale
        lines.append(f"int8 {name} {np.sqrt(np.mean((x.astype(np.float64) - y) ** 2)):.9e}\n")
    (out / "rmse.txt").write_text("".join(lines), encoding="ascii")


# As bitsandbytes creates them.
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                0.7229568362236023, 1.0], np.float32)
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
EDGE_SCALES = [1, 0, -0.0, 1e-40, 3e35, np.float32(2) ** -126]


def nearest(levels, x):
    return levels[np.abs(x[..., None] - levels).argmin(-1)]


def e4m3_codes(rng, shape):
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7f) == 0x7f] = 0x80
    return codes


def write_case(out, name, blocks, decoded, encode):
    """encode: rows of ROWS numbers as others encode and decode them."""
    (out / f"{name}.blocks").write_bytes(blocks)
    (out / f"{name}.f32").write_bytes(decoded.astype("<f4").tobytes())
    rows = np.frombuffer((out / "input.f32").read_bytes(), "<f4").reshape(-1, ROWS)
    lines = [s for s in (out / "rmse.txt").read_text().splitlines(True) if not s.startswith(name + " ")]
    for kind, x in zip(inputs(np.random.default_rng(20)), rows):
        error = np.sqrt(np.mean((x.astype(np.float64) - encode(x).reshape(-1)) ** 2))
        lines.append(f"{name} {kind} {error:.9e}\n")
    (out / "rmse.txt").write_text("".join(lines), encoding="ascii")


def published_floats(out, rng):
    import ml_dtypes
    e4m3 = ml_dtypes.float8_e4m3fn
    scales = (rng.standard_normal((20, 1)) * 0.05).astype("<f4")
    scales[:6, 0] = EDGE_SCALES

    codes = e4m3_codes(rng, (20, 32))
    def in_groups(x):
        x = x.reshape(-1, 32)
        s = np.abs(x).max(-1, keepdims=True) / np.float32(448)
        return (x / np.where(s > 0, s, 1)).astype(e4m3).astype(np.float32) * s
    write_case(out, "fp8_g32", np.hstack([codes, scales.view(np.uint8)]).tobytes(),
               codes.view(e4m3).astype("<f4") * scales, in_groups)

    powers = rng.integers(100, 140, (20, 1), dtype=np.uint8)
    powers[:4, 0] = [0, 1, 127, 245]
    def in_powers(x):
        x = x.reshape(-1, 32)
        most = np.abs(x).max(-1, keepdims=True)
        s = np.exp2(np.floor(np.log2(np.where(most > 0, most, 1))) - 8).astype(np.float32)
        return np.clip(x / s, -448, 448).astype(e4m3).astype(np.float32) * s
    write_case(out, "mxfp8", np.hstack([codes, powers]).tobytes(),
               codes.view(e4m3).astype("<f4") * np.ldexp(np.float32(1), powers.astype(int) - 127), in_powers)

    whole = np.array([0.0137], "<f4")
    q = rng.integers(0, 16, (40, 16), dtype=np.uint8)
    scales = e4m3_codes(rng, (40, 1))
    level = np.where(q > 8, -E2M1[q & 7], E2M1[q & 7])
    def in_sixteens(x):
        whole = np.abs(x).max() / np.float32(448 * 6)
        x = x.reshape(-1, 16)
        s = (np.abs(x).max(-1, keepdims=True) / 6 / whole).astype(e4m3).astype(np.float32) * whole
        y = np.clip(np.abs(x) / np.where(s > 0, s, 1), 0, 6)
        return np.sign(x) * nearest(E2M1, y) * s
    blocks = np.hstack([scales, q[:, :8] | q[:, 8:] << 4])
    write_case(out, "nvfp4", whole.tobytes() + blocks.tobytes(),
               level * (scales.view(e4m3).astype("<f4") * whole), in_sixteens)

    for name, levels in (("nf4", NF4), ("fp4", FP4)):
        q = rng.integers(0, 16, (20, 64), dtype=np.uint8)
        scales = (rng.standard_normal((20, 1)) * 0.05).astype("<f4")
        scales[:6, 0] = EDGE_SCALES
        def in_levels(x):
            x = x.reshape(-1, 64)
            s = np.abs(x).max(-1, keepdims=True)
            return nearest(levels, x / np.where(s > 0, s, 1)) * s
        write_case(out, name, np.hstack([q[:, ::2] | q[:, 1::2] << 4, scales.view(np.uint8)]).tobytes(),
                   levels[q] * scales, in_levels)


def published_integers(out, rng, bits, group):
    """The upper 24 bits of an F32 above a zero point, after the numbers: low pairs of bits, then high ones."""
    n, top = 1024 // group, (1 << bits) - 1
    scales = (rng.standard_normal(n) * 0.05).astype("<f4")
    scales[:6] = EDGE_SCALES
    held = scales.view("<u4") & np.uint32(0xFFFFFF00)
    zeros = rng.integers(0, top + 1, n, dtype=np.uint32)
    q = rng.integers(0, top + 1, (n, group // 32, 32), dtype=np.uint8)
    if bits == 8:
        packed = q
    else:
        pairs, high = (q & 3).reshape(n, -1, 4, 8), (q >> 2).reshape(n, -1, 8, 4)
        packed = sum(pairs[:, :, i] << (2 * i) for i in range(4))
        if bits == 3:
            packed = np.concatenate([packed, sum(high[:, :, i] << i for i in range(8))], -1)
    head = (held | zeros).astype("<u4").view(np.uint8).reshape(n, 4)
    numbers = q.reshape(n, group).astype(np.int32) - zeros.astype(np.int32)[:, None]
    def in_range(x):
        x = x.reshape(-1, group)
        low, high = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
        scale = np.where(high > low, (high - low) / np.float32(top), np.float32(1))
        zero = np.clip(np.round(-low / scale), 0, top)
        return (np.clip(np.round(x / scale) + zero, 0, top) - zero) * scale
    write_case(out, f"int{bits}_g{group}", np.hstack([packed.reshape(n, -1), head]).tobytes(),
               numbers.astype("<f4") * held.view("<f4")[:, None], in_range)


def published(out):
    rng = np.random.default_rng(23)
    published_floats(out, rng)
    for bits in (2, 3, 8):
        for group in (128, 32):
            published_integers(out, rng, bits, group)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--out", type=pathlib.Path, default="build/release/tests/data/quant")
    args.add_argument("--ggml", type=ctypes.CDLL)
    args.add_argument("--fp8", action="store_true")
    args.add_argument("--int8", action="store_true")
    args.add_argument("--int4", action="store_true")
    args.add_argument("--published", action="store_true")
    args.add_argument("--iq", action="store_true")
    args = args.parse_args()
    if args.iq:
        return iq(args.out, args.ggml)
    if args.fp8:
        return fp8(args.out)
    if args.int4:
        return [int4(args.out, group) for group in (32, 128)]
    if args.int8:
        return int8(args.out)
    if args.published:
        return published(args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(20)
    for kind in [*F16_FIELDS, *OTHERS]:
        b = blocks_of(kind, rng)
        name = kind.name.lower()
        (args.out / f"{name}.blocks").write_bytes(b.tobytes())
        (args.out / f"{name}.f32").write_bytes(decode(kind, b).astype("<f4").tobytes())
    rows = {k: v.astype(np.float32) for k, v in inputs(rng).items()}
    (args.out / "input.f32").write_bytes(b"".join(v.tobytes() for v in rows.values()))
    (args.out / "rmse.txt").write_text("".join(errors(rows, args.ggml)), encoding="ascii")
    fp8(args.out)
    for group in (32, 128):
        int4(args.out, group)
    int8(args.out)
    published(args.out)
    iq(args.out, args.ggml)


if __name__ == "__main__":
    main()
