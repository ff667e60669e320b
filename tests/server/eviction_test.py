"""Evictions of keys by request and by server: they act, they are counted, wrong ones are refused.

usage: eviction_test.py [Class[.test] ...]    needs FRESHET and FRESHET_SOURCE_DIR
"""
import json
import subprocess
import unittest

from serving import FRESHET, PATIENCE, Server

TEXT = " ".join(f"Verse {i}: a fox crossed the river and counted {i * i} stones." for i in range(30))
QUESTION = {"prompt": TEXT, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
COUNTER = "freshet:kv_evictions_total"
SNAP = {"policy": "snapkv", "budget": 128}


def tokens(server, **changes):
    status, answer = server.post("/v1/completions", {**QUESTION, **changes}, timeout=600)
    if status != 200:
        raise AssertionError(answer)
    return answer["choices"][0]["token_ids"]


class Eviction(unittest.TestCase):
    def serve(self, *flags):
        server = Server(*flags)
        self.addCleanup(server.stop)
        return server

    def test_of_a_request(self):
        server = self.serve()
        full = tokens(server)
        self.assertEqual(server.metric(COUNTER), 0)
        evicted = tokens(server, kv_eviction=SNAP)
        self.assertGreaterEqual(server.metric(COUNTER), 1)
        self.assertEqual(tokens(server, kv_eviction=SNAP), evicted)
        self.assertEqual(tokens(server, kv_eviction={"policy": "none"}), full)
        # A budget that holds everything changes nothing.
        self.assertEqual(tokens(server, kv_eviction={"policy": "snapkv", "budget": 4096}), full)

    def test_four_bits_for_the_others(self):
        server = self.serve("--kv-cache-dtype", "f32")
        full = tokens(server)
        mikv = {"policy": "mikv", "budget": 64, "interval": 8}
        evicted = tokens(server, kv_eviction=mikv)
        self.assertGreaterEqual(server.metric(COUNTER), 2)
        self.assertEqual(tokens(server, kv_eviction=mikv), evicted)
        self.assertEqual(tokens(server, kv_eviction={"policy": "mikv", "budget": 4096}), full)

    def test_no_room_for_four_bits(self):
        server = self.serve("--kv-cache-dtype", "int8")
        status, answer = server.post(
            "/v1/completions", {**QUESTION, "kv_eviction": {"policy": "mikv", "budget": 64}})
        self.assertEqual(status, 400, answer)
        self.assertIn("mikv saves nothing beside a cache of int8", answer["error"]["message"])

    def test_four_bits_beside_selections(self):
        server = self.serve("--sparse-attention", json.dumps({"policy": "quest", "budget": 64}))
        status, answer = server.post("/v1/completions", {
            **QUESTION, "sparse_attention": {"policy": "none"}, "kv_eviction": {"policy": "mikv", "budget": 64}})
        self.assertEqual(status, 400, answer)
        self.assertIn("mikv does not go with a server of --sparse-attention", answer["error"]["message"])

    def test_of_the_server(self):
        plain = self.serve()
        want = tokens(plain, kv_eviction=SNAP)
        full = tokens(plain)
        server = self.serve("--kv-eviction", json.dumps(SNAP))
        self.assertEqual(tokens(server), want)
        self.assertEqual(tokens(server, kv_eviction={"policy": "none"}), full)

    def test_wrong_ones(self):
        server = self.serve()
        for wrong, says in (({"policy": "snap"}, "snapkv"), ({"budget": 64}, "policy"),
                            ({"policy": "snapkv", "budget": 1}, "budget"),
                            ({"policy": "snapkv", "budget": 64, "size": 3}, "size"),
                            ([], "kv_eviction"), ("snapkv", "kv_eviction")):
            with self.subTest(wrong=wrong):
                status, answer = server.post("/v1/completions", {**QUESTION, "kv_eviction": wrong})
                self.assertEqual(status, 400, answer)
                self.assertIn(says, answer["error"]["message"])
                self.assertNotIn("\n", answer["error"]["message"])
        self.assertEqual(server.metric(COUNTER), 0)

    def test_wrong_flag(self):
        for wrong, says in (('{"policy": "snap"}', "snapkv"), ('{', "kv_eviction")):
            with self.subTest(wrong=wrong):
                run = subprocess.run([FRESHET, "run", "a", "-n", "1", "--kv-eviction", wrong],
                                     capture_output=True, text=True, timeout=PATIENCE)
                self.assertNotEqual(run.returncode, 0)
                self.assertIn(says, run.stderr)
                self.assertEqual(len(run.stderr.strip().splitlines()), 1, run.stderr)


if __name__ == "__main__":
    unittest.main()
