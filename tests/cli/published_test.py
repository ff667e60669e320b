"""Published models against FP32 arithmetic on their stored weights (tests/data/golden-real).

usage: published_test.py SmolLM2|Gemma3    exit code 77: the model is not in the cache folder
"""
import json
import math
import os
import sys
import unittest

from cli_test import SOURCE, Case, load_safetensors, run

DATA = os.path.join(SOURCE, "tests/data/golden-real")


class Published:
    """The tests shared by the models; NAME is the model's name in the cache, GOLDEN names its files
    in DATA."""

    @classmethod
    def setUpClass(cls):
        with open(os.path.join(DATA, cls.GOLDEN + ".json"), encoding="utf-8") as f:
            cls.about = json.load(f)
        cls.golden = load_safetensors(os.path.join(DATA, cls.GOLDEN + ".safetensors"))
        cls.ids = [list(cls.golden[f"ids_{i}"][1]) for i in range(len(cls.about["prompts"]))]

    def logits_error(self, *flags):
        """The largest error among the golden top 64, relative to the largest logit."""
        ids = self.write("ids.json", json.dumps(self.ids))
        out = self.path("o.safetensors")
        self.succeeds("eval", "logits", self.NAME, "--ids", ids, "-o", out, *flags)
        got = load_safetensors(out)
        worst = 0.0
        for i, sequence in enumerate(self.ids):
            (rows, width), tops = self.golden[f"top_ids_{i}"]
            self.assertEqual(rows, len(sequence))
            (_, vocabulary), logits = got[f"logits_{i}"]
            wanted = self.golden[f"top_logits_{i}"][1]
            largest = max(abs(x) for x in wanted)
            for at, (token, want) in enumerate(zip(tops, wanted)):
                error = abs(logits[at // width * vocabulary + token] - want)
                self.assertTrue(math.isfinite(error))
                worst = max(worst, error / largest)
        return worst

    def test_ids(self):
        lines = "".join(json.dumps(prompt) + "\n" for prompt in self.about["prompts"])
        text = self.succeeds("tokenize", self.NAME, "--jsonl", "--no-special", stdin=lines)
        # The golden ids include a leading BOS token.
        self.assertEqual([json.loads(line) for line in text.splitlines()],
                         [ids[1:] for ids in self.ids])

    def test_logits_of_the_reference_path(self):
        self.assertLess(self.logits_error("--reference"), 1e-3)

    def test_logits_of_the_fast_path(self):
        self.assertLess(self.logits_error(), 2e-2)

    def test_greedy(self):
        path = self.write("ids.json", json.dumps(self.ids))
        text = self.succeeds("run", self.NAME, "--ids", path, "-n", "48", "--temp", "0",
                             "--print-ids", "--ignore-eos", "--reference")
        greedy = [list(self.golden[f"greedy_{i}"][1]) for i in range(len(self.ids))]
        self.assertEqual([json.loads(line) for line in text.splitlines()], greedy)

    def test_nats_per_token(self):
        text = os.path.join(DATA, "wikitext-2-60k.txt")
        got = json.loads(self.succeeds("eval", "perplexity", self.NAME, text, "--window", "512",
                                       "--json"))
        self.assertEqual(got["tokens"], self.about["tokens"])
        error = abs(got["nats_per_token"] / self.about["nats_per_token"] - 1)
        self.assertLess(error, 1e-2)


class SmolLM2(Published, Case):
    NAME, GOLDEN = "smollm2", "smollm2-135m"

    def test_chat_prompt(self):
        conversation = json.dumps({"messages": self.about["chat"], "add_generation_prompt": True})
        text = self.succeeds("apply-template", self.NAME, stdin=conversation)
        self.assertEqual(text, self.about["chat_text"])
        ids = self.succeeds("tokenize", self.NAME, "--jsonl", "--no-special",
                            stdin=json.dumps(text) + "\n")
        self.assertEqual(json.loads(ids), self.about["chat_ids"])

    def test_answers(self):
        answer = self.succeeds("run", self.NAME, self.about["chat"][0]["content"],
                               "--temp", "0", "-n", "40")
        self.assertIn("Paris", answer)


class Gemma3(Published, Case):
    NAME, GOLDEN = "gemma3", "gemma3-270m"


if __name__ == "__main__":
    for suite in sys.argv[1:]:
        if run("tokenize", globals()[suite].NAME, "x").returncode != 0:
            print(f"{globals()[suite].NAME} is not in the cache folder: tools/get_model gets it")
            sys.exit(77)
    unittest.main()
