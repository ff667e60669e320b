"""Reading keys and values selectively, by request and by server: it acts, and wrong ones are refused.

usage: sparse_attention_test.py [Class[.test] ...]    needs FRESHET and FRESHET_SOURCE_DIR
"""
import json
import subprocess
import unittest

from serving import FRESHET, PATIENCE, Server

TEXT = " ".join(f"Verse {i}: a fox crossed the river and counted {i * i} stones." for i in range(30))
QUESTION = {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "return_token_ids": True,
            "logprobs": 1}
QUEST = {"policy": "quest", "budget": 64, "dense_layers": 0}
NONE = {"policy": "none"}


def answer(server, **changes):
    status, got = server.post("/v1/completions", {**QUESTION, **changes}, timeout=600)
    if status != 200:
        raise AssertionError(got)
    choice = got["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


class SparseAttention(unittest.TestCase):
    def serve(self, *flags):
        server = Server("--device", "cpu", *flags)
        self.addCleanup(server.stop)
        return server

    def test_of_server_and_request(self):
        plain = self.serve()
        full = answer(plain)
        self.assertEqual(answer(plain, sparse_attention=NONE), full)
        server = self.serve("--sparse-attention", json.dumps(QUEST))
        read = answer(server)
        self.assertNotEqual(read, full)
        self.assertEqual(read[1][0], full[1][0], "the prompt reads everything")
        self.assertEqual(answer(server), read)
        self.assertEqual(answer(server, sparse_attention=NONE), full)
        self.assertEqual(answer(server, sparse_attention={**QUEST, "budget": 8192}), full)
        other = answer(server, sparse_attention={**QUEST, "budget": 128})
        self.assertNotEqual(other, full)
        self.assertNotEqual(other, read)

    def refuse(self, server, says, **fields):
        status, got = server.post("/v1/completions", {**QUESTION, **fields})
        self.assertEqual(status, 400, got)
        self.assertIn(says, got["error"]["message"])
        self.assertNotIn("\n", got["error"]["message"])

    def test_wrong_ones(self):
        self.refuse(self.serve(), "--sparse-attention", sparse_attention=QUEST)
        server = self.serve("--sparse-attention", json.dumps(QUEST))
        for wrong, says in (({"policy": "sparse"}, "sparse"), ({"budget": 64}, "policy"),
                            ({"policy": "quest", "budget": 16}, "budget"),
                            ({**QUEST, "pages": 3}, "pages"), ([], "sparse_attention"),
                            ("quest", "sparse_attention")):
            with self.subTest(wrong=wrong):
                self.refuse(server, says, sparse_attention=wrong)
        self.refuse(server, "beam search", use_beam_search=True, n=2)
        self.refuse(server, "kv_eviction", kv_eviction={"policy": "snapkv", "budget": 64})

    def test_wrong_flags(self):
        for flags, says in ((['{"policy": "spars"}'], "spars"), (["{"], "sparse_attention"),
                            ([json.dumps(QUEST), "--kv-eviction",
                              '{"policy": "snapkv", "budget": 64}'], "--kv-eviction")):
            with self.subTest(flags=flags):
                run = subprocess.run([FRESHET, "run", "a", "-n", "1", "--sparse-attention", *flags],
                                     capture_output=True, text=True, timeout=PATIENCE)
                self.assertNotEqual(run.returncode, 0)
                self.assertIn(says, run.stderr)
                self.assertEqual(len(run.stderr.strip().splitlines()), 1, run.stderr)


if __name__ == "__main__":
    unittest.main()
