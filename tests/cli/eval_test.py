"""Tests of freshet eval compare, tasks and quant against plain computations on exported logits.

usage: eval_test.py [Class[.test] ...]    needs FRESHET and FRESHET_SOURCE_DIR
"""
import json
import math
import os
import random
import re
import unittest
import xml.etree.ElementTree as ElementTree

import cli_test
from cli_test import LLAMA, load_safetensors, run

TEXT = "The sea was calm, and the ship lay still. Nobody on board had slept; hi hi, said the mate. " * 4
BOS = 257


def percentile(values, share):
    """numpy.percentile's default."""
    values = sorted(values)
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def log_softmax(row):
    top = max(row)
    log_sum = math.log(math.fsum(math.exp(x - top) for x in row))
    return [x - top - log_sum for x in row]


class EvalCase(cli_test.Case):
    golden_with = cli_test.Convert.golden_with

    def models(self):
        """A folder and its Q4_0 file."""
        folder, file = self.golden_with("base"), self.path("q4.gguf")
        self.succeeds("convert", folder, "-o", file, "--type", "q4_0")
        return folder, file

    def ids_of(self, model, text):
        return json.loads(self.succeeds("tokenize", model, "--jsonl", stdin=json.dumps(text)))

    def logits(self, model, lists, flags=()):
        """Rows of log-probabilities of each list."""
        ids, out = self.write("ids.json", json.dumps(lists)), self.path("logits.safetensors")
        self.succeeds("eval", "logits", model, "--ids", ids, "-o", out, "--reference", *flags)
        tensors = load_safetensors(out)
        rows = []
        for i in range(len(lists)):
            (count, vocab), numbers = tensors[f"logits_{i}"]
            rows.append([log_softmax(numbers[r * vocab:(r + 1) * vocab]) for r in range(count)])
        return rows


class Figures(EvalCase):
    def reference(self, base, model, windows, base_flags=(), flags=()):
        """The figures of `eval compare`, from logits at every position."""
        inputs = [[BOS] + w[:-1] for w in windows]
        kls, tops, deltas_p, sums = [], 0, [], []
        for w, p_rows, q_rows in zip(windows, self.logits(base, inputs, base_flags),
                                     self.logits(model, inputs, flags)):
            nats = [0.0, 0.0]
            for token, p, q in zip(w, p_rows, q_rows):
                kls.append(math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q)))
                tops += p.index(max(p)) == q.index(max(q))
                deltas_p.append(math.exp(q[token]) - math.exp(p[token]))
                nats = [nats[0] - p[token], nats[1] - q[token]]
            sums.append((nats[0], nats[1], len(w)))
        count = len(kls)
        base_nats, nats = (sum(s[i] for s in sums) / count for i in (0, 1))
        delta = nats - base_nats
        n = len(sums)
        error = math.sqrt(n / (n - 1) * sum((q - p - delta * m) ** 2 for p, q, m in sums)) / count
        draws, rng = [], random.Random(1)
        for _ in range(4000):
            chosen = [sums[rng.randrange(n)] for _ in sums]
            draws.append(sum(q - p for p, q, _ in chosen) / sum(m for _, _, m in chosen))
        return {"base_nats_per_token": base_nats, "nats_per_token": nats, "delta_nats_per_token": delta,
                "standard_error": error, "perplexity_ratio": math.exp(delta),
                "perplexity": math.exp(nats), "base_perplexity": math.exp(base_nats),
                "kl_divergence": sum(kls) / count, "kl_divergence_median": percentile(kls, 0.5),
                "kl_divergence_p99": percentile(kls, 0.99), "kl_divergence_p999": percentile(kls, 0.999),
                "top1_agreement": tops / count, "tokens": count, "windows": n,
                "rms_delta_p": math.sqrt(sum(d * d for d in deltas_p) / count),
                }, (percentile(draws, 0.025), percentile(draws, 0.975))


class Compare(Figures):
    def test_figures_are_those_of_exported_logits(self):
        base, model = self.models()
        texts = [TEXT, "A second document, which is shorter."]
        files = [self.write(f"t{i}.txt", t) for i, t in enumerate(texts)]
        windows = []
        for text in texts:
            ids = self.ids_of(base, text)
            windows += [ids[i:i + 50] for i in range(0, len(ids), 50)]
        self.assertGreater(len({len(w) for w in windows}), 2)  # each text ends with a shorter one
        want, interval = self.reference(base, model, windows)
        out = self.succeeds("eval", "compare", base, model, *files, "--window", "50", "--json", "--reference")
        got = json.loads(out)
        for key, value in want.items():
            self.assertAlmostEqual(got[key], value, delta=1e-6 * abs(value) + 1e-12, msg=key)
        self.assertGreater(got["kl_divergence"], 1e-5)
        width = interval[1] - interval[0]
        for a, b in zip(got["delta_interval"], interval):
            self.assertAlmostEqual(a, b, delta=0.1 * width)
        self.assertEqual(got["bits_per_weight"], 4.5)
        self.assertEqual(got["base_bits_per_weight"], 16.0)
        self.assertLess(got["bits_per_weight_total"], 16.0)
        for flags in (["--batch", "1"], ["--batch", "3", "-t", "1"]):
            self.assertEqual(self.succeeds("eval", "compare", base, model, *files, "--window", "50",
                                           "--json", "--reference", *flags), out)

    def test_a_model_loses_nothing_against_itself(self):
        base = self.golden_with("base")
        text = self.write("t.txt", TEXT)
        got = json.loads(self.succeeds("eval", "compare", base, base, text, "--window", "64", "--json"))
        for key in ("delta_nats_per_token", "standard_error", "kl_divergence", "kl_divergence_p999", "rms_delta_p"):
            self.assertEqual(got[key], 0.0, key)
        self.assertEqual((got["perplexity_ratio"], got["top1_agreement"]), (1.0, 1.0))
        self.assertEqual(got["delta_interval"], [0.0, 0.0])

    def test_as_eval_perplexity(self):
        """The same nats where the text is whole windows; --max-chars counts characters of all texts."""
        base, model = self.models()
        line = "Calm seas, and no land near. "  # a token for each character
        text = self.write("t.txt", line * 20)
        flags = ["--window", "40", "--max-chars", "240", "--json"]
        got = json.loads(self.succeeds("eval", "compare", base, model, text, *flags))
        self.assertEqual((got["tokens"], got["windows"]), (240, 6))
        for name, key in ((base, "base_nats_per_token"), (model, "nats_per_token")):
            alone = json.loads(self.succeeds("eval", "perplexity", name, text, *flags))
            self.assertEqual(alone["tokens"], 240)
            self.assertAlmostEqual(alone["nats_per_token"], got[key], delta=1e-6)
        two = json.loads(self.succeeds("eval", "compare", base, model, text, text, "--window", "40",
                                       "--max-chars", str(20 * len(line) + 240), "--json"))
        self.assertEqual(two["tokens"], 20 * len(line) + 240)

    def test_one_window_has_no_error(self):
        base, model = self.models()
        text = self.write("t.txt", "Short.")
        got = json.loads(self.succeeds("eval", "compare", base, model, text, "--json"))
        self.assertIsNone(got["standard_error"])
        self.assertIsNone(got["delta_interval"])
        self.assertEqual(got["windows"], 1)

    def test_text_output(self):
        base, model = self.models()
        text = self.write("t.txt", TEXT)
        out = self.succeeds("eval", "compare", base, model, text, "--window", "64")
        for part in ("delta ", "KL divergence 0.", "same top token", "4.500 bits per weight", "windows of up to 64"):
            self.assertIn(part, out)

    def test_refusals(self):
        base, text = self.golden_with("base"), self.write("t.txt", TEXT)
        flags = [text, "--window", "64"]
        self.fails(2, "eval", "compare", base, "default", *flags, says="vocabularies differ: 288 and 16384")
        other = self.golden_with("bos", files={"tokenizer_config.json": {"bos_token": "</s>"}})
        self.fails(2, "eval", "compare", base, other, *flags, says="BOS tokens differ: 257 and 258")
        with open(os.path.join(base, "tokenizer.json"), encoding="utf8") as f:
            tokenizer = json.load(f)
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        other = self.golden_with("letters", files={"tokenizer.json": tokenizer})
        self.fails(2, "eval", "compare", base, other, *flags, says='differs: ["')
        tokenizer["model"]["vocab"]["a"], tokenizer["model"]["vocab"]["b"] = vocab["b"], vocab["a"]
        tokenizer["model"]["merges"] = []
        other = self.golden_with("merges", files={"tokenizer.json": tokenizer})
        self.fails(2, "eval", "compare", base, other, *flags, says="split the text differently")
        self.fails(2, "eval", "compare", base, base, text, "--window", "513", says="handles 512 tokens")
        self.fails(2, "eval", "compare", base, base, self.write("empty.txt", ""), says="no token to score")
        self.fails(2, "eval", "compare", base, self.path("nowhere"), text, says="nowhere")
        self.fails(2, "eval", "compare", base, base, self.path("no.txt"), says="no.txt")
        self.fails(2, "eval", "compare", base, LLAMA, text, says="llama")  # it has no tokenizer


class Quant(EvalCase):
    def test_plot(self):
        base, q4 = self.models()
        q8, text = self.path("q8<0>.gguf"), self.write("t.txt", TEXT)
        self.succeeds("convert", base, "-o", q8, "--type", "q8_0")
        svg = self.path("plot.svg")
        flags = ["--text", text, "--window", "64", "--json"]
        got = json.loads(self.succeeds("eval", "quant", base, q4, q8, base, *flags, "-o", svg))
        self.assertEqual([m["name"] for m in got["models"]], ["q4", "q8<0>", "base"])
        self.assertEqual([m["pareto"] for m in got["models"]], [True, True, True])
        alone = json.loads(self.succeeds("eval", "compare", base, q4, text, "--window", "64", "--json"))
        for key, value in alone.items():
            self.assertEqual(got["models"][0][key], value, key)
        root = ElementTree.parse(svg).getroot()
        space = "{http://www.w3.org/2000/svg}"
        texts = [t.text for t in root.iter(space + "text")]
        for part in ("q4", "q8<0>", "base", "bits per weight, linear layers", "KL divergence, nats per token"):
            self.assertIn(part, texts)
        circles = list(root.iter(space + "circle"))
        self.assertEqual(len(circles), 3)
        across = [float(c.get("cx")) for c in circles]
        down = [float(c.get("cy")) for c in circles]
        self.assertTrue(across[0] < across[1] < across[2] and down[0] < down[1] < down[2])  # loss falls
        front = root.find(space + "polyline").get("points").split()
        self.assertEqual(len(front), 2)  # the base itself loses nothing, which a logarithm has no place for

        saved = self.write("saved.json", json.dumps(alone))
        again = json.loads(self.succeeds("eval", "quant", base, q8, saved, *flags, "--y", "delta", "--x", "bytes"))
        self.assertEqual(again["models"][1]["kl_divergence"], alone["kl_divergence"])
        self.assertIn("saved", self.succeeds("eval", "quant", base, saved, *flags[:-1]))
        self.fails(2, "eval", "quant", base, q8, saved, "--text", text, "--window", "32", says="on other windows")
        self.fails(2, "eval", "quant", base, q8, saved, *flags, "--reference", says="in other arithmetic")
        other = self.write("other.json", json.dumps({**alone, "base_nats_per_token": 1.0}))
        self.fails(2, "eval", "quant", base, q8, other, *flags, says="against another base")
        self.fails(2, "eval", "quant", base, self.write("x.json", "{}"), *flags, says="is missing")


class KvTypes(Figures):
    def test_figures_are_those_of_exported_logits(self):
        model = self.golden_with("base")
        text = self.write("t.txt", TEXT)
        ids = self.ids_of(model, TEXT)
        windows = [ids[i:i + 50] for i in range(0, len(ids), 50)]
        flags = ["eval", "kv", model, text, "--reference", "--windows", "50,100000"]
        got = json.loads(self.succeeds(*flags, "--policies", "f16,int4,k8v4", "--json"))
        self.assertEqual((got["base"], got["skipped_windows"], len(got["lengths"])), ("f32", [100000], 1))
        length = got["lengths"][0]
        self.assertEqual((length["window"], length["windows"]), (50, len(windows)))
        self.assertEqual([row["policy"] for row in length["policies"]], ["f16", "int4", "k8v4"])
        about = json.loads(self.succeeds("inspect", model, "--json"))
        for row in length["policies"]:
            want, _ = self.reference(model, model, windows, flags=["--kv-cache-dtype", row["policy"]])
            for key in ("perplexity", "nats_per_token", "kl_divergence", "kl_divergence_p99", "top1_agreement"):
                self.assertAlmostEqual(row[key], want[key], delta=1e-6 * abs(want[key]) + 1e-12, msg=key)
            self.assertAlmostEqual(row["delta_nats_per_token"], want["delta_nats_per_token"], delta=1e-9)
            self.assertAlmostEqual(row["delta_standard_error"], want["standard_error"], delta=1e-9)
            self.assertAlmostEqual(length["base_perplexity"], want["base_perplexity"], delta=1e-5)
        f16, int4, k8v4 = length["policies"]
        self.assertEqual(f16["bytes_per_token"], about["kv_bytes_per_token_f16"])
        self.assertLess(f16["kl_divergence"], k8v4["kl_divergence"])
        self.assertLess(k8v4["kl_divergence"], int4["kl_divergence"])
        table = self.succeeds(*flags, "--policies", "int4", "--base", "f16")
        self.assertRegex(table, r"\n  int4 +\d+ ")
        part = json.loads(self.succeeds(*flags, "--policies", "f16,static-64-0,sparq-64-8,static-16-0,sim-gear4", "--json"))
        whole, static, sparq, narrow, gear = part["lengths"][0]["policies"]
        self.assertEqual({static["kl_divergence"], sparq["kl_divergence"]}, {whole["kl_divergence"]})  # they read all
        self.assertGreater(narrow["kl_divergence"], whole["kl_divergence"])
        self.assertEqual((narrow["simulated"], gear["simulated"]), (False, True))
        self.assertGreater(sparq["bytes_per_token"], whole["bytes_per_token"])  # sums of values
        evicts = json.loads(self.succeeds(*flags, "--policies", "f16,h2o-64,h2o-32-8,h2o-16-8", "--json"))
        whole, room, some, few = evicts["lengths"][0]["policies"]
        self.assertEqual(room["kl_divergence"], whole["kl_divergence"])  # nothing is evicted
        self.assertEqual(room["bytes_per_token"], whole["bytes_per_token"])
        self.assertLess(whole["kl_divergence"], some["kl_divergence"])
        self.assertLess(some["kl_divergence"], few["kl_divergence"])
        self.assertLess(few["bytes_per_token"], some["bytes_per_token"])
        self.fails(2, *flags, "--policies", "mikv-16", says="mikv saves nothing beside a cache of f16")
        self.fails(2, *flags, "--policies", "snapkv-32", says="an interval is needed, such as snapkv-512-64")
        self.fails(2, *flags, "--policies", "static-64-0-16-4", says="static-WINDOW-SINKS-STRIDE")
        self.fails(2, *flags, "--policies", "int5", says="there is no policy int5 of keys and values; there are f32 f16")
        self.fails(2, *flags[:5], "--windows", "100000", says="no window fits")
        self.fails(2, *flags, "--kv-cache-dtype", "int4", says="--policies")


class Tasks(EvalCase):
    def task(self, name, *lines):
        return self.write(name, "".join(json.dumps(line) + "\n" for line in lines))

    CHOICES = [{"id": "a", "prompt": "The sea was", "choices": ["calm", "hi hi", "still and deep"], "answer": 0},
               {"prompt": "Nobody on board", "choices": [" had slept", " slept"], "answer": " slept",
                "metadata": {"note": 1}},
               {"prompt": "Is the ship\n", "choices": ["still", "s", "calm", "hi"], "answer": 3}]

    def reference(self, model, item):
        """Log-likelihoods of the choices, each scored on its own."""
        values = []
        for choice in item["choices"]:
            prompt = item["prompt"]
            between = "" if prompt[-1] in " \n" or choice[0] == " " else " "
            alone = [BOS] + self.ids_of(model, prompt)
            whole = [BOS] + self.ids_of(model, prompt + between + choice)
            shared = 0
            while shared < min(len(alone), len(whole)) and alone[shared] == whole[shared]:
                shared += 1
            (rows,) = self.logits(model, [whole[:-1]])
            values.append(math.fsum(rows[i - 1][whole[i]] for i in range(shared, len(whole))))
        return values

    def test_multiple_choice(self):
        base, model = self.models()
        file, items = self.task("mc.jsonl", *self.CHOICES), self.path("items.jsonl")
        answers = [0, 1, 3]
        for batch in ("1", "8"):
            got = json.loads(self.succeeds("eval", "tasks", model, file, "--json", "--reference",
                                           "--items-file", items, "--batch", batch))
            with open(items, encoding="utf8") as f:
                lines = [json.loads(line) for line in f]
            self.assertEqual([line["id"] for line in lines], ["a", "2", "3"])
            right, right_norm = 0, 0
            for line, item, answer in zip(lines, self.CHOICES, answers):
                want = self.reference(model, item)
                for a, b in zip(line["log_likelihoods"], want, strict=True):
                    self.assertAlmostEqual(a, b, delta=2e-5 * abs(b))
                lengths = [len(c) for c in item["choices"]]
                norm = [v / n for v, n in zip(want, lengths)]
                self.assertEqual(line["correct"], want.index(max(want)) == answer)
                self.assertEqual(line["correct_norm"], norm.index(max(norm)) == answer)
                right += line["correct"]
                right_norm += line["correct_norm"]
            (task,) = got["tasks"]
            self.assertEqual((task["kind"], task["items"]), ("multiple_choice", 3))
            self.assertAlmostEqual(task["acc"]["value"], right / 3)
            self.assertAlmostEqual(task["acc_norm"]["value"], right_norm / 3)
            low, high = task["acc"]["interval"]
            self.assertTrue(0 <= low <= right / 3 <= high <= 1)

    def test_paired_with_a_base(self):
        base, model = self.models()
        rng = random.Random(3)
        lines = [{"prompt": "".join(rng.choice("abcdefgh ") for _ in range(8)) + "x", "choices": ["ab", "cd", "ef"],
                  "answer": rng.randrange(3)} for _ in range(60)]
        file = self.task("mc.jsonl", *lines)

        def correct(name):
            out = self.path("items.jsonl")
            self.succeeds("eval", "tasks", name, file, "--items-file", out)
            with open(out, encoding="utf8") as f:
                return [json.loads(line)["correct"] for line in f]
        p, q = correct(base), correct(model)
        acc = json.loads(self.succeeds("eval", "tasks", model, file, "--base", base, "--json"))["tasks"][0]["acc"]
        b, c = sum(x > y for x, y in zip(p, q)), sum(x < y for x, y in zip(p, q))
        self.assertGreater(b + c, 0)
        self.assertEqual((acc["only_base"], acc["only_model"]), (b, c))
        self.assertAlmostEqual(acc["difference"], (sum(q) - sum(p)) / 60)
        exact = min(1.0, 2 * sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c))
        self.assertAlmostEqual(acc["mcnemar_p"], exact)
        self.assertAlmostEqual(acc["minimum_detectable_difference"],
                               (1.959964 + 0.841621) * math.sqrt((b + c) / 60 / 60), delta=1e-6)
        out = self.succeeds("eval", "tasks", model, file, "--base", base)
        self.assertIn("p = ", out)
        self.assertIn("minimum detectable difference", out)

    def test_exact_match(self):
        """What the model says is known from `run`; the answers are made from it."""
        said = json.loads(self.succeeds("run", "default", "Once upon a time", "-n", "12", "--temp", "0",
                                        "--json"))["text"]
        word = said.split()[1]
        head = said[:said.index(word)]
        lines = [{"prompt": "Once upon a time", "answer": ["no", said.strip()], "max_tokens": 12},
                 {"prompt": "Once upon a time", "answer": head.strip(), "stop": word, "max_tokens": 12},
                 {"prompt": "Once upon a time", "answer": word, "extract": r"^\s*\S+\s+\K\S+", "max_tokens": 12},
                 {"prompt": "Once upon a time", "answer": "never", "max_tokens": 3}]
        items = self.path("items.jsonl")
        got = json.loads(self.succeeds("eval", "tasks", "default", self.task("em.jsonl", *lines), "--json",
                                       "--items-file", items))
        (task,) = got["tasks"]
        with open(items, encoding="utf8") as f:
            results = [json.loads(line) for line in f]
        self.assertEqual([r["correct"] for r in results], [True, True, True, False], results)
        self.assertEqual(task["exact_match"]["value"], 0.75)
        self.assertEqual(results[0]["output"], said)

    def test_gsm8k(self):
        """Its own lines, and the number in what the model says."""
        lines = [{"question": "1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"}, {"question": "?", "answer": "#### 1"}]
        items = self.path("items.jsonl")
        preamble = self.write("p.txt", "Question: 1 + 1?\nAnswer: 1 + 1 is 2.\n#### 2\n\n" * 4)
        got = json.loads(self.succeeds("eval", "tasks", "default", self.task("n.jsonl", *lines), "--json",
                                       "--max-tokens", "16", "--limit", "1", "--items-file", items,
                                       "--preamble-file", preamble))
        self.assertEqual(got["tasks"][0]["items"], 1)
        with open(items, encoding="utf8") as f:
            (result,) = [json.loads(line) for line in f]
        self.assertNotIn("Question:", result["output"])
        said = result["output"].rsplit("####", 1)[-1]
        numbers = re.findall(r"-?[0-9][0-9,]*(?:\.[0-9]+)?", said)
        self.assertEqual(result["extracted"], numbers[-1])  # its examples make it say some
        self.assertEqual(result["correct"], float(numbers[-1]) == 2)
        self.fails(2, "eval", "tasks", "default", self.task("q.jsonl", {"question": "x", "answer": "2"}), says="####")

    def test_wrong_lines(self):
        good = {"prompt": "a", "choices": ["b", "c"], "answer": 0}
        for line, says in (({**good, "answer": 2}, "index of a choice"), ({**good, "answer": "x"}, "index of a choice"),
                           ({**good, "choices": ["b"]}, "at least two"), ({**good, "choices": ["", "c"]}, "is empty"),
                           ({**good, "hint": 1}, 'unknown field "hint"'), ({"prompt": "a"}, '"answer"'),
                           ({"choices": ["b", "c"], "answer": 0}, '"prompt"'), ([1], "JSON object"),
                           ({"prompt": "a", "answer": "b", "extract": "("}, "regular expression"),
                           ({"prompt": "a", "answer": "b", "max_tokens": 0}, "max_tokens"),
                           ({"prompt": "a", "answer": "b"}, "in one file")):
            error = self.fails(2, "eval", "tasks", "default", self.task("x.jsonl", good, line), says=says)
            self.assertIn("x.jsonl, line 2", error)
        self.fails(2, "eval", "tasks", "default", self.write("bad.jsonl", "{"), says="bad.jsonl, line 1")
        self.fails(2, "eval", "tasks", "default", self.write("empty.jsonl", "\n"), says="no items")
        self.fails(2, "eval", "tasks", "default", self.path("none.jsonl"), says="none.jsonl")
        file = self.task("good.jsonl", good)
        self.fails(2, "eval", "tasks", "default", file, "--chat", says="no chat template")
        long = self.task("long.jsonl", {**good, "prompt": "word " * 5000})
        self.fails(2, "eval", "tasks", "default", long, says="tokens")
        self.assertEqual(run("eval", "tasks", "default", file, "--limit", "-1").returncode, 2)


if __name__ == "__main__":
    unittest.main(argv=[__file__, "-v"] + __import__("sys").argv[1:])
