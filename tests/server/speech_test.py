"""/v1/audio/transcriptions and /translations over HTTP, and `freshet transcribe`, with a seeded Whisper
whose windows are one second long, and what transformers writes for the same sounds.

usage: speech_test.py [Class[.test] ...]    needs FRESHET, FRESHET_SOURCE_DIR and FRESHET_UNPACKED_DATA
"""
import http.client
import json
import os
import re
import struct
import subprocess
import tempfile
import unittest

from serving import FRESHET, PATIENCE, SEEDED, Case, Server

MODEL = os.path.join(SEEDED, "whisper-speech")
FIRST_TIME = 267
BOUNDARY = "7f3a-boundary"


def sound(seed, count):
    """As src/speech/speech_test.cc makes it."""
    samples, state, period, loud = [], seed, 1, 0
    for i in range(count):
        if i % 3200 == 0:
            state = (state * 1103515245 + 12345) % 2**31
            period, loud = 20 + (state >> 16) % 200, 2000 + (state >> 8) % 12000
        state = (state * 1103515245 + 12345) % 2**31
        samples.append((loud if i % period < period // 2 else -loud) + (state >> 16) % 2001 - 1000)
    return samples


def wav(samples, rate=16000):
    data = struct.pack(f"<{len(samples)}h", *samples)
    return (b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt "
            + struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
            + b"data" + struct.pack("<I", len(data)) + data)


def form(fields, file=None):
    body = b""
    for name, value in fields:
        body += (f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n').encode()
    if file is not None:
        body += (f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
                 f"Content-Type: audio/wav\r\n\r\n").encode() + file + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


def text_of(tokens):
    return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")

# Windows are made once: the model has random weights.
ONCE = (("temperature_increment_on_fallback", "0"),)


class Transcriptions(Case):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--reference", model=MODEL, template=None)
        with open(os.path.join(MODEL, "expected.json"), encoding="utf-8") as f:
            cls.cases = json.load(f)

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0

    def post(self, body, path="/v1/audio/transcriptions", kind=f"multipart/form-data; boundary={BOUNDARY}"):
        c = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        c.request("POST", path, body, {"Content-Type": kind})
        r = c.getresponse()
        answer = r.status, r.getheader("Content-Type"), r.read()
        c.close()
        return answer

    def ask(self, *fields, file=None, path="/v1/audio/transcriptions"):
        status, kind, body = self.post(form(fields, file), path)
        self.assertEqual(status, 200, body)
        return json.loads(body) if "json" in kind else body.decode()

    def test_segments_are_those_of_transformers(self):
        for case in (c for c in self.cases if c["timestamps"]):
            fields = [("response_format", "verbose_json"), ("temperature", "0"), ("model", "default"),
                      ("temperature_increment_on_fallback", "0"),
                      ("timestamp_granularities[]", "segment")]
            for name in {"logprob_threshold", "no_speech_threshold"} & case.keys():
                fields.append((name, str(case[name])))
            fields += [("logprob_threshold", "-1000")] * ("logprob_threshold" not in case)
            fields += [("condition_on_previous_text", "true")] * ("condition_on_previous_text" in case)
            fields += [("language", case["language"])] * (case["language"] is not None)
            fields += [("prompt", case["prompt"])] * (case["prompt"] is not None)
            translates = case["task"] == "translate"
            path = "/v1/audio/translations" if translates else "/v1/audio/transcriptions"
            got = self.ask(*fields, file=wav(sound(case["seed"], case["samples"])), path=path)
            self.assertEqual(got["task"], case["task"])
            self.assertEqual(len(got["segments"]), len(case["segments"]))
            for i, (g, w) in enumerate(zip(got["segments"], case["segments"])):
                tokens = w["tokens"]
                if len(tokens) > 2 and min(tokens[-2:]) >= FIRST_TIME:
                    tokens = tokens[:-1]  # the next segment's first
                self.assertEqual(g["tokens"], tokens)
                self.assertAlmostEqual(g["start"], w["start"], places=2)
                self.assertAlmostEqual(g["end"], w["end"], places=2)
                self.assertEqual((g["id"], g["text"]), (i, text_of(tokens)))
            self.assertEqual(got["text"], "".join(s["text"] for s in got["segments"]).strip())
            self.assertAlmostEqual(got["duration"], case["samples"] / 16000, places=3)
            self.assertEqual(got["usage"], {"type": "duration", "seconds": -(-case["samples"] // 16000)})
            if case["language"] is None:
                self.assertEqual(got["language"], {258: "english", 259: "german", 260: "french"}[case["detected"]])

    def test_words_have_times(self):
        file = wav(sound(1, 52000))
        fields = [("language", "en"), ("response_format", "verbose_json"), *ONCE]
        whole = self.ask(*fields, file=file)
        self.assertNotIn("words", whole)
        words = self.ask(*fields, ("timestamp_granularities[]", "word"), file=file)
        self.assertNotIn("segments", words)
        both = self.ask(*fields, ("timestamp_granularities[]", "word"), ("timestamp_granularities[]", "segment"),
                        file=file)
        self.assertEqual(both, {**words, "segments": whole["segments"]})
        # Random weights write bytes that are no characters.
        plain = [re.sub(r"[\s\ufffd]", "", text) for text in ("".join(w["word"] for w in words["words"]), words["text"])]
        self.assertEqual(*plain)
        self.assertGreater(len(plain[0]), 5)
        for word in words["words"]:
            self.assertLessEqual(0, word["start"])
            self.assertLessEqual(word["start"], word["end"])
            self.assertLessEqual(word["end"], words["duration"])

    def test_formats_say_the_same(self):
        case = next(c for c in self.cases if not c["timestamps"] and c["language"])
        file = wav(sound(case["seed"], case["samples"]))
        text = text_of(case["segments"][0]["tokens"]).strip()
        self.assertEqual(self.ask(("language", case["language"]), *ONCE, file=file)["text"], text)
        self.assertEqual(self.ask(("language", "French"), ("response_format", "text"), *ONCE, file=file), text + "\n")
        srt = self.ask(("response_format", "srt"), file=wav(sound(1, 20000)))
        vtt = self.ask(("response_format", "vtt"), file=wav(sound(1, 20000)))
        self.assertRegex(srt, r"^1\n00:00:0\d,\d{3} --> 00:00:0\d,\d{3}\n")
        self.assertEqual(vtt.split("\n")[0], "WEBVTT")
        self.assertEqual(srt.count("-->"), vtt.count("-->"))

    def test_a_sound_is_encoded_once_for_each_key(self):
        file = wav(sound(77, 9000))
        server = Server("--reference", "--api-key", "a", "--api-key", "b", model=MODEL, template=None)
        try:
            hits = []
            for key in ("a", "b", "a"):
                headers = {"Authorization": f"Bearer {key}"}
                status, _, answer = server.request(
                    "POST", "/v1/audio/transcriptions", form([("language", "en"), *ONCE], file),
                    {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", **headers})
                self.assertEqual(status, 200, answer)
                lines = server.request("GET", "/metrics", headers=headers)[2].decode().split("\n")
                hits.append([next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
                             for name in ("vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total",
                                          "freshet:encoder_cache_hits_total")])
            self.assertEqual(hits, [[1, 0, 0], [2, 0, 0], [3, 1, 1]])
        finally:
            server.stop()

    def test_a_stream_adds_up(self):
        for seed, count in ((4, 12000), (1, 52000)):
            file = wav(sound(seed, count))
            whole = self.ask(("language", "en"), *ONCE, file=file)["text"]
            events = self.ask(("language", "en"), ("stream", "true"), file=file)
            events = [json.loads(e[6:]) for e in events.split("\n\n") if e]
            self.assertEqual({e["type"] for e in events[:-1]}, {"transcript.text.delta"})
            self.assertEqual(events[-1]["type"], "transcript.text.done")
            self.assertEqual(events[-1]["text"], whole)
            self.assertEqual("".join(e["delta"] for e in events[:-1]).strip(), whole)

    def test_unlikely_windows_are_made_again(self):
        file = wav(sound(1, 12000))
        fields = [("language", "en"), ("response_format", "verbose_json")]
        got = self.ask(*fields, file=file)
        self.assertEqual({s["temperature"] for s in got["segments"]}, {1.0})  # no text of this model is likely
        self.assertEqual(self.ask(*fields, file=file), got)  # repeatable
        self.assertEqual({s["temperature"] for s in self.ask(*fields, *ONCE, file=file)["segments"]}, {0.0})
        tried = self.ask(*fields, ("temperature_increment_on_fallback", "0.5"), file=file)
        self.assertEqual({s["temperature"] for s in tried["segments"]}, {1.0})
        skipped = self.ask(*fields, ("no_speech_threshold", "0"), file=file)
        self.assertEqual((skipped["segments"], skipped["text"]), ([], ""))

    def test_other_rates_are_resampled(self):
        samples = sound(1, 8000)
        got = self.ask(("response_format", "verbose_json"), file=wav(samples, 8000))
        self.assertAlmostEqual(got["duration"], 1.0, places=3)

    def refused(self, part, *fields, file=wav([0] * 1600), status=400, path="/v1/audio/transcriptions"):
        got, _, body = self.post(form(fields, file), path)
        message = json.loads(body)["error"]["message"]
        self.assertEqual(got, status, message)
        self.assertIn(part, message)
        self.assertNotIn("\n", message)

    def test_wrong_requests_are_refused_in_one_line(self):
        self.refused("'file' is missing", file=None)
        self.refused("'file' is missing", file=b"")
        self.refused("no WAV or FLAC", file=b"hello, this is text")
        self.refused("MP3", file=b"ID3" + bytes(100))
        self.refused("holds no sound", file=wav([]))
        self.refused("'language'", ("language", "klingon"))
        self.refused("'language'", ("language", "it"))  # known, but not to this model
        self.refused("'response_format'", ("response_format", "xml"))
        self.refused("'temperature'", ("temperature", "2"))
        self.refused("'temperature'", ("temperature", "warm"))
        self.refused("'logprob_threshold'", ("logprob_threshold", "1"))
        self.refused("'no_speech_threshold'", ("no_speech_threshold", "loud"))
        self.refused("must be 0 or from 0.05", ("temperature_increment_on_fallback", "0.001"))
        self.refused("'condition_on_previous_text'", ("condition_on_previous_text", "maybe"))
        self.refused("'stream'", ("stream", "true"), ("logprob_threshold", "-1"))
        self.refused("word or segment", ("response_format", "verbose_json"), ("timestamp_granularities[]", "letter"))
        self.refused("verbose_json", ("timestamp_granularities[]", "segment"))
        self.refused("'stream'", ("stream", "true"), ("response_format", "srt"))
        self.refused("'stream'", ("stream", "maybe"))
        self.refused("more than once", ("language", "en"), ("language", "en"))
        self.refused("'include'", ("include[]", "logprobs"))
        self.refused("chunking_strategy", ("chunking_strategy", '{"type": "server_vad"}'))
        self.refused("does not exist", ("model", "another"), status=404)
        self.refused("25 MiB", file=bytes((25 << 20) + 1))

    def test_bodies_that_are_no_form(self):
        good = form([("language", "en")], wav([0] * 1600))
        for body, kind in ((b"{}", "application/json"), (good, "multipart/form-data"),
                           (good, "multipart/form-data; boundary=other"),
                           (good[:-20], f"multipart/form-data; boundary={BOUNDARY}"),
                           (b"", f"multipart/form-data; boundary={BOUNDARY}")):
            status, _, answer = self.post(body, kind=kind)
            self.assertEqual(status, 400, kind)
            self.assertIn("multipart/form-data", json.loads(answer)["error"]["message"])

    def test_text_routes_name_the_right_one(self):
        status, _, body = self.post(json.dumps({"prompt": "Hello"}), "/v1/completions", "application/json")
        self.assertEqual(status, 400)
        self.assertIn("/v1/audio/transcriptions", json.loads(body)["error"]["message"])


class OtherModels(Case):
    def test_a_model_that_reads_text_has_no_ears(self):
        server = Server()
        try:
            c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
            c.request("POST", "/v1/audio/transcriptions", form([], wav([0] * 100)),
                      {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"})
            r = c.getresponse()
            self.assertEqual(r.status, 400)
            self.assertIn("reads no sound", json.loads(r.read())["error"]["message"])
            c.close()
        finally:
            self.assertEqual(server.stop(), 0)


class Command(Case):
    def run_with(self, *arguments, code=0):
        done = subprocess.run([FRESHET, "transcribe", *arguments, "--reference"], capture_output=True, text=True, timeout=PATIENCE)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def test_transcribe(self):
        with open(os.path.join(MODEL, "expected.json"), encoding="utf-8") as f:
            case = json.load(f)[0]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a.wav")
            with open(path, "wb") as f:
                f.write(wav(sound(case["seed"], case["samples"])))
            once = ("--temperature-increment-on-fallback", "0")
            text = self.run_with(MODEL, path, "--language", "en", *once).stdout
            self.assertEqual(text.strip(), "".join(text_of(s["tokens"]) for s in case["segments"]).strip())
            whole = json.loads(self.run_with(MODEL, path, "-l", "english", "-f", "verbose_json", *once).stdout)
            self.assertEqual(len(whole["segments"]), len(case["segments"]))
            again = [self.run_with(MODEL, path, "-l", "en", "--condition-on-previous-text").stdout for _ in range(2)]
            self.assertEqual(again[0], again[1])
            self.assertNotEqual(again[0], text)
            self.assertIn("--logprob-threshold", self.run_with(MODEL, path, "--logprob-threshold", "1", code=2).stderr)
            self.assertIn("-->", self.run_with(MODEL, path, "-f", "vtt").stdout)
            self.assertIn("--language", self.run_with(MODEL, path, "-l", "it", code=2).stderr)
            with open(path, "wb") as f:
                f.write(b"RIFF")
            self.assertIn("a.wav", self.run_with(MODEL, path, code=2).stderr)


if __name__ == "__main__":
    unittest.main()
