#!/usr/bin/env python3
"""What the disk tier of the KV cache costs and saves, on the CPU.

usage: kv_tiers.py FRESHET MODEL TEXT [--tokens 8000] [--turns 15] [--dtype f16]

Prints the median time to the first token of prompts that nobody has seen, without a tier and with one
(in turns: what the tier costs when it misses), and of a prompt that a server before this one, ended by
`kill -9`, has stored (what it saves). MODEL needs the context. Needs Python 3 alone.
"""
import argparse
import json
import re
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request


class Server:
    def __init__(self, freshet, model, *flags):
        self.log = tempfile.NamedTemporaryFile("w+")
        self.process = subprocess.Popen([freshet, "serve", model, "--port", "0", "--device", "cpu", *flags],
                                        stdout=subprocess.DEVNULL, stderr=self.log)
        while True:
            with open(self.log.name, encoding="utf-8") as f:
                text = f.read()
            if found := re.search(r"serving .* at (http://\S+:\d+)", text):
                self.url = found[1]
                return
            if self.process.poll() is not None:
                raise SystemExit(text)
            time.sleep(0.02)

    def first_token(self, ids):
        body = json.dumps({"model": "any", "prompt": ids, "max_tokens": 1, "temperature": 0}).encode()
        request = urllib.request.Request(self.url + "/v1/completions", body, {"Content-Type": "application/json"})
        begin = time.perf_counter()
        with urllib.request.urlopen(request) as answer:
            usage = json.load(answer)["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return time.perf_counter() - begin, cached

    def metric(self, name):
        with urllib.request.urlopen(self.url + "/metrics") as answer:
            return float(re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", answer.read().decode(), re.M)[1])

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("freshet")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--dtype", default="f16")
    o = parser.parse_args()
    with open(o.text, encoding="utf-8") as f:
        run = subprocess.run([o.freshet, "tokenize", o.model, "--json"], input=f.read(), capture_output=True,
                             text=True, check=True)
    ids = json.loads(run.stdout)

    def prompt(turn):
        at = turn * 997 % (len(ids) - o.tokens)
        return ids[at:at + o.tokens]

    shared = ("--kv-cache-dtype", o.dtype, "--served-model-name", "any", "--max-model-len", str(o.tokens + 8))
    with tempfile.TemporaryDirectory() as folder:
        tier = ("--kv-cache-dir", folder)
        plain, tiered = Server(o.freshet, o.model, *shared), Server(o.freshet, o.model, *shared, *tier)
        for server in (plain, tiered):
            server.first_token(prompt(0))
        without, missed = [], []
        for turn in range(1, o.turns + 1):
            for server, times in ((plain, without), (tiered, missed))[:: 1 if turn % 2 else -1]:
                seconds, cached = server.first_token(prompt(turn))
                if cached > 16:
                    raise SystemExit(f"turn {turn} was cached")
                times.append(seconds)
        plain.end()
        before = -1
        while (blocks := tiered.metric("freshet:kv_offload_disk_blocks")) != before:
            before = blocks
            time.sleep(0.5)
        tiered.end(signal.SIGKILL)
        again = Server(o.freshet, o.model, *shared, *tier)
        hits = []
        for turn in range(1, o.turns + 1):
            seconds, cached = again.first_token(prompt(turn))
            if cached < o.tokens - 32:
                raise SystemExit(f"turn {turn}: only {cached} tokens came from the disk")
            hits.append(seconds)
        again.end()
    base, miss, hit = map(statistics.median, (without, missed, hits))
    print(f"{o.tokens} tokens, {o.dtype}, medians of {o.turns}, ms to the first token")
    print(f"  without a tier   {1e3 * base:10.1f}")
    print(f"  with one, missed {1e3 * miss:10.1f}   {100 * (miss / base - 1):+.2f} %")
    print(f"  from the disk    {1e3 * hit:10.1f}   {100 * hit / base:.2f} % of computing")


if __name__ == "__main__":
    main()
