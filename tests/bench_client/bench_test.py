"""Tests of `freshet bench serve` against `freshet serve`, and of `freshet bench throughput`.

usage: bench_test.py [Class[.test] ...]    needs FRESHET (the program) and FRESHET_SOURCE_DIR
"""
import json
import os
import re
import statistics
import subprocess
import tempfile
import unittest
import xml.dom.minidom
from pathlib import Path

FRESHET = os.environ.get("FRESHET", "build/release/bin/freshet")
SOURCE = Path(os.environ.get("FRESHET_SOURCE_DIR", "."))
MODEL = str(SOURCE / "models/default.gguf")
DATA = SOURCE / "tests/data/bench_client"
# The fields that vLLM's own benchmark writes and dashboards read.
VLLM_KEYS = """date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness
    max_concurrency duration completed failed total_input_tokens total_output_tokens request_throughput
    request_goodput output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests
    mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms
    mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms""".split()
VLLM_DETAILS = "input_lens output_lens ttfts itls latencies start_times generated_texts errors".split()


def run(*arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"}
    return subprocess.run([FRESHET, *map(str, arguments)], capture_output=True, text=True, timeout=300,
                          env={**environment, **variables}, check=False)


class Serve(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
            file.write("{% for m in messages %}{{ m.content }}{% endfor %}")
        cls.addClassCleanup(os.unlink, file.name)
        cls.server = subprocess.Popen([FRESHET, "serve", MODEL, "--port", "0", "--disable-access-log",
                                       "--api-key", "secret", "--chat-template", file.name],
                                      stderr=subprocess.PIPE, text=True)
        cls.addClassCleanup(cls.stop)
        for line in cls.server.stderr:
            if address := re.search(r"serving .* at (http://\S+)", line):
                cls.url = address[1]
                return
        raise AssertionError("the server did not start")

    @classmethod
    def stop(cls):
        cls.server.terminate()
        cls.server.wait(60)
        said = cls.server.stderr.read()
        cls.server.stderr.close()
        if cls.server.returncode == 99:  # sanitizer exit code, set in CMakePresets.json
            raise AssertionError(said)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def bench(self, *arguments, key="secret"):
        address = () if "--base-url" in arguments else ("--base-url", self.url)
        return run("bench", "serve", *address, *arguments, OPENAI_API_KEY=key)

    def result(self, *arguments):
        done = self.bench(*arguments, "--save-result", "--save-detailed", "--result-dir", self.folder,
                          "--result-filename", "r.json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads((self.folder / "r.json").read_text()), done.stdout

    def test_numbers_agree_with_each_other(self):
        r, table = self.result("--num-prompts", 12, "--input-len", 40, "--output-len", 9, "--request-rate", 20,
                               "--goodput", "ttft:100000", "e2el:100000", "--metadata", "machine=test",
                               "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99")
        self.assertEqual([k for k in VLLM_KEYS + VLLM_DETAILS if k not in r], [])
        self.assertEqual((r["completed"], r["failed"], r["num_prompts"]), (12, 0, 12))
        self.assertEqual(r["machine"], "test")
        self.assertEqual(r["request_rate"], 20)
        self.assertEqual(r["input_lens"], [40] * 12)
        self.assertEqual(r["output_lens"], [9] * 12)
        self.assertEqual([len(gaps) for gaps in r["itls"]], [8] * 12)
        for ttft, gaps, latency in zip(r["ttfts"], r["itls"], r["latencies"]):
            self.assertAlmostEqual(ttft + sum(gaps), latency, 6)
        self.assertAlmostEqual(r["mean_ttft_ms"], 1e3 * statistics.mean(r["ttfts"]), 6)
        self.assertAlmostEqual(r["p50_e2el_ms"], 1e3 * statistics.median(r["latencies"]), 6)
        self.assertAlmostEqual(r["request_goodput"], r["request_throughput"], 9)
        self.assertAlmostEqual(r["total_token_throughput"] * r["duration"], 12 * 49, 6)
        self.assertRegex(table, rf"Output token throughput \(tok/s\): +{r['output_throughput']:.2f}")

    def test_seeds_repeat_the_prompts(self):
        common = ("--num-prompts", 3, "--input-len", 20, "--output-len", 6, "--temperature", 0)
        texts = [self.result(*common, "--seed", seed)[0]["generated_texts"] for seed in (5, 5, 6)]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])

    def test_chat_and_every_dataset(self):
        for arguments, count in ((("--backend", "openai-chat", "--num-prompts", 3, "--input-len", 24), 3),
                                 (("--dataset-name", "sonnet", "--dataset-path", DATA / "sonnet.txt",
                                   "--num-prompts", 2), 2),
                                 (("--dataset-name", "sharegpt", "--dataset-path", DATA / "sharegpt.json",
                                   "--num-prompts", 4), 4),
                                 (("--dataset-name", "azure", "--dataset-path", DATA / "azure.csv",
                                   "--trace-speed", 20), 6),
                                 (("--dataset-name", "mooncake", "--dataset-path", DATA / "mooncake.jsonl",
                                   "--trace-speed", 20), 3)):
            with self.subTest(arguments=arguments):
                r, _ = self.result(*arguments, "--output-len", 5)
                self.assertEqual((r["completed"], r["failed"]), (count, 0))

    def test_picture_is_well_formed(self):
        picture = self.folder / "p.svg"
        done = self.bench("--num-prompts", 5, "--input-len", 10, "--output-len", 5, "--plot", picture)
        self.assertEqual(done.returncode, 0, done.stderr)
        document = xml.dom.minidom.parse(str(picture))
        self.assertEqual(len(document.getElementsByTagName("path")), 6)
        self.assertEqual(document.getElementsByTagName("script"), [])

    def test_says_what_is_wrong(self):
        for arguments, code, words in (
                (("--num-prompts", 0), 2, "--num-prompts"), (("--request-rate", "0"), 2, "--request-rate"),
                (("--goodput", "itl:3"), 2, "--goodput"), (("--dataset-name", "azure"), 2, "--dataset-path"),
                (("--dataset-name", "azure", "--dataset-path", DATA / "sonnet.txt"), 2, "line 1"),
                (("--extra-body", "[1]"), 2, "--extra-body"), (("--metadata", "x"), 2, "KEY=VALUE"),
                (("--base-url", "ftp://x"), 2, "http"), (("--base-url", "http://127.0.0.1:1"), 1, "connect"),
                (("--model", "nobody", "--num-prompts", 2, "--input-len", 5), 1, "nobody")):
            with self.subTest(arguments=arguments):
                done = self.bench(*arguments)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(words, done.stderr.splitlines()[-1])
        done = self.bench("--num-prompts", 2, key="wrong")
        self.assertEqual(done.returncode, 2)
        self.assertIn("OPENAI_API_KEY", done.stderr)


class Throughput(unittest.TestCase):
    def test_text_and_json(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "t.json"
            done = run("bench", "throughput", "-m", MODEL, "--num-prompts", 6, "--input-len", 30, "--output-len", 7,
                       "--n", 2, "--output-json", path)
            self.assertEqual(done.returncode, 0, done.stderr)
            numbers = json.loads(path.read_text())
        self.assertEqual(numbers["num_requests"], 6)
        self.assertEqual(numbers["total_num_tokens"], 6 * 30 + 6 * 2 * 7)
        for key, count in (("requests_per_second", 6), ("tokens_per_second", 264), ("output_tokens_per_second", 84)):
            self.assertAlmostEqual(numbers[key] * numbers["elapsed_time"], count, 6)
        rate, tokens = numbers["requests_per_second"], numbers["tokens_per_second"]
        self.assertRegex(done.stdout, rf"Throughput: {rate:.2f} requests/s, {tokens:.2f} total tokens/s")
        self.assertRegex(done.stdout, r"Total num output tokens: +84\n")

    def test_speculation(self):
        config = json.dumps({"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "t.json"
            done = run("bench", "throughput", "-m", MODEL, "--num-prompts", 4, "--input-len", 20, "--output-len", 17,
                       "--temperature", 0, "--speculative-config", config, "--output-json", path)
            self.assertEqual(done.returncode, 0, done.stderr)
            numbers = json.loads(path.read_text())
        # The first token comes with the prompt, then four steps of four.
        self.assertEqual(numbers["spec_decode_num_drafts"], 4 * 4)
        self.assertEqual(numbers["spec_decode_acceptance_length"], 4.0)
        self.assertEqual(numbers["spec_decode_per_position_acceptance_rates"], [1.0, 1.0, 1.0])
        self.assertIn("Speculation: 4.00 tokens per step with drafts, 100.0 % accepted\n", done.stdout)

    def test_needs_a_model(self):
        done = run("bench", "throughput", "-m", "/nowhere/model.gguf", "--num-prompts", 1)
        self.assertEqual(done.returncode, 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
