"""Embeddings, scores, reranking and classes over HTTP, with models whose outputs transformers computed.

usage: pooling_test.py [Class[.test] ...]    needs FRESHET, FRESHET_SOURCE_DIR and FRESHET_UNPACKED_DATA
"""
import array
import json
import math
import os
import random
import shutil
import struct
import subprocess
import tempfile
import unittest

from serving import FRESHET, PATIENCE, SEEDED, Case, Server

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{i}" for i in range(91)]


def load(path):
    """name -> numbers"""
    with open(path, "rb") as f:
        data = f.read()
    size = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        out[name] = array.array({"F32": "f", "I64": "q"}[entry["dtype"]])
        out[name].frombytes(data[8 + size + first:8 + size + last])
    return out


def save(path, tensors):
    """name -> (dtype, shape, numbers)"""
    header, data = {}, b""
    for name, (dtype, shape, numbers) in tensors.items():
        raw = array.array({"F32": "f", "I64": "q"}[dtype], numbers).tobytes()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def unit(v):
    length = math.sqrt(sum(x * x for x in v))
    return [x / length for x in v]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def write_json(path, value):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f)


class PoolingCase(Case):
    """A copy of a seeded model with a vocabulary of words."""
    model = ""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = os.path.join(folder.name, "model")
        shutil.copytree(os.path.join(SEEDED, cls.model), cls.folder)
        with open(os.path.join(cls.folder, "vocab.txt"), "w", encoding="utf-8") as f:
            f.write("\n".join(WORDS) + "\n")
        cls.golden = load(os.path.join(cls.folder, "golden.safetensors"))
        cls.prepare()
        cls.options = {"model": cls.folder, "template": None}
        super().setUpClass()

    @classmethod
    def prepare(cls):
        pass

    def ids(self, i):
        return list(self.golden[f"ids_{i}"])

    def near(self, got, want, tolerance=0.01):
        self.assertEqual(len(got), len(want))
        for a, b in zip(got, want):
            self.assertAlmostEqual(a, b, delta=tolerance)


class SentencePipeline(PoolingCase):
    """Pooling, a dense layer, normalisation, prompts and sizes of a sentence-transformers folder."""
    model = "bert"

    @classmethod
    def prepare(cls):
        def module(i, kind, path):
            return {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        write_json(f"{cls.folder}/modules.json", [
            module(0, "Transformer", ""), module(1, "Pooling", "1_Pooling"),
            module(2, "Dense", "2_Dense"), module(3, "Normalize", "3_Normalize")])
        write_json(f"{cls.folder}/1_Pooling/config.json", {
            "word_embedding_dimension": 64, "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": False})
        write_json(f"{cls.folder}/2_Dense/config.json", {
            "in_features": 64, "out_features": 16, "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh"})
        draw = random.Random(3)
        cls.dense = [[draw.gauss(0, 0.1) for _ in range(64)] for _ in range(16)]
        cls.bias = [draw.gauss(0, 0.1) for _ in range(16)]
        save(f"{cls.folder}/2_Dense/model.safetensors", {
            "linear.weight": ("F32", [16, 64], [x for row in cls.dense for x in row]),
            "linear.bias": ("F32", [16], cls.bias)})
        write_json(f"{cls.folder}/config_sentence_transformers.json", {
            "prompts": {"query": "w1 w2 ", "document": ""}, "default_prompt_name": None})
        config_path = f"{cls.folder}/config.json"
        with open(config_path, encoding="utf-8") as f:
            config = json.load(f)
        write_json(config_path, {**config, "matryoshka_dimensions": [8, 4]})

    def embed(self, given, **fields):
        status, answer = self.server.post("/v1/embeddings", {"input": given, **fields})
        self.assertEqual(status, 200, answer)
        return answer["data"][0]["embedding"]

    def expected(self, i):
        cls = list(self.golden[f"hidden_{i}"])[:64]
        return [math.tanh(sum(a * b for a, b in zip(row, cls)) + c)
                for row, c in zip(self.dense, self.bias)]

    def test_is_followed(self):
        for i in range(2):
            raw = self.expected(i)
            self.near(self.embed(self.ids(i)), unit(raw))
            self.near(self.embed(self.ids(i), normalize=False), raw)

    def test_sizes(self):
        whole = self.embed(self.ids(0))
        self.near(self.embed(self.ids(0), dimensions=8), unit(whole[:8]), 1e-5)
        self.assertEqual(self.embed(self.ids(0), dimensions=16), whole)
        self.assert_error(self.server.post("/v1/embeddings", {"input": "w1", "dimensions": 5}), 400,
                          "dimensions", "8, 4")

    def test_prompts(self):
        plain = self.embed("w7 w8")
        asked = self.embed("w1 w2 w7 w8")
        self.assertNotEqual(plain, asked)
        self.assertEqual(self.embed("w7 w8", prompt_name="query"), asked)
        self.assertEqual(self.embed("w7 w8", input_type="search_query"), asked)
        self.assertEqual(self.embed("w7 w8", input_type="document"), plain)
        self.assert_error(self.server.post("/v1/embeddings", {"input": "w1", "prompt_name": "x"}), 400,
                          "prompt_name", "query, document")

    def test_long_texts_are_cut_at_their_ends(self):
        text = " ".join(["w3"] * 400)
        self.assert_error(self.server.post("/v1/embeddings", {"input": text}), 400, "input")
        cut = self.embed(text, truncate_prompt_tokens=10)
        self.assertEqual(cut, self.embed(" ".join(["w3"] * 8)))
        self.embed(text, truncate_prompt_tokens=-1)

    def test_no_text_is_written(self):
        for path, body in (("/v1/completions", {"prompt": "w1"}),
                           ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}]})):
            self.assert_error(self.server.post(path, body), 400, "model", "/v1/embeddings")
        self.assert_error(self.server.post("/classify", {"input": "w1"}), 400, "model", "no classification")

    def test_scores_are_cosines(self):
        a, b, c = (self.embed(text) for text in ("w5 w6", "w5", "w40 w41 w42"))
        _, answer = self.server.post("/rerank", {"query": "w5 w6", "documents": ["w40 w41 w42", "w5"]})
        want = {0: sum(x * y for x, y in zip(a, c)), 1: sum(x * y for x, y in zip(a, b))}
        for result in answer["results"]:
            self.assertAlmostEqual(result["relevance_score"], want[result["index"]], places=4)


class Reranker(PoolingCase):
    """A cross-encoder that reads token types."""
    model = "bert-rerank"
    query, documents = "w1 w2 w3", ["w9", "w4 w5 w6 w7", "w1 w2 w3", "w80 w81"]

    def raw_scores(self):
        """Of the pairs, by `eval logits`: another path through the program."""
        tensors = {}
        for i, document in enumerate(self.documents):
            first = [2] + [WORDS.index(w) for w in self.query.split()] + [3]
            second = [WORDS.index(w) for w in document.split()] + [3]
            tensors[f"ids_{i}"] = ("I64", [len(first + second)], first + second)
            tensors[f"token_type_ids_{i}"] = ("I64", [len(first + second)],
                                              [0] * len(first) + [1] * len(second))
        with tempfile.TemporaryDirectory() as folder:
            save(f"{folder}/in.safetensors", tensors)
            subprocess.run([FRESHET, "eval", "logits", self.folder, "--inputs", f"{folder}/in.safetensors",
                            "-o", f"{folder}/out.safetensors"], check=True, capture_output=True)
            out = load(f"{folder}/out.safetensors")
        return [out[f"score_{i}"][0] for i in range(len(self.documents))]

    def test_formats(self):
        want = [sigmoid(x) for x in self.raw_scores()]
        order = sorted(range(4), key=lambda i: -want[i])
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            status, answer = self.server.post(path, {"query": self.query, "documents": self.documents,
                                                     "model": "default"})
            self.assertEqual(status, 200, answer)
            self.assertEqual([r["index"] for r in answer["results"]], order)
            for r in answer["results"]:
                self.assertAlmostEqual(r["relevance_score"], want[r["index"]], places=6)
                if path != "/v2/rerank":
                    self.assertEqual(r["document"], {"text": self.documents[r["index"]]})
                else:
                    self.assertNotIn("document", r)
            self.assertEqual(answer["usage"]["total_tokens"], 4 * 6 + 10)
        _, top = self.server.post("/rerank", {"query": self.query, "top_n": 2, "return_documents": False,
                                              "documents": [{"text": d} for d in self.documents]})
        self.assertEqual([r["index"] for r in top["results"]], order[:2])
        self.assertNotIn("document", top["results"][0])

    def test_scores(self):
        raw = self.raw_scores()
        _, answer = self.server.post("/v1/score", {"text_1": self.query, "text_2": self.documents})
        self.near([d["score"] for d in answer["data"]], [sigmoid(x) for x in raw], 1e-6)
        _, answer = self.server.post("/score", {"text_1": [self.query] * 4, "text_2": self.documents,
                                                "activation": False})
        self.near([d["score"] for d in answer["data"]], raw, 1e-5)

    def test_format_of_text_embeddings_inference(self):
        _, answer = self.server.post("/rerank", {"query": self.query, "texts": self.documents,
                                                 "raw_scores": True, "return_text": True})
        raw = self.raw_scores()
        for r in answer:
            self.assertAlmostEqual(r["score"], raw[r["index"]], places=5)
            self.assertEqual(r["text"], self.documents[r["index"]])

    def test_refusals(self):
        for path, body, field in (("/rerank", {"documents": ["w1"]}, "query"),
                                  ("/rerank", {"query": "w1"}, "documents"),
                                  ("/rerank", {"query": "w1", "documents": []}, "documents"),
                                  ("/rerank", {"query": "w1", "documents": [3]}, "documents"),
                                  ("/rerank", {"query": "w1", "documents": ["w1"] * 2049}, "documents"),
                                  ("/rerank", {"query": "w1", "documents": ["w1"], "top_n": 0}, "top_n"),
                                  ("/rerank", {"query": "w1", "documents": ["w1 " * 500]}, "documents"),
                                  ("/score", {"text_1": ["w1", "w2"], "text_2": ["w1"]}, "text_1"),
                                  ("/score", {"text_1": "w1"}, "text_2"),
                                  ("/classify", {}, "input")):
            self.assert_error(self.server.post(path, body), 400, field)
        self.assert_error(self.server.post("/rerank", {"query": "w1", "documents": ["w1"], "model": "x"}),
                          404, "model")
        for body in ({"instruction": "w1"}, {"chat_template_kwargs": {"instruction": "w1"}}):
            self.assert_error(self.server.post("/rerank", {"query": "w1", "documents": ["w1"], **body}), 400,
                              "instruction")
        status, _ = self.server.post("/rerank", {"query": "w1", "documents": ["w1 " * 500],
                                                 "truncate_prompt_tokens": -1})
        self.assertEqual(status, 200)


class Classifier(PoolingCase):
    model = "xlm-roberta-rerank"

    def test_against_reference_scores(self):
        for i in range(2):
            want = self.golden[f"score_{i}"][0]
            _, answer = self.server.post("/classify", {"input": [self.ids(i)]})
            self.assertEqual(answer["data"][0]["label"], "LABEL_0")
            self.assertEqual(answer["data"][0]["num_classes"], 1)
            self.near(answer["data"][0]["probs"], [sigmoid(want)])
            _, answer = self.server.post("/classify", {"input": self.ids(i), "activation": False})
            self.near(answer["data"][0]["probs"], [want])

    def test_key_is_needed(self):
        with_key = Server("--api-key", "k", **self.options)
        try:
            for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify",
                         "/v1/classify"):
                self.assertEqual(with_key.post(path, {})[0], 401)
        finally:
            with_key.stop()


class TwoLabels(PoolingCase):
    model = "qwen3-score"

    def test_softmax(self):
        want = list(self.golden["score_1"])
        total = sum(math.exp(x) for x in want)
        _, answer = self.server.post("/classify", {"input": self.ids(1)})
        self.near(answer["data"][0]["probs"], [math.exp(x) / total for x in want])
        self.assertEqual(answer["data"][0]["label"], f"LABEL_{want.index(max(want))}")
        self.assert_error(self.server.post("/score", {"text_1": "w1", "text_2": "w2"}), 400, "model",
                          "/classify")


# Of Qwen3-Reranker's model card.
QWEN_PREFIX = ('<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and '
               'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
               '<|im_start|>user\n')
QWEN_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN_TASK = "Given a web search query, retrieve relevant passages that answer the query"


def qwen_parts(query, document, task=QWEN_TASK):
    return (f"{QWEN_PREFIX}<Instruct>: {task}\n<Query>: {query}\n",
            f"<Document>: {document}{QWEN_SUFFIX}")


class AnswersAsScores(PoolingCase):
    """A causal language model as vLLM makes a reranker of it: "yes" against "no"."""
    model = "qwen3"
    overrides = {"architectures": ["Qwen3ForSequenceClassification"],
                 "classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    flags = ("--hf-overrides", json.dumps(overrides))

    @classmethod
    def prepare(cls):
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "no", "yes"]
        words += list(letters) + ["##" + c for c in letters] + list('<>|:._"/,')
        with open(os.path.join(cls.folder, "vocab.txt"), "w", encoding="utf-8") as f:
            f.write("\n".join(words) + "\n")
        cls.no, cls.yes = words.index("no"), words.index("yes")

    def score_of(self, given):
        """Of one text, or its ids."""
        status, answer = self.server.post("/classify", {"input": given, "add_special_tokens": False})
        self.assertEqual(status, 200, answer)
        return answer["data"][0]["probs"][0]

    def ranked(self, query, document, **fields):
        status, answer = self.server.post("/v1/rerank", {"query": query, "documents": [document], **fields})
        self.assertEqual(status, 200, answer)
        return answer["results"][0]["relevance_score"]

    def tokens(self, text):
        _, answer = self.server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        return answer["tokens"]

    def test_against_reference_logits(self):
        for i in range(2):
            last = list(self.golden[f"logits_{i}"])[-96:]
            want = sigmoid(last[self.yes] - last[self.no])
            self.assertAlmostEqual(self.score_of(self.ids(i)), want, delta=0.01)

    def test_template(self):
        for task in (QWEN_TASK, "find the cat"):
            fields = {} if task == QWEN_TASK else {"instruction": task}
            want = self.score_of("".join(qwen_parts("a cat", "dogs {query} bark", task)))
            self.assertAlmostEqual(self.ranked("a cat", "dogs {query} bark", **fields), want, places=6)
        by_kwargs = self.ranked("a cat", "dogs", chat_template_kwargs={"instruction": "find the cat"})
        self.assertAlmostEqual(by_kwargs, self.ranked("a cat", "dogs", instruct="find the cat"), places=6)
        self.assertNotAlmostEqual(by_kwargs, self.ranked("a cat", "dogs"), places=6)
        self.assert_error(self.server.post("/rerank", {"query": "a", "documents": ["b"],
                                                       "chat_template_kwargs": {"x": 1}}), 400,
                          "chat_template_kwargs")

    def test_formatted_texts_are_joined(self):
        query, document = qwen_parts("a cat", "dogs")
        joined = [2] + self.tokens(query) + [3] + self.tokens(document) + [3]
        _, answer = self.server.post("/v1/score", {"text_1": query, "text_2": document})
        self.assertAlmostEqual(answer["data"][0]["score"], self.score_of(joined), places=6)
        self.assert_error(self.server.post("/v1/score", {"text_1": query, "text_2": document,
                                                         "instruction": "x"}), 400, "instruction")

    def test_long_documents_are_cut(self):
        body = {"query": "a cat", "documents": ["a " * 600]}
        self.assert_error(self.server.post("/rerank", body), 400, "documents")
        cut = self.ranked("a cat", "a " * 600, truncate_prompt_tokens=400)
        short = len(self.tokens("".join(qwen_parts("a cat", ""))))
        self.assertAlmostEqual(cut, self.ranked("a cat", "a " * (400 - short)), places=6)
        self.assert_error(self.server.post("/rerank", {**body, "truncate_prompt_tokens": 20}), 400, "documents")

    def test_overrides(self):
        for given, words in (("[1]", "--hf-overrides"), ("{", "--hf-overrides"),
                             ('{"classifier_from_token": ["no", "perhaps"]}', "perhaps"),
                             ('{"classifier_from_token": ["no"], "method": "from_2_way_softmax"}', "two tokens")):
            run = subprocess.run([FRESHET, "serve", self.folder, "--port", "0", "--hf-overrides", given],
                                 capture_output=True, text=True, check=False, timeout=PATIENCE)
            self.assertNotEqual(run.returncode, 0)
            self.assertIn(words, run.stderr)


class LogitScore(AnswersAsScores):
    """The same by the files of sentence-transformers."""
    flags = ()

    @classmethod
    def prepare(cls):
        super().prepare()
        write_json(f"{cls.folder}/modules.json", [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {"idx": 1, "name": "1", "path": "1_LogitScore",
             "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}])
        write_json(f"{cls.folder}/1_LogitScore/config.json", {"true_token_id": cls.yes, "false_token_id": cls.no})


class ScoreTemplate(AnswersAsScores):
    """A template for messages with the roles query and document, as vLLM's."""
    template = ("is {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }} "
                "for {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} "
                "by {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first "
                "| default('taste') }}")

    @classmethod
    def prepare(cls):
        super().prepare()
        path = f"{cls.folder}/score.jinja"
        with open(path, "w", encoding="utf-8") as f:
            f.write(cls.template)
        cls.flags = (*AnswersAsScores.flags, "--chat-template", path)

    def test_template(self):
        self.assertAlmostEqual(self.ranked("a cat", "dogs"), self.score_of("is dogs for a cat by taste"), places=6)
        self.assertAlmostEqual(self.ranked("a cat", "dogs", instruction="law"),
                               self.score_of("is dogs for a cat by law"), places=6)

    def test_formatted_texts_are_joined(self):
        self.skipTest("a template is always followed")

    def test_long_documents_are_cut(self):
        cut = self.ranked("a cat", "a " * 600, truncate_prompt_tokens=40)
        self.assertAlmostEqual(cut, self.ranked("a cat", "a " * (40 - len(self.tokens("is for a cat by taste")))),
                               places=6)


if __name__ == "__main__":
    unittest.main()
