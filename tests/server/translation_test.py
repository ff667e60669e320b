"""Languages in completions, and what generation_config.json forbids.

usage: translation_test.py Languages|Forbidden

FRESHET names the program, FRESHET_UNPACKED_DATA the folder where tests/seeded_checkpoints.cc wrote its
checkpoints. The model is a seeded M2M-100 with a vocabulary of characters and languages as NLLB spells them.
"""
import json
import os
import shutil
import string
import subprocess
import sys
import tempfile
import unittest

import serving
from serving import SEEDED

VOCAB = 96
SPECIAL = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "eng_Latn": 90, "deu_Latn": 91, "__fr__": 92}
ASK = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def make_model(folder, generation=None):
    shutil.copytree(os.path.join(SEEDED, "m2m-100"), folder, dirs_exist_ok=True)
    free = [i for i in range(VOCAB) if i not in SPECIAL.values()]
    vocab = dict(SPECIAL)
    characters = string.ascii_letters + string.digits + ".,:;?!<>@/-_'()\u0120\u010a"
    vocab.update({characters[n] if n < len(characters) else f"unused{i}": i for n, i in enumerate(free)})
    around = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("eng_Latn", "</s>")]
    single = [around[0], {"Sequence": {"id": "A", "type_id": 0}}, around[1]]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for name, i in SPECIAL.items()],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": single,
                           "special_tokens": {name: {"id": name, "ids": [SPECIAL[name]], "tokens": [name]}
                                              for name in ("eng_Latn", "</s>")}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
                  "merges": []},
    }
    files = {"tokenizer.json": tokenizer,
             "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
                                       "unk_token": "<unk>"}}
    if generation is not None:
        files["generation_config.json"] = generation
    for name, value in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            json.dump(value, f)
    return folder


class Base(unittest.TestCase):
    GENERATION = None

    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.model = make_model(os.path.join(cls.temporary.name, "model"), cls.GENERATION)
        cls.server = cls.serve()

    @classmethod
    def serve(cls, *flags):
        server = serving.Server("--max-model-len", "60", "--disable-access-log", *flags, model=cls.model, template=None)
        cls.addClassCleanup(server.stop)
        return server

    def ids(self, server=None, **fields):
        status, reply = (server or self.server).post("/v1/completions", {**ASK, **fields})
        self.assertEqual(status, 200, reply)
        return reply["choices"][0]["token_ids"]

    def refusal(self, server=None, **fields):
        status, reply = (server or self.server).post("/v1/completions", {**ASK, **fields})
        self.assertEqual(status, 400, reply)
        self.assertNotIn("\n", reply["error"]["message"])
        return reply["error"]

    def run_ids(self, *flags):
        done = subprocess.run([serving.FRESHET, "run", self.model, "abc", "-n", "8", "--temp", "0", "--ignore-eos",
                               "--print-ids", *flags], capture_output=True, text=True, timeout=serving.PATIENCE, check=True)
        return json.loads(done.stdout), done.stderr


class Languages(Base):
    def test_languages_are_those_of_the_command_line(self):
        seen = set()
        for source, target in (("", ""), ("deu_Latn", ""), ("", "deu_Latn"), ("deu_Latn", "fr")):
            fields, flags = {}, []
            for name, value in (("source_language", source), ("target_language", target)):
                if value:
                    fields[name] = value
                    flags += ["--" + name.replace("_", "-"), value]
            got = self.ids(**fields)
            want, _ = self.run_ids(*flags)
            self.assertEqual(got, want[0] if isinstance(want[0], list) else want, (source, target))
            seen.add(tuple(got))
        self.assertGreater(len(seen), 2)

    def test_the_prompt_is_what_the_encoder_reads(self):
        _, reply = self.server.post("/v1/completions", {**ASK, "target_language": "deu_Latn", "prompt": ["abc", "ab"]})
        self.assertEqual(reply["usage"]["prompt_tokens"], 5 + 4)
        self.assertEqual(len(reply["choices"]), 2)
        self.assertEqual(reply["choices"][1]["token_ids"], self.ids(prompt="ab", target_language="deu_Latn"))

    def test_errors_name_the_field(self):
        for field in ("source_language", "target_language"):
            error = self.refusal(**{field: "xyz_Latn"})
            self.assertEqual(error["param"], field)
            self.assertIn("'xyz_Latn'", error["message"])
            self.assertEqual(self.refusal(**{field: 1})["param"], field)
            self.assertEqual(self.refusal(prompt=[5, 6], **{field: "deu_Latn"})["param"], field)
        self.assertEqual(self.refusal(source_language="deu_Latn", target_language="x")["param"], "target_language")
        self.assertIn("not cut", self.refusal(target_language="deu_Latn", truncate_prompt_tokens=1)["message"])
        other = serving.Server("--disable-access-log")
        self.addCleanup(other.stop)
        error = self.refusal(other, target_language="deu_Latn")
        self.assertEqual(error["param"], "target_language")
        self.assertIn("models that translate", error["message"])


class Forbidden(Base):
    GENERATION = {"bad_words_ids": [[0]], "num_beams": 4, "forced_eos_token_id": 2, "max_length": 50,
                  "length_penalty": 2.0}

    def test_words_and_tokens(self):
        plain = self.ids()
        most = max(set(plain), key=plain.count)
        self.assertNotIn(most, self.ids(bad_words_ids=[[most]]))
        self.assertNotIn(most, self.ids(suppress_tokens=[most]))
        self.assertNotEqual(self.ids(begin_suppress_tokens=[plain[0]])[0], plain[0])
        once = self.ids(no_repeat_ngram_size=1)
        self.assertEqual(len(set(once)), len(once))
        self.assertLessEqual(set(self.ids(allowed_token_ids=[40, 41])), {40, 41})
        text = self.server.post("/v1/completions", {**ASK, "skip_special_tokens": False})[1]["choices"][0]["text"]
        letter = next(c for c in text if c in string.ascii_letters + string.digits)
        banned = self.server.post("/v1/completions", {**ASK, "bad_words": [letter]})[1]["choices"][0]["text"]
        self.assertNotIn(letter, banned)

    def test_wrong_ones_are_named(self):
        for name, value in (("bad_words_ids", [[]]), ("bad_words_ids", [5]), ("bad_words_ids", [[500]]),
                            ("bad_words", "x"), ("bad_words", [" "]), ("bad_words", [1]),
                            ("allowed_token_ids", []), ("allowed_token_ids", [500]), ("suppress_tokens", [-1]),
                            ("begin_suppress_tokens", [500]), ("no_repeat_ngram_size", -1)):
            self.assertEqual(self.refusal(**{name: value})["param"], name, value)
        self.assertEqual(self.refusal(use_beam_search=True, n=2, allowed_token_ids=[5])["param"], "allowed_token_ids")

    def test_the_models_configuration_holds(self):
        plain = self.serve("--generation-config", "none")
        first = self.ids(plain)[0]
        again = make_model(os.path.join(self.temporary.name, "other"), {"bad_words_ids": [[first]], "num_beams": 4})
        server = serving.Server("--max-model-len", "60", "--disable-access-log", model=again, template=None)
        self.addCleanup(server.stop)
        self.assertNotIn(first, self.ids(server))
        self.assertEqual(self.ids(server), self.ids(plain, bad_words_ids=[[first]]))
        beams = {"use_beam_search": True, "n": 2}
        self.assertEqual(self.ids(server, **beams), self.ids(plain, bad_words_ids=[[first]], **beams))
        self.assertEqual(self.ids(server, bad_words_ids=[]), self.ids(plain))
        # As in transformers, unknown ids ban nothing, and the end of a text is no bad word.
        idle = make_model(os.path.join(self.temporary.name, "idle"), {
            "bad_words_ids": [[first], [77], [500], [4, 500]], "eos_token_id": 77, "suppress_tokens": [-1, 96],
            "begin_suppress_tokens": [220]})
        server = serving.Server("--max-model-len", "60", "--disable-access-log", model=idle, template=None)
        self.addCleanup(server.stop)
        self.assertEqual(self.ids(server), self.ids(plain, bad_words_ids=[[first]]))
        self.assertLess(len(self.ids(server, ignore_eos=False, logit_bias={"77": 100})), 8)

    def test_what_is_left_out_is_said(self):
        self.assertIn("also asks for num_beams 4, forced_eos_token_id 2", self.server.log())
        _, said = self.run_ids()
        self.assertIn("num_beams 4", said)
        _, said = self.run_ids("--beams", "2")
        self.assertNotIn("num_beams", said)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[1:]], verbosity=2)
