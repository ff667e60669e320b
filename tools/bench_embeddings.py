#!/usr/bin/env python3
"""Tokens per second of an embedding model on mixed lengths, in turns with OpenVINO and onnxruntime.

usage: bench_embeddings.py MODEL [--freshet build/release/bin/freshet] [--threads 2] [--turns 3]
                           [--texts 1024] [--openvino] [--precision bf16] [--onnx model.onnx]

MODEL is a folder of BERT's kind. Texts are random token ids of 8 to 256 tokens, in batches of 32: in the order
of their arrival, and sorted by length. Beside the rate stands that of processor time, which other jobs on the
machine change less; with more than one thread it counts their waiting. Freshet is asked over HTTP, with four batches under
way. The peers pad each batch to its longest text. --openvino converts the model from PyTorch (needs torch,
transformers and openvino); --onnx runs a file that has the inputs input_ids, attention_mask and token_type_ids.
Each engine runs alone while it is timed; every turn runs all of them. The answers are compared by their cosine.
"""
import argparse
import base64
import concurrent.futures
import http.client
import json
import os
import random
import re
import subprocess
import tempfile
import time

import numpy as np

BATCH, UNDER_WAY = 32, 4


def batches(texts, by_length):
    order = sorted(range(len(texts)), key=lambda i: len(texts[i])) if by_length else range(len(texts))
    order = list(order)
    return [order[i:i + BATCH] for i in range(0, len(order), BATCH)]


class Freshet:
    name = "freshet"

    def __init__(self, program, model, threads):
        self.log = tempfile.NamedTemporaryFile("r")
        self.process = subprocess.Popen(
            [program, "serve", model, "--port", "0", "--threads", str(threads), "--disable-access-log",
             "--log-stats-interval", "0"], stderr=open(self.log.name, "w"), stdout=subprocess.DEVNULL)
        found = None
        while not found:
            time.sleep(0.1)
            assert self.process.poll() is None, open(self.log.name).read()
            found = re.search(r"serving .* at http://\S+:(\d+)", open(self.log.name).read())
        self.port = int(found.group(1))

    def one(self, texts):
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", "/v1/embeddings",
                           json.dumps({"input": texts, "encoding_format": "base64"}))
        answer = json.loads(connection.getresponse().read())
        return [np.frombuffer(base64.b64decode(d["embedding"]), np.float32) for d in answer["data"]]

    def run(self, groups):
        with concurrent.futures.ThreadPoolExecutor(UNDER_WAY) as pool:
            return list(pool.map(self.one, groups))

    def processor_time(self):
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as f:
            user, system = f.read().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def close(self):
        self.process.terminate()
        self.process.wait()


def padded(texts):
    width = max(map(len, texts))
    ids = np.zeros((len(texts), width), np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, :len(text)] = text
        mask[row, :len(text)] = 1
    return ids, mask


def pooled(hidden, mask):
    v = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
    return v / np.linalg.norm(v, axis=1, keepdims=True)


class Peer:
    def processor_time(self):
        return time.process_time()

    def run(self, groups):
        out = []
        for texts in groups:
            ids, mask = padded(texts)
            out.append(list(pooled(self.hidden(ids, mask), mask)))
        return out

    def close(self):
        pass


class OpenVino(Peer):
    name = "openvino"

    def __init__(self, model, threads, precision):
        import openvino
        import torch
        import transformers
        plain = transformers.AutoModel.from_pretrained(model, attn_implementation="eager").eval()
        example = {n: torch.ones((2, 9), dtype=torch.int64) for n in ("input_ids", "attention_mask")}
        converted = openvino.convert_model(plain, example_input=example)
        self.compiled = openvino.Core().compile_model(
            converted, "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY",
                               "INFERENCE_PRECISION_HINT": precision})

    def hidden(self, ids, mask):
        return self.compiled({"input_ids": ids, "attention_mask": mask})[0]


class Onnx(Peer):
    name = "onnxruntime"

    def __init__(self, file, threads):
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.inputs = {i.name for i in self.session.get_inputs()}

    def hidden(self, ids, mask):
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        return self.session.run(None, {k: v for k, v in given.items() if k in self.inputs})[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--freshet", default="build/release/bin/freshet")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--openvino", action="store_true")
    parser.add_argument("--precision", choices=("bf16", "f32"), default="bf16", help="of OpenVINO")
    parser.add_argument("--onnx")
    o = parser.parse_args()
    draw = random.Random(1)
    with open(os.path.join(o.model, "config.json"), encoding="utf-8") as f:
        vocabulary = json.load(f)["vocab_size"]
    texts = [[draw.randrange(1000, vocabulary) for _ in range(draw.randint(8, 256))] for _ in range(o.texts)]
    tokens = sum(map(len, texts))
    engines = [Freshet(o.freshet, o.model, o.threads)]
    engines += [OpenVino(o.model, o.threads, o.precision)] if o.openvino else []
    engines += [Onnx(o.onnx, o.threads)] if o.onnx else []
    try:
        for by_length in (False, True):
            groups = [[texts[i] for i in group] for group in batches(texts, by_length)]
            rates, processor_rates, answers = {}, {}, {}
            for _ in range(o.turns):
                for engine in engines:
                    engine.run(groups[:2])
                    begin, spent = time.perf_counter(), engine.processor_time()
                    answers[engine.name] = engine.run(groups)
                    rates.setdefault(engine.name, []).append(tokens / (time.perf_counter() - begin))
                    processor_rates.setdefault(engine.name, []).append(tokens / (engine.processor_time() - spent))
            print("sorted by length" if by_length else "in the order of arrival")
            for name, all_rates in rates.items():
                worst = min(float(np.dot(a, b)) for mine, own in zip(answers[name], answers["freshet"])
                            for a, b in zip(mine, own))
                middle = len(all_rates) // 2
                print(f"  {name:12} {sorted(all_rates)[middle]:9.0f} tokens/s, "
                      f"{sorted(processor_rates[name])[middle]:9.0f} a second of processor time, "
                      f"least cosine {worst:.6f}", flush=True)
    finally:
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
