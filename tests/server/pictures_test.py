"""Pictures in requests: parts, URLs, limits, and what the caches make of them.

usage: pictures_test.py Pictures|MediaUrls|CommandLine|TextOnly

FRESHET names the program, FRESHET_UNPACKED_DATA the folder where tests/seeded_checkpoints.cc wrote
seeded/. The model is a seeded LLaVA (16 rows a picture) with a vocabulary of characters.
"""
import base64
import http.server
import json
import os
import shutil
import string
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import zlib

import serving

ROWS = 16
IMAGE = 95
CHARACTERS = string.ascii_letters + string.digits + ".,:;?!<>@/-_'()" + "\u0120\u010a"  # byte-level: space, line feed
TEMPLATE = ("{% for m in messages %}{{ m.role }}:"
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}a:{% endif %}")


def png(width=40, height=30, seed=1):
    rows = b""
    for _ in range(height):
        rows += b"\0"
        for _ in range(width * 3):
            seed = (seed * 1664525 + 1013904223) % 2**32
            rows += bytes([seed >> 24])

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def data_url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def picture(url):
    return {"type": "image_url", "image_url": {"url": url}}


def text(words):
    return {"type": "text", "text": words}


def make_model(folder, name="llava"):
    """A seeded checkpoint with a tokenizer of characters and the model's image token."""
    shutil.copytree(os.path.join(serving.SEEDED, name), folder, dirs_exist_ok=True)
    vocab = {character: i for i, character in enumerate(CHARACTERS)}
    vocab.update({f"unused{i}": i for i in range(len(vocab), IMAGE)})
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": IMAGE, "content": "<image>", "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
                  "merges": []},
    }
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as f:
        json.dump(tokenizer, f)
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}, f)
    return folder


class PictureServer(unittest.TestCase):
    FLAGS = ()

    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = cls.temporary.name
        model = make_model(os.path.join(cls.folder, "model"))
        cls.server = serving.Server("--max-model-len", "400", "--disable-access-log", *cls.flags(), model=model,
                                    template=None)

    @classmethod
    def flags(cls):
        return cls.FLAGS

    @classmethod
    def tearDownClass(cls):
        try:
            assert cls.server.stop() == 0
        finally:
            cls.temporary.cleanup()

    def chat(self, *parts, messages=None, **fields):
        body = {"messages": messages or [{"role": "user", "content": list(parts)}], "max_tokens": 6,
                "temperature": 0, "logprobs": True, "ignore_eos": True, **fields}
        return self.server.post("/v1/chat/completions", body)

    def answer(self, *parts, **fields):
        status, reply = self.chat(*parts, **fields)
        self.assertEqual(status, 200, reply)
        return reply

    def refusal(self, *parts, **fields):
        status, reply = self.chat(*parts, **fields)
        self.assertEqual(status, 400, reply)
        message = reply["error"]["message"]
        self.assertNotIn("\n", message)
        return message


def logprobs(reply):
    return [t["logprob"] for t in reply["choices"][0]["logprobs"]["content"]]


def cached(reply):
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


class Pictures(PictureServer):
    FLAGS = ("--limit-mm-per-prompt", '{"image": 3, "video": 0}')

    def test_a_picture_is_read(self):
        one = self.answer(picture(data_url(png(seed=1))), text("What?"))
        self.assertEqual(one["usage"]["prompt_tokens"], len("user:What?a:") + ROWS)
        other = self.answer(picture(data_url(png(seed=2))), text("What?"))
        self.assertEqual(cached(other), len("user:"))  # not a row of the other picture
        self.assertNotEqual(logprobs(one), logprobs(other))
        again = self.answer(picture(data_url(png(seed=1))), text("What?"))
        self.assertEqual(cached(again), one["usage"]["prompt_tokens"] - 1)
        self.assertEqual(logprobs(again), logprobs(one))

    def test_metrics(self):
        names = ("vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total", "freshet:picture_seconds_total")
        before = [self.server.metric(name) for name in names]
        url = data_url(png(seed=41))
        self.answer(picture(url), text("Count"))
        self.answer(text("Behind"), picture(url))  # another prefix: the tower's output is found
        queries, hits, seconds = (self.server.metric(name) - old for name, old in zip(names, before))
        self.assertEqual((queries, hits), (2, 1))
        self.assertGreater(seconds, 0)
        self.assertGreater(self.server.metric("freshet:picture_cache_bytes"), 0)

    def test_the_same_pixels_are_the_same_picture(self):
        data = png(seed=3)
        one = self.answer(picture(data_url(data)), text("Same?"))
        end = data.index(b"IDAT") - 4
        comment = b"tEXt" + b"Comment\0x"
        other = data[:end] + struct.pack(">I", len(comment) - 4) + comment + struct.pack(
            ">I", zlib.crc32(comment)) + data[end:]
        again = self.answer(picture(data_url(other)), text("Same?"))
        self.assertEqual(cached(again), one["usage"]["prompt_tokens"] - 1)

    def test_parts_stand_where_they_are_given(self):
        url = data_url(png(seed=4))
        first = self.answer(picture(url), text("words"))
        last = self.answer(text("words"), picture(url))
        self.assertEqual(first["usage"]["prompt_tokens"], last["usage"]["prompt_tokens"])
        self.assertNotEqual(logprobs(first), logprobs(last))
        _, tokens = self.server.post("/tokenize", {"messages": [{"role": "user", "content": [
            text("ab"), picture(url)]}]})
        self.assertEqual(tokens["tokens"][len("user:ab"):][:ROWS], [IMAGE] * ROWS)

    def test_several_pictures_and_turns(self):
        messages = [{"role": "user", "content": [picture(data_url(png(seed=5))), text("One")]},
                    {"role": "assistant", "content": "Yes"},
                    {"role": "user", "content": [picture(data_url(png(seed=6))), text("Two"),
                                                 picture(data_url(png(seed=7)))]}]
        reply = self.answer(messages=messages)
        prompt = "user:Oneassistant:Yesuser:Twoa:"
        self.assertEqual(reply["usage"]["prompt_tokens"], len(prompt) + 3 * ROWS)
        messages[2]["content"].append(picture(data_url(png(seed=8))))
        self.assertIn("4 pictures: at most 3", self.refusal(messages=messages))

    def test_responses_read_the_same(self):
        url = data_url(png(seed=9))
        chat = self.answer(picture(url), text("Same"))
        for given in (url, {"url": url}):
            status, reply = self.server.post("/v1/responses", {
                "input": [{"role": "user", "content": [
                    {"type": "input_image", "image_url": given, "detail": "auto"},
                    {"type": "input_text", "text": "Same"}]}],
                "max_output_tokens": 6, "temperature": 0, "ignore_eos": True})
            self.assertEqual(status, 200, reply)
            self.assertEqual(reply["output"][-1]["content"][0]["text"], chat["choices"][0]["message"]["content"])
            self.assertEqual(reply["usage"]["input_tokens"], chat["usage"]["prompt_tokens"])

    def test_samples_and_streams(self):
        url = data_url(png(seed=10))
        reply = self.answer(picture(url), text("n"), n=3, temperature=1, seed=5)
        self.assertEqual(len(reply["choices"]), 3)
        alone = self.answer(picture(url), text("n"), temperature=1, seed=5)
        self.assertEqual(alone["choices"][0]["message"]["content"], reply["choices"][0]["message"]["content"])

    def test_wrong_pictures(self):
        good = data_url(png())
        cases = [
            (picture("data:image/png;base64,@@@@"), "picture 1: data: URL: base64 has no character"),
            (picture("data:image/png,abc"), "must be base64"),
            (picture(data_url(b"GIF89a" + bytes(40))), "picture 1: "),
            (picture(data_url(png()[:-20])), "picture 1: PNG"),
            (picture("https://example.org/a.png"), "is no data: URL"),
            (picture("file:///etc/passwd"), "is no data: URL"),
            ({"type": "image_url"}, "needs 'image_url'"),
            ({"type": "image_url", "image_url": {"url": good, "detail": "best"}}, "'detail' must be"),
            ({"type": "input_image", "file_id": "file-1"}, "'file_id' are not supported"),
            ({"type": "input_audio", "input_audio": {}}, "reads text and pictures"),
        ]
        for part, message in cases:
            with self.subTest(message):
                self.assertIn(message, self.refusal(part, text("What?")))
        self.assertIn("picture 2", self.refusal(picture(good), picture(data_url(b"x" * 40))))

    def test_bombs_are_refused_by_their_header(self):
        header = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
        bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header + struct.pack(
            ">I", zlib.crc32(b"IHDR" + header))
        before = self.server.cpu_seconds()
        self.assertIn("picture 1", self.refusal(picture(data_url(bomb + bytes(100)))))
        self.assertLess(self.server.cpu_seconds() - before, 5 * serving.SLOWER)

    def test_texts_cannot_pass_for_pictures(self):
        url = data_url(png())
        self.assertIn("<image>", self.refusal(picture(url), text("or <image>?")))
        self.assertEqual(self.chat(text("An <image> in a text"))[0], 200)  # no picture: it is text

    def test_too_long(self):
        self.assertIn("tokens", self.refusal(picture(data_url(png())), text("long " * 100)))
        self.assertIn("not cut", self.refusal(picture(data_url(png())), text("x" * 50), truncate_prompt_tokens=20))

    def test_properties(self):
        self.assertEqual(self.server.get("/props")[1]["modalities"], {"vision": True, "audio": False})


class MediaUrls(PictureServer):
    @classmethod
    def flags(cls):
        cls.hits = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                cls.hits.append(self.path)
                to = {"/away": "http://localhost:1/x.png", "/file": "file:///etc/passwd", "/near": "/a.png",
                      "/loop": "/loop"}.get(self.path)
                if to:
                    self.send_response(302)
                    self.send_header("Location", to)
                    self.end_headers()
                    return
                self.send_response(200 if self.path in ("/a.png", "/slow", "/large") else 404)
                self.end_headers()
                if self.path == "/a.png":
                    self.wfile.write(png(seed=1))
                try:
                    for _ in range(10 * serving.PATIENCE if self.path == "/slow" else 0):
                        self.wfile.write(b"x")
                        self.wfile.flush()
                        time.sleep(0.1)
                    for _ in range(30 if self.path == "/large" else 0):
                        self.wfile.write(bytes(1 << 20))
                except OSError:
                    pass  # the reader has gone

            def log_message(self, *arguments):
                pass
        cls.site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=cls.site.serve_forever, daemon=True).start()
        cls.address = f"http://127.0.0.1:{cls.site.server_port}"
        cls.pictures = os.path.join(cls.folder, "pictures")
        os.mkdir(cls.pictures)
        for path in ("pictures/a b.png", "outside.png"):
            with open(os.path.join(cls.folder, path), "wb") as f:
                f.write(png(seed=1))
        os.symlink("../outside.png", os.path.join(cls.pictures, "link.png"))
        return cls.media_flags(serving.PATIENCE)

    @classmethod
    def media_flags(cls, seconds):
        return ("--allowed-media-domains", cls.address, "example.invalid", "--allowed-local-media-path",
                cls.pictures, "--media-fetch-timeout", str(seconds))

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.site.shutdown()
        cls.site.server_close()

    def test_fetched_and_local_pictures_are_the_same(self):
        wanted = logprobs(self.answer(picture(data_url(png(seed=1)))))
        for url in (f"{self.address}/a.png", f"{self.address}/near", f"file://{self.pictures}/a%20b.png"):
            with self.subTest(url):
                reply = self.answer(picture(url))
                self.assertEqual(logprobs(reply), wanted)

    def test_what_is_not_fetched(self):
        self.hits.clear()
        other = self.address.replace("127.0.0.1", "localhost")
        for url, message in ((f"{other}/a.png", "is not allowed"), ("http://example.invalid/", "is not allowed"),
                             (f"{self.address}@evil.example/", "without a user"), ("ftp://a/", "neither")):
            with self.subTest(url):
                self.assertIn(message, self.refusal(picture(url)))
        self.assertEqual(self.hits, [])
        for path, message in (("/away", "is not allowed"), ("/file", "picture 1"), ("/loop", "redirects more than"),
                              ("/none", "answers 404"), ("/large", "more than")):
            with self.subTest(path):
                self.assertIn(message, self.refusal(picture(self.address + path)))

    def test_slow_hosts(self):
        self.server = serving.Server("--max-model-len", "400", "--disable-access-log", *self.media_flags(0.5),
                                     model=os.path.join(self.folder, "model"), template=None)
        self.addCleanup(self.server.stop)
        self.assertIn("took too long", self.refusal(picture(self.address + "/slow")))

    def test_files_outside_the_folder(self):
        for path in (f"{self.pictures}/link.png", f"{self.pictures}/../outside.png", f"{self.folder}/outside.png",
                     f"{self.pictures}/missing.png", self.pictures, "/etc/passwd"):
            with self.subTest(path):
                self.assertIn("picture 1", self.refusal(picture(f"file://{path}")))


class CommandLine(PictureServer):
    def freshet(self, *arguments, stdin="", code=0):
        done = subprocess.run([serving.FRESHET, *arguments], input=stdin, capture_output=True, text=True, timeout=serving.PATIENCE)
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stdout if code == 0 else done.stderr

    def test_run_and_chat_answer_as_the_server_does(self):
        model = os.path.join(self.folder, "model")
        file = os.path.join(self.folder, "a.png")
        with open(file, "wb") as f:
            f.write(png(seed=1))
        url = data_url(png(seed=1))
        wanted = self.answer(picture(url), text("What?"), ignore_eos=False)
        told = json.loads(self.freshet("run", model, "--image", file, "What?", "--temp", "0", "-n", "6", "--json"))
        self.assertEqual(told["text"], wanted["choices"][0]["message"]["content"])
        self.assertEqual(told["prompt_tokens"], wanted["usage"]["prompt_tokens"])
        two = json.loads(self.freshet("run", model, "--image", file, "--image", file, "What?", "-n", "1", "--json"))
        self.assertEqual(two["prompt_tokens"], told["prompt_tokens"] + ROWS)
        saved = os.path.join(self.folder, "saved.json")
        options = ("--temp", "0", "-n", "6")
        said = self.freshet("chat", model, *options, stdin=f"/image {file}\nWhat?\n/save {saved}\n")
        self.assertIn(wanted["choices"][0]["message"]["content"].strip(), said)
        with open(saved, encoding="utf-8") as f:
            self.assertEqual(json.load(f)[0]["content"], [{"type": "image", "path": file}, text("What?")])
        self.assertIn("[" + file, self.freshet("chat", model, *options, stdin=f"/load {saved}\n/history\n"))

    def test_wrong_files(self):
        model = os.path.join(self.folder, "model")
        self.assertIn("/none.png: no such file",
                      self.freshet("run", model, "--image", "/none.png", "What?", code=2))
        self.assertIn("--raw", self.freshet("run", model, "--raw", "--image", "/none.png", "What?", code=2))
        text_only = os.path.join(serving.SOURCE, "models/default.gguf")
        self.assertIn("reads text only", self.freshet("run", text_only, "--chat-template", serving.TEMPLATE,
                                                      "--image", "/none.png", "What?", code=2))


class TextOnly(unittest.TestCase):
    def test_models_that_read_text_say_so(self):
        server = serving.Server("--disable-access-log")
        try:
            for path, body in (
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [picture(data_url(png()))]}]}),
                    ("/v1/responses", {"input": [{"role": "user", "content": [
                        {"type": "input_image", "image_url": data_url(png())}]}]})):
                status, reply = server.post(path, body)
                self.assertEqual(status, 400)
                self.assertIn("this model reads text only", reply["error"]["message"])
            self.assertEqual(server.get("/props")[1]["modalities"]["vision"], False)
        finally:
            self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[1:]], verbosity=2)
