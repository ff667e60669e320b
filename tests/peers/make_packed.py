#!/usr/bin/env python3
"""Matrices as other packages pack them, for src/quantizer/containers/packed_test.cc.

usage: make_packed.py OUT.safetensors     (then tools/pack_test_data FOLDER, which writes tests/data/packed.tar.xz)

For each case CONTAINER/SCHEME the file has the codes, scales and zero points that were given ("in.") and the
tensors of a module that the package made of them ("out."): compressed-tensors 0.20.0, AutoGPTQ 0.7.1,
AutoAWQ 0.2.6 and bitsandbytes 0.50.2 (torch 2.15). AutoGPTQ and AutoAWQ do not import beside today's
transformers, so their wheels lie unpacked in PYTHONPATH and the sources that pack are loaded alone.
"""
import importlib.util
import json
import sys
import types

import torch
from safetensors.torch import save_file

ROWS, COLS, GROUP = 32, 64, 32
RANDOM = torch.Generator().manual_seed(28)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
OUT = {}


def source(path, **stubs):
    """A module from the file of a package whose other modules do not import."""
    for name, members in stubs.items():
        name = name.replace("__", ".")
        for end in range(1, name.count(".") + 2):
            sys.modules.setdefault(".".join(name.split(".")[:end]), types.ModuleType(name))
        for member in members:
            setattr(sys.modules[name], member, None)
    file = next(f"{p}/{path}" for p in sys.path if __import__("os").path.exists(f"{p}/{path}"))
    spec = importlib.util.spec_from_file_location(path.split("/")[-1][:-3], file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def codes(bits, shape=(ROWS, COLS)):
    return torch.randint(0, 2**bits, shape, generator=RANDOM, dtype=torch.int64)


def scales(shape, dtype):
    return (torch.rand(shape, generator=RANDOM) * 0.01 + 0.001).to(dtype).float()


def put(case, given, made):
    for name, t in given.items():
        OUT[f"{case}/in.{name}"] = t.clone().contiguous()
    for name, t in made.items():
        OUT[f"{case}/out.{name}"] = t.clone().contiguous()


def spread(t, cols=COLS):
    return t.repeat_interleave(cols // t.shape[1], 1)


def compressed(scheme, name, given, weight, scale, zero=None, extra=None):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    kind = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, scheme).value)
    state = {"weight": weight, "weight_scale": scale, **(extra or {})}
    if zero is not None:
        state["weight_zero_point"] = zero
    made = kind.compress(state, scheme)
    put(f"compressed-tensors/{name}", given, {k: v for k, v in made.items() if v is not None})


def compressed_cases():
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    for bits in range(2, 9):
        for dtype in (torch.float16, torch.bfloat16) if bits == 4 else (torch.bfloat16,):
            s = preset_name_to_scheme(f"W{bits}A16", ["Linear"])
            s.weights.group_size = GROUP
            q, d = codes(bits), scales((ROWS, COLS // GROUP), dtype)
            w = (q - 2 ** (bits - 1)) * spread(d)
            compressed(s, f"W{bits}A16_G32/{str(dtype)[6:]}", {"codes": q.byte(), "scales": d}, w, d.to(dtype))
    for bits in (3, 4):
        s = preset_name_to_scheme("W4A16_ASYM", ["Linear"])
        s.weights.group_size, s.weights.num_bits = GROUP, bits
        q, d, z = codes(bits), scales((ROWS, COLS // GROUP), torch.bfloat16), codes(bits, (ROWS, COLS // GROUP))
        w = (q - spread(z)) * spread(d)
        compressed(s, f"W{bits}A16_ASYM_G32/bfloat16", {"codes": q.byte(), "scales": d, "zeros": z.byte()}, w,
                   d.bfloat16(), (z - 2 ** (bits - 1)).to(torch.int8))
    for name, shape in (("W8A8", (ROWS, 1)), ("FP8_DYNAMIC", (ROWS, 1)), ("FP8", (1,)), ("FP8_BLOCK", (1, 2))):
        s = preset_name_to_scheme(name, ["Linear"])
        cols = 256 if name == "FP8_BLOCK" else COLS
        d = scales(shape, torch.float32)
        if name == "W8A8":
            q = codes(8, (ROWS, cols))
            w = (q - 128) * d
        else:
            q = codes(8, (ROWS, cols))
            q[(q & 127) == 127] = 1
            v = q.byte().view(torch.float8_e4m3fn).float()
            w = v * (spread(d, cols) if name == "FP8_BLOCK" else d)
        compressed(s, f"{name}/float32", {"codes": q.byte(), "scales": d}, w, d)
    for name, group in (("NVFP4A16", 16), ("MXFP4A16", 32), ("MXFP8A16", 32)):
        s = preset_name_to_scheme(name, ["Linear"])
        if name == "MXFP8A16":
            q = codes(8)
            q[(q & 127) == 127] = 1
            v = q.byte().view(torch.float8_e4m3fn).float()
        else:
            q = codes(4)
            v = E2M1[q]
        if name == "NVFP4A16":
            d = (torch.rand((ROWS, COLS // group), generator=RANDOM) * 400 + 1).to(torch.float8_e4m3fn).float()
            divisor = torch.tensor([1536.0])
            compressed(s, f"{name}/float32", {"codes": q.byte(), "scales": d, "global": 1 / divisor},
                       v * spread(d) / divisor, d, extra={"weight_global_scale": divisor})
        else:
            d = torch.exp2(torch.randint(-12, 3, (ROWS, COLS // group), generator=RANDOM).float())
            compressed(s, f"{name}/float32", {"codes": q.byte(), "scales": d}, v * spread(d), d)


def gptq_cases():
    gptq = source("auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py", autogptq_cuda_64=[], autogptq_cuda_256=[])
    for bits in (2, 3, 4, 8):
        for zeros in (False, True) if bits in (3, 4) else (False,):
            q, d = codes(bits), scales((ROWS, COLS // GROUP), torch.float16)
            z = codes(bits, d.shape).clamp(max=2**bits - 2) if zeros else torch.full(d.shape, 2 ** (bits - 1))
            linear = torch.nn.Linear(COLS, ROWS, bias=False)
            linear.weight.data = (q - spread(z)) * spread(d)
            module = gptq.QuantLinear(bits, GROUP, COLS, ROWS, False)
            # It takes one from zero points, which version 2 does not.
            module.pack(linear, d, (z + 1 if zeros else z).float(), None) if not zeros else pack_v2(module, linear, d, z)
            given = {"codes": q.byte(), "scales": d} | ({"zeros": z.byte()} if zeros else {})
            put(f"gptq/W{bits}A16{'_ASYM' if zeros else ''}_G32/float16", given,
                {"qweight": module.qweight, "qzeros": module.qzeros, "scales": module.scales.half(),
                 "g_idx": (torch.arange(COLS) // GROUP).int()})


def pack_v2(module, linear, d, z):
    module.pack(linear, d, z.float(), None)  # the codes
    qweight = module.qweight.clone()
    shifted = torch.nn.Linear(COLS, ROWS, bias=False)
    shifted.weight.data = torch.zeros(ROWS, COLS)
    module.pack(shifted, d, (z + 1).float(), None)
    module.qweight = qweight


def awq_cases():
    awq = source("awq/modules/linear/gemm.py", awq__utils__utils=["get_best_device"],
                 awq__utils__packing_utils=["dequantize_gemm"])
    awq.get_best_device = lambda: "cpu"
    for zeros in (False, True):
        q, d = codes(4), scales((ROWS, COLS // GROUP), torch.float16)
        z = codes(4, d.shape) if zeros else torch.full(d.shape, 8)
        linear = torch.nn.Linear(COLS, ROWS, bias=False)
        linear.weight.data = (q - spread(z)) * spread(d)
        module = awq.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=d.t().contiguous(), zeros=z.t().contiguous())
        given = {"codes": q.byte(), "scales": d} | ({"zeros": z.byte()} if zeros else {})
        put(f"awq/W4A16{'_ASYM' if zeros else ''}_G32/float16", given,
            {"qweight": module.qweight, "qzeros": module.qzeros, "scales": module.scales})


def bitsandbytes_cases():
    import bitsandbytes.functional as bf
    for kind in ("nf4", "fp4"):
        for double in (False, True):
            rows = 600 if double and kind == "nf4" else 128  # more than two blocks of absmax
            w = torch.randn((rows, 64), generator=RANDOM) * 0.02
            packed, state = bf.quantize_4bit(w, blocksize=64, quant_type=kind, compress_statistics=double)
            _, plain = bf.quantize_4bit(w, blocksize=64, quant_type=kind, compress_statistics=False)
            q = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], -1).view(rows, 64)
            made = {"weight": packed} | {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
            put(f"bitsandbytes/{kind.upper()}{'' if double else '_PLAIN'}/float32",
                {"codes": q, "scales": plain.absmax.view(rows, 1)}, made)
    w = torch.randn((ROWS, COLS), generator=RANDOM).half()
    q, scb, _ = bf.int8_vectorwise_quant(w)
    put("bitsandbytes/LLM_INT8/float32", {"codes": (q.int() + 128).byte(), "scales": (scb / 127).view(ROWS, 1)},
        {"weight": q, "SCB": scb})


for cases in (compressed_cases, gptq_cases, awq_cases, bitsandbytes_cases):
    cases()
save_file(OUT, sys.argv[1], metadata={"format": "pt"})
print(json.dumps(sorted({k.rsplit("/", 1)[0] for k in OUT})))
