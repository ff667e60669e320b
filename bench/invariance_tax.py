#!/usr/bin/env python3
"""What exactness costs: products whose sums have one order, whatever the batch, beside PyTorch's (cuBLAS chooses a
kernel and a split for each number of tokens), same shapes, same GPU, same run.

usage: invariance_tax.py BENCH CONFIG.json [TOKENS...]     BENCH: the built freshet_gpu_bench

A line a matrix: microseconds of both, and by how much ours takes longer (negative: it is faster). Ours writes F32,
PyTorch BF16. Weights take turns, 600 MB of them, so that none is in a cache; PyTorch's calls are one CUDA graph.
"""
import re
import subprocess
import sys

import torch

LINE = re.compile(r"^w(\d+)\s+(\d+) x (\d+)\s+([\d.]+) us")


def ours(bench, config, tokens):
    tests = [f"w{t}" for t in tokens]
    text = subprocess.run([bench, config, "bf16", *tests], check=True, capture_output=True, text=True).stdout
    found = [LINE.match(line) for line in text.splitlines()]
    return [(int(m[1]), int(m[2]), int(m[3]), float(m[4])) for m in found if m]


def torchs(tokens, rows, cols, repetitions=6):
    count = max(2, (600 << 20) // (rows * cols * 2))
    weights = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(tokens, rows, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, weights[0].T, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for w in weights:
            torch.mm(x, w.T, out=out)
    times = []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return sorted(times)[len(times) // 2]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    tokens = [int(t) for t in sys.argv[3:]] or [1, 32, 128, 4096]
    totals = {}
    print("tokens   matrix            freshet us   torch us   longer by")
    for t, rows, cols, us in ours(sys.argv[1], sys.argv[2], tokens):
        other = torchs(t, rows, cols)
        mine, its = totals.get(t, (0.0, 0.0))
        totals[t] = (mine + us, its + other)
        print(f"{t:6}   {rows:6} x {cols:<6} {us:12.2f} {other:10.2f} {100 * (us / other - 1):9.1f} %")
    for t, (mine, its) in totals.items():
        print(f"{t:6}   all together    {mine:12.2f} {its:10.2f} {100 * (mine / its - 1):9.1f} %")


main()
