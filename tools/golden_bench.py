#!/usr/bin/env python3
"""Writes tests/data/bench_client/expected.json: what the benchmark client's statistics, arrivals, dates
and reports must give, computed with NumPy, SciPy and Python's own dates.

usage: golden_bench.py     needs numpy and scipy
"""
import datetime
import json
from pathlib import Path

import numpy as np
from scipy import stats

FOLDER = Path(__file__).resolve().parent.parent / "tests/data/bench_client"
PERCENTS = [0, 1, 10, 25, 50, 75, 90, 95, 99, 99.9, 100]


def statistics():
    rng = np.random.default_rng(7)
    samples = {
        "one": [3.25],
        "two": [1.0, 2.0],
        "equal": [0.1] * 10,
        "ascending": np.arange(100).tolist(),
        "lognormal": rng.lognormal(-4, 1, 1001).tolist(),
        "large_offset": (1e9 + rng.random(500)).tolist(),
    }
    for name, values in samples.items():
        yield {"name": name, "values": values, "mean": float(np.mean(values)), "median": float(np.median(values)),
               "std": float(np.std(values)), "percents": PERCENTS,
               "percentiles": [float(np.percentile(values, p)) for p in PERCENTS]}


def gammas():
    for shape in (0.2, 0.5, 1.0, 3.0, 50.0):
        deciles = stats.gamma.ppf(np.arange(1, 10) / 10, shape, scale=1 / shape)
        yield {"shape": shape, "deciles": deciles.tolist()}


def azure():
    rows = (FOLDER / "azure.csv").read_text().splitlines()[1:]
    times, inputs, outputs = [], [], []
    for row in rows:
        time, read, written = row.split(",")
        times.append(datetime.datetime.fromisoformat(time[:26]))
        inputs.append(int(read))
        outputs.append(int(written))
    return {"times": [(t - times[0]).total_seconds() for t in times], "inputs": inputs, "outputs": outputs}


def run():
    """A made-up run and its figures, by the definitions of vLLM's benchmark."""
    rng = np.random.default_rng(11)
    requests = []
    for i in range(40):
        tokens = int(rng.integers(1, 30))
        itl = rng.gamma(4, 0.005, tokens - 1).tolist()
        ttft = float(rng.gamma(2, 0.05))
        requests.append({"success": i % 10 != 3, "arrival": i * 0.1, "start": i * 0.1 + 0.01 * (i % 3), "ttft": ttft,
                         "itl": itl, "latency": ttft + sum(itl), "input_tokens": int(rng.integers(5, 500)),
                         "output_tokens": tokens})
    good = [r for r in requests if r["success"]]
    tpot = lambda r: (r["latency"] - r["ttft"]) / (r["output_tokens"] - 1) if r["output_tokens"] > 1 else 0.0
    duration = 5.5
    metrics = {
        "ttft": [r["ttft"] for r in good],
        "tpot": [tpot(r) for r in good if r["output_tokens"] > 1],
        "itl": [gap for r in good for gap in r["itl"]],
        "e2el": [r["latency"] for r in good],
        "client_queue_time": [r["start"] - r["arrival"] for r in good],
    }
    first = min(r["start"] for r in good)
    seconds = np.zeros(20)
    for r in good:
        for t in r["start"] + r["ttft"] + np.concatenate([[0.0], np.cumsum(r["itl"])]):
            seconds[int(t - first)] += 1
    # Requests in flight just after each start.
    peak = max(sum(o["start"] <= r["start"] < o["start"] + o["latency"] for o in good) for r in good)
    tokens_in = sum(r["input_tokens"] for r in good)
    tokens_out = sum(r["output_tokens"] for r in good)
    kept = sum(r["ttft"] <= 0.1 and tpot(r) <= 0.022 for r in good)
    keys = {
        "completed": len(good), "failed": len(requests) - len(good), "duration": duration,
        "total_input_tokens": tokens_in, "total_output_tokens": tokens_out,
        "request_throughput": len(good) / duration, "request_goodput": kept / duration,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_output_tokens_per_s": float(seconds.max()), "max_concurrent_requests": peak,
    }
    for name, values in metrics.items():
        ms = 1e3 * np.array(values)
        keys |= {f"mean_{name}_ms": ms.mean(), f"median_{name}_ms": float(np.median(ms)), f"std_{name}_ms": ms.std(),
                 f"p50_{name}_ms": float(np.percentile(ms, 50)), f"p99.9_{name}_ms": float(np.percentile(ms, 99.9))}
    return {"requests": requests, "goodput": ["ttft:100", "tpot:22"], "keys": keys}


def main():
    expected = {"statistics": list(statistics()), "gammas": list(gammas()), "azure": azure(), "run": run()}
    (FOLDER / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
