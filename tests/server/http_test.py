"""`freshet serve` over plain HTTP: keys, TLS, CORS, errors, llama-server's routes, metrics, signals.

usage: http_test.py [Class[.test] ...]    needs FRESHET and FRESHET_SOURCE_DIR
"""
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import unittest

from serving import BackgroundStream, Case, FRESHET, GOLDEN, PATIENCE, Server, SOURCE, TEMPLATE, until


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


class Keys(Case):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        path = os.path.join(cls.folder.name, "keys")
        with open(path, "w", encoding="ascii") as f:
            f.write("from-file\r\n\nsecond-line\n")
        cls.flags = ("--api-key", "from-flag", "--api-key-file", path)
        cls.options = {"env": {"FRESHET_API_KEY": "from-environment"}}
        super().setUpClass()

    def test_every_source(self):
        for key in ("from-flag", "from-file", "second-line", "from-environment"):
            self.assertEqual(self.server.get("/v1/models", headers=bearer(key))[0], 200, key)
            self.assertEqual(self.server.get("/v1/models", headers={"X-Api-Key": key})[0], 200)

    def test_wrong_keys(self):
        for headers in ({}, bearer(""), bearer("from-fla"), bearer("from-flag "), bearer("From-Flag"),
                        {"Authorization": "Basic from-flag"}, {"Authorization": "from-flag"}):
            answer = self.server.get("/v1/models", headers=headers)
            if headers == bearer("from-flag "):  # trailing white space is not part of a value
                self.assertEqual(answer[0], 200)
                continue
            self.assert_error(answer, 401)

    def test_every_route_but_two(self):
        for method, path in (("GET", "/v1/models"), ("GET", "/v1/models/x"), ("GET", "/metrics"),
                             ("GET", "/v1/metrics"), ("GET", "/props"), ("GET", "/slots"),
                             ("GET", "/version"), ("GET", "/nothing"), ("POST", "/infill"),
                             ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
                             ("POST", "/v1/embeddings"), ("POST", "/v1/rerank"), ("POST", "/v2/rerank"), ("POST", "/rerank"),
                             ("POST", "/v1/score"), ("POST", "/score"), ("POST", "/classify"),
                             ("POST", "/v1/classify"), ("POST", "/v1/generate"), ("POST", "/v1/responses"),
                             ("POST", "/completion"), ("POST", "/tokenize"),
                             ("POST", "/detokenize"), ("POST", "/apply-template")):
            status, headers, _ = self.server.request(method, path, b"{" if method == "POST" else None)
            self.assertEqual(status, 401, path)
            self.assertEqual(headers["www-authenticate"], "Bearer")
        for path in ("/health", "/ping", "/ready"):
            self.assertEqual(self.server.get(path)[0], 200)

    def test_tenants_share_no_cache(self):
        prompt = "A secret that the first tenant holds. " * 20
        ask = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        cached = []
        for key in ("from-flag", "from-flag", "from-file"):
            _, answer = self.server.post("/v1/completions", ask, headers=bearer(key))
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        self.assertEqual((cached[0], cached[2]), (0, 0))
        self.assertGreater(cached[1], 50)

    def test_keys_stay_out_of_the_log(self):
        self.server.get("/v1/models", headers=bearer("from-flag"))
        self.assertNotIn("from-flag", self.server.log())


class Tls(Case):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.certificate, key = (os.path.join(folder.name, n) for n in ("cert.pem", "key.pem"))
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                        "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key, "-out",
                        cls.certificate, "-days", "2", "-subj", "/CN=localhost", "-addext",
                        "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
        cls.flags = ("--ssl-certfile", cls.certificate, "--ssl-keyfile", key)
        super().setUpClass()

    def test_verified_client(self):
        context = ssl.create_default_context(cafile=self.certificate)
        connection = self.server.connect(context=context)
        for _ in range(3):  # keep-alive
            connection.request("GET", "/health")
            self.assertEqual(json.load(connection.getresponse()), {"status": "healthy"})
        connection.close()

    def test_stream(self):
        ids = BackgroundStream.alone(self.server, {"max_tokens": 100})
        self.assertEqual(len(ids), 100)

    def test_old_versions_are_refused(self):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        with self.assertRaises((ssl.SSLError, ConnectionError)):
            self.server.connect(context=context).request("GET", "/health")

    def test_plain_text_is_refused(self):
        self.assertNotIn(b"200 OK", self.server.raw(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
        self.assertEqual(self.server.get("/health")[0], 200)

    def test_client_that_leaves(self):
        connection = self.server.connect()
        connection.request("POST", "/v1/completions", json.dumps(
            {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}))
        answer = connection.getresponse()
        answer.readline()
        answer.close()
        connection.close()
        self.assertTrue(self.server.becomes_idle())
        self.assertLess(self.server.metric("vllm:generation_tokens_total"), 1900)

    def test_bad_files(self):
        for flags, words in ((("--ssl-certfile", self.certificate), "both"),
                             (("--ssl-certfile", TEMPLATE, "--ssl-keyfile", TEMPLATE),
                              "certificate")):
            with self.assertRaisesRegex(RuntimeError, words):
                Server(*flags)


class Cors(Case):
    flags = ("--allowed-origins", "https://page.example")

    def test_allowed(self):
        _, headers, _ = self.server.request("GET", "/health", headers={
            "Origin": "https://page.example"})
        self.assertEqual(headers["access-control-allow-origin"], "https://page.example")
        self.assertEqual(headers["vary"], "Origin")

    def test_others_are_not(self):
        for origin in ("https://page.example.evil", "http://page.example", "null"):
            _, headers, _ = self.server.request("GET", "/health", headers={"Origin": origin})
            self.assertNotIn("access-control-allow-origin", headers)

    def test_preflight(self):
        status, headers, body = self.server.request("OPTIONS", "/v1/chat/completions", headers={
            "Origin": "https://page.example", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"})
        self.assertEqual((status, body), (204, b""))
        self.assertIn("POST", headers["access-control-allow-methods"])
        for name in ("authorization", "content-type", "x-stainless-os"):
            self.assertIn(name, headers["access-control-allow-headers"])

    def test_streams_and_errors_carry_it(self):
        for body in ({"prompt": "a", "max_tokens": 2, "stream": True}, {"prompt": 3}):
            _, headers, _ = self.server.request("POST", "/v1/completions", body, headers={
                "Origin": "https://page.example"})
            self.assertEqual(headers["access-control-allow-origin"], "https://page.example")


class Targets(Case):
    """The request target, i.e. the second word of the request line (RFC 9112, section 3.2)."""
    LAST = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

    def answers(self, target, host=b"Host: elsewhere:1\r\n", version=b"HTTP/1.1"):
        """The status codes of a request for this target and of one after it on the same
        connection."""
        head = b"GET " + target + b" " + version + b"\r\n" + host + b"\r\n"
        out = self.server.raw(head + self.LAST)
        return [int(s) for s in re.findall(rb"HTTP/1\.1 (\d+) ", out)], out

    def test_absolute_form(self):
        for target in (self.server.url + "/version", "HTTP://LOCALHOST/version",
                       "http://[::1]:80/version", "http://a.example:/v%65rsion?a=http://b/"):
            got, out = self.answers(target.encode())
            self.assertEqual(got, [200, 200], (target, out))
            self.assertIn(b'{"version":', out)
        got, out = self.answers(b"http://a/version", host=b"", version=b"HTTP/1.0")
        self.assertEqual(got, [200])  # an HTTP/1.0 connection ends here

    def test_absolute_form_through_a_client(self):
        """Requests in the form that http.client sends to a proxy; with a body, and with the paths
        of every route."""
        for method, path, body in (("GET", "/v1/models", None), ("GET", "/", None),
                                   ("POST", "/tokenize", {"prompt": "abc"})):
            plain = self.server.request(method, path, body)
            whole = self.server.request(method, self.server.url + path, body)
            self.assertEqual((whole[0], whole[2]), (plain[0], plain[2]))
            self.assertEqual(whole[0], 200)
        status, _, _ = self.server.request("GET", self.server.url)  # no path: the page
        self.assertEqual(status, 200)

    def test_log_and_metrics_have_the_path(self):
        self.server.request("GET", self.server.url + "/version?a=b",
                            headers={"X-Request-Id": "whole"})
        paths = [line["path"] for line in self.server.logged("whole") if line["id"] == "whole"]
        self.assertEqual(paths, ["/version"])
        self.assertNotIn(self.server.url, str(self.server.metrics()))

    def test_others_are_refused(self):
        for target in (b"http://me@a/version", b"http://me:word@a/version", b"http://a/version#x",
                       b"http://a#x", b"/version#x", b"https://a/version", b"ftp://a/version",
                       b"file:///version", b"http:///version", b"http://:80/version", b"http:/version",
                       b"http://a:b/version", b"http://a:65536/version", b"http://[::1/version",
                       b"http://a%/version", b"http://a/%zz", b"http://a/%00", b"//[",
                       b"a/version", b"*", b"a:80"):
            got, out = self.answers(target)
            if target == b"//[":  # a valid path, though unusual
                self.assertEqual(got, [404, 200])
                continue
            self.assertEqual(got, [400], (target, out))
            self.assertIn(b"Connection: close", out)

    def test_host_is_needed_all_the_same(self):
        for host in (b"", b"Host: a\r\nHost: a\r\n", b"Host: a b\r\n", b"Host: me@a\r\n",
                     b"Host: a/b\r\n", b"Host: a:b\r\n"):
            for target in (b"http://a/version", b"/version"):
                self.assertEqual(self.answers(target, host)[0], [400], (target, host))
        for host in (b"Host:\r\n", b"Host: a_b.c-d:080\r\n", b"Host: [fe80::1]:1\r\n"):
            self.assertEqual(self.answers(b"/version", host)[0], [200, 200], host)


class Errors(Case):
    def test_shapes(self):
        post = self.server.post
        self.assert_error(self.server.get("/nothing"), 404, words="/nothing")
        self.assert_error(self.server.get("/v1/completions"), 405, words="GET")
        for method, path, allowed in (("GET", "/v1/completions", "POST, OPTIONS"),
                                      ("PUT", "/health", "GET, HEAD, OPTIONS")):
            self.assertEqual(self.server.request(method, path)[1]["allow"], allowed)
        self.assert_error(post("/v1/completions", "{"), 400, words="JSON")
        self.assert_error(post("/v1/completions", "[]"), 400)
        self.assert_error(post("/v1/completions", {}), 400, "prompt")
        self.assert_error(post("/v1/completions", {"prompt": []}), 400, "prompt")
        self.assert_error(post("/v1/completions", {"prompt": "a", "model": "b"}), 404, "model", "'b'")
        self.assert_error(post("/v1/chat/completions", {"messages": []}), 400, "messages")
        self.assert_error(post("/v1/chat/completions", {"messages": [{"content": "a"}]}), 400,
                          "messages[0]")

    def test_every_number_is_checked(self):
        for name, wrong in (("temperature", -1), ("temperature", "1"), ("top_p", 0), ("top_p", 1.5),
                            ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("n", 0), ("n", 10**9),
                            ("max_tokens", "1"), ("max_tokens", -1), ("max_tokens", 1e30),
                            ("presence_penalty", 3), ("frequency_penalty", -3),
                            ("repetition_penalty", 0), ("seed", "x"), ("seed", 1.5),
                            ("logprobs", 1000), ("min_tokens", -1), ("stop", [""]), ("stop", 3),
                            ("logit_bias", {"x": 1}), ("logit_bias", {"1": 1000}),
                            ("stop_token_ids", [-1]), ("priority", 1.5), ("stream", "yes"),
                            ("truncate_prompt_tokens", 0), ("timeout", -1)):
            answer = self.server.post("/v1/completions", {"prompt": "a", name: wrong})
            self.assert_error(answer, 400, name)

    def test_what_is_not_done_is_refused(self):
        for name, value in (("prompt_embeds", "AAAA"), ("functions", [{"name": "f"}]),
                            ("logits_processors", ["x"])):
            for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {
                    "messages": [{"role": "user", "content": "a"}]})):
                self.assert_error(self.server.post(path, dict(body, **{name: value})), 400, name)
        self.complete(prompt="a", max_tokens=1, bad_words=[], allowed_token_ids=None)
        self.assert_error(self.server.post("/v1/completions", {
            "prompt": "a", "stream": True, "prompt_logprobs": 1}), 400, "prompt_logprobs")
        for name, value in (("logprobs", 1), ("logit_bias", {"1": 1}), ("min_tokens", 1),
                            ("repetition_penalty", 1.1), ("presence_penalty", 1),
                            ("frequency_penalty", 1)):
            answer = self.server.post("/v1/completions", {
                "prompt": "a", "n": 2, "use_beam_search": True, name: value})
            self.assert_error(answer, 400, name, f"{name} and beam search")

    def test_out_of_the_vocabulary(self):
        for name, value in (("prompt", [10**8]), ("logit_bias", {str(10**8): 1}),
                            ("stop_token_ids", [10**8])):
            answer = self.server.post("/v1/completions", {"prompt": "a", name: value})
            self.assert_error(answer, 400, name)

    def test_what_the_engine_refuses(self):
        """Errors use the client's name of the field."""
        word, chat = "word " * 5000, [{"role": "user", "content": "a"}]
        for name, body in (
                ("prompt", {"prompt": ["a", word]}), ("prompt", {"prompt": "word " * 2000000}),
                ("messages", {"messages": [{"role": "user", "content": word}]}),
                ("input", {"input": word}), ("min_tokens", {"prompt": "a", "min_tokens": 17}),
                ("min_tokens", {"messages": chat, "max_tokens": 5, "min_tokens": 6}),
                ("n", {"prompt": "a", "n": 100, "use_beam_search": True}),
                ("response_format", {"prompt": "a", "use_beam_search": True, "n": 2,
                                     "response_format": {"type": "json_object"}})):
            path = ("/v1/embeddings" if "input" in body else
                    "/v1/completions" if "prompt" in body else "/v1/chat/completions")
            self.assert_error(self.server.post(path, body), 400, name)

    def test_too_long(self):
        answer = self.server.post("/v1/completions", {"prompt": "word " * 5000})
        self.assertEqual(answer[0], 400)
        self.assertIn("2048", answer[1]["error"]["message"])
        cut = self.server.post("/v1/completions", {
            "prompt": "word " * 5000, "truncate_prompt_tokens": 10, "max_tokens": 1})
        self.assertEqual(cut[1]["usage"]["prompt_tokens"], 10)
        for wrong in (0, -2, 1.5, "1", 1 << 31):
            self.assert_error(self.server.post("/v1/completions", {
                "prompt": "a", "truncate_prompt_tokens": wrong}), 400, "truncate_prompt_tokens", "-1")
        for limit, kept in (({}, 2047), ({"max_tokens": 8}, 2040), ({"max_tokens": 10**6}, 2047)):
            cut = self.server.post("/v1/completions", {
                "prompt": "word " * 5000, "truncate_prompt_tokens": -1, **limit})
            self.assertEqual(cut[1]["usage"]["prompt_tokens"], kept, limit)

    def test_timeout(self):
        status, answer = self.server.post("/v1/completions", {
            "prompt": "a", "max_tokens": 2000, "n": 16, "ignore_eos": True, "timeout": 0.2})
        self.assertEqual(status, 200)
        self.assertEqual(answer["choices"][0]["finish_reason"], "abort")
        self.assertLess(answer["usage"]["completion_tokens"], 16 * 2000)

    def test_request_ids(self):
        _, headers, _ = self.server.request("GET", "/version", headers={
            "X-Request-Id": "mine-1", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})
        self.assertEqual(headers["x-request-id"], "mine-1")
        ids = {self.server.request("GET", "/version")[1]["x-request-id"] for _ in range(3)}
        self.assertEqual(len(ids), 3)
        line = next(e for e in self.server.logged("mine-1") if e["id"] == "mine-1")
        self.assertEqual((line["method"], line["path"], line["status"]), ("GET", "/version", 200))
        self.assertTrue(line["traceparent"].startswith("00-aaaa"))

    def test_head(self):
        status, headers, body = self.server.request("HEAD", "/version")
        self.assertEqual((status, body), (200, b""))
        self.assertGreater(int(headers["content-length"]), 0)


class Refusals(Case):
    """A queue with room for one request."""
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1")

    def fill_the_queue(self):
        """One long request runs and one waits. Tries again if a busy machine lets the first one end
        before the second one arrives."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            running = BackgroundStream(self.server, {"max_tokens": 2000})
            running.start()
            running.begun.wait(PATIENCE)
            waiting = BackgroundStream(self.server, {"max_tokens": 2})
            waiting.start()
            while running.is_alive():
                if self.server.metric("vllm:num_requests_waiting") >= 1:
                    return running, waiting
                time.sleep(0.01)
            waiting.join(PATIENCE)
        self.fail("no request ever waited")

    def test_429(self):
        running, waiting = self.fill_the_queue()
        before = self.server.metric("freshet:requests_refused_total")
        status, headers, body = self.server.request("POST", "/v1/completions", {"prompt": "a"})
        self.assert_error((status, json.loads(body)), 429)
        self.assertGreaterEqual(int(headers["retry-after"]), 1)
        self.assertEqual(json.loads(body)["error"]["type"], "rate_limit_error")
        status, _, _ = self.server.request("POST", "/v1/embeddings", {"input": "a"})
        self.assertEqual(status, 429)
        self.assertEqual(self.server.metric("freshet:requests_refused_total") - before, 2)
        running.join(PATIENCE)
        waiting.join(PATIENCE)
        self.assertIsNone(running.error or waiting.error)
        self.assertEqual((len(running.ids), len(waiting.ids)), (2000, 2))


class Acceptance(Case):
    """Requests choose how their drafts are accepted, where there is a drafter."""
    flags = ("--speculative-config", '{"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 3}')

    def ids(self, server, **fields):
        status, body = server.post("/v1/completions", {"prompt": "Once upon", "max_tokens": 40, "seed": 1,
                                                       "return_token_ids": True, **fields})
        self.assertEqual(status, 200, body)
        return body["choices"][0]["token_ids"]

    def test_rules(self):
        plain = self.ids(self.server)
        self.assertEqual(self.ids(self.server, rejection_sample_method="match"), plain)
        for rule in ("rejection", "standard", "block", "typical"):
            ids = self.ids(self.server, rejection_sample_method=rule)
            self.assertNotEqual(ids, plain, rule)
            self.assertEqual(self.ids(self.server, rejection_sample_method=rule), ids, rule)
            self.assertEqual(self.ids(self.server, rejection_sample_method=rule, temperature=0),
                             self.ids(self.server, temperature=0), rule)
        status, body = self.server.post("/completion", {"prompt": "Once upon", "n_predict": 5,
                                                        "rejection_sample_method": "block"})
        self.assertEqual(status, 200, body)

    def test_wrong_rules(self):
        for rule in ("greedy", "synthetic", 3):
            answer = self.server.post("/v1/completions", {"prompt": "a", "rejection_sample_method": rule})
            self.assert_error(answer, 400, "rejection_sample_method")
            answer = self.server.post("/completion", {"prompt": "a", "rejection_sample_method": rule})
            self.assertEqual(answer[0], 400)

    def test_without_a_drafter(self):
        server = Server()
        self.addCleanup(server.stop)
        answer = server.post("/v1/completions", {"prompt": "a", "rejection_sample_method": "block"})
        self.assert_error(answer, 400, "rejection_sample_method")
        self.assertIn("--speculative-config", answer[1]["error"]["message"])


class Routes(Case):
    def test_service(self):
        self.assertEqual(self.server.get("/health"), (200, {"status": "healthy"}))
        self.assertEqual(self.server.get("/ping")[0], 200)
        self.assertEqual(self.server.get("/ready")[0], 200)
        self.assertRegex(self.server.get("/version")[1]["version"], r"^\d+\.\d+")

    def test_generate(self):
        _, answer = self.server.post("/v1/generate", {"prompt": "Once upon", "max_tokens": 5,
                                                      "ignore_eos": True})
        self.assertEqual(answer["tokens_generated"], 5)
        self.assertGreater(answer["latency_ms"], 0)
        self.assertAlmostEqual(answer["tokens_per_second"], 5000 / answer["latency_ms"], delta=1)
        long = self.server.post("/v1/generate", {"prompt": "Once", "ignore_eos": True})[1]
        self.assertEqual(long["tokens_generated"], 100)
        numbers = self.server.get("/v1/metrics")[1]
        self.assertEqual(set(numbers), {"total_requests", "total_tokens", "avg_latency_ms",
                                        "avg_tokens_per_second", "avg_batch_size"})
        self.assertGreaterEqual(numbers["total_tokens"], 105)

    def test_tokenize_round_trip(self):
        text = "A line,\nan emoji \U0001f600 and ünïcode"
        _, answer = self.server.post("/tokenize", {"prompt": text, "add_special_tokens": False,
                                                   "return_token_strs": True})
        self.assertEqual(answer["count"], len(answer["tokens"]))
        self.assertEqual(len(answer["token_strs"]), answer["count"])
        _, back = self.server.post("/detokenize", {"tokens": answer["tokens"]})
        self.assertEqual(back["prompt"], text)
        self.assert_error(self.server.post("/detokenize", {"tokens": [10**8]}), 400, "tokens")
        self.assertEqual(self.server.post("/tokenize", {"prompt": ""})[1]["count"], 0)
        self.assert_error(self.server.post("/tokenize", {"prompt": "word " * 2000000}), 400,
                          "prompt")

    def test_what_templates_read(self):
        """vLLM's fields next to chat_template_kwargs, which take precedence."""
        def prompt(**fields):
            return self.server.post("/tokenize", {
                "messages": [{"role": "user", "content": "Hi"}], **fields})[1]["tokens"]
        for name, value in (("reasoning_effort", "high"), ("documents", [{"text": "A fact."}])):
            found = prompt(**{name: value})
            self.assertEqual(found, prompt(chat_template_kwargs={name: value}))
            self.assertNotEqual(found, prompt())
            self.assertEqual(prompt(**{name: value}, chat_template_kwargs={name: None}), prompt())
        self.assert_error(self.server.post("/v1/chat/completions", {
            "messages": [{"role": "user", "content": "Hi"}], "documents": "x"}), 400, "documents")

    def test_llama_completion(self):
        plain = self.complete(prompt="Once upon a time", max_tokens=8, temperature=0,
                              return_token_ids=True)
        _, answer = self.server.post("/completion", {
            "prompt": "Once upon a time", "n_predict": 8, "temperature": 0, "return_tokens": True})
        self.assertEqual(answer["content"], plain["text"])
        self.assertEqual(answer["tokens"], plain["token_ids"])
        self.assertEqual((answer["stop"], answer["stop_type"]), (True, "limit"))
        self.assertEqual(answer["tokens_predicted"], 8)
        timings = answer["timings"]
        for what, count in (("prompt", answer["tokens_evaluated"] - timings["cache_n"]),
                            ("predicted", 8)):
            self.assertEqual(timings[what + "_n"], count)
            self.assertGreater(timings[what + "_ms"], 0)
            rate = 1000 * count / timings[what + "_ms"]
            self.assertAlmostEqual(timings[what + "_per_second"], rate, delta=rate / 1e6)
            self.assertAlmostEqual(timings[what + "_per_token_ms"] * rate, 1000 if count else 0, places=3)
        self.assertAlmostEqual(timings["prompt_ms"] + timings["predicted_ms"], timings["total_ms"],
                               places=3)

    def test_llama_prompt_only(self):
        """Puts the prompt into the cache, as editors do ahead of time."""
        prompt = "Once upon a time, in a small house at the edge of a wood, lived a fox."
        for stream in (False, True):
            status, _, data = self.server.request("POST", "/completion", {
                "prompt": prompt, "n_predict": 0, "stream": stream})
            self.assertEqual(status, 200, data)
            answer = json.loads(data.strip().split(b"\n\n")[-1].removeprefix(b"data: "))
            self.assertEqual((answer["content"], answer["tokens_predicted"]), ("", 0))
            self.assertEqual((answer["stop"], answer["stop_type"]), (True, "limit"))
        self.assertGreater(answer["tokens_cached"], 0)

    def test_llama_stream(self):
        _, _, data = self.server.request("POST", "/completion", {
            "prompt": "Once", "n_predict": 8, "temperature": 0, "stream": True})
        events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line]
        whole = self.server.post("/completion", {"prompt": "Once", "n_predict": 8,
                                                 "temperature": 0})[1]["content"]
        self.assertEqual("".join(e["content"] for e in events), whole)
        self.assertEqual([e["stop"] for e in events], [False] * (len(events) - 1) + [True])

    def test_llama_grammar(self):
        """llama-server's names for structured output."""
        _, answer = self.server.post("/completion", {"prompt": "a", "n_predict": 20,
                                                     "grammar": 'root ::= "x" [0-9]+ "y"'})
        self.assertRegex(answer["content"], r"\Ax\d+(y\Z)?")
        _, answer = self.server.post("/completion", {
            "prompt": "a", "n_predict": 50, "json_schema": {"type": "integer", "minimum": 5,
                                                            "maximum": 7}})
        self.assertIn(json.loads(answer["content"]), (5, 6, 7))

    def test_llama_bias(self):
        def ids(**fields):
            status, answer = self.server.post("/completion", {
                "prompt": "Once upon a time", "n_predict": 4, "temperature": 0,
                "return_tokens": True, **fields})
            self.assertEqual(status, 200, answer)
            return answer["tokens"]
        plain = ids(n_probs=0, mirostat=0)
        self.assertEqual(ids(logit_bias=[[77, 100]]), [77] * 4)
        self.assertEqual(ids(logit_bias={"77": 100}), [77] * 4)
        self.assertNotEqual(ids(logit_bias=[[plain[0], False]])[0], plain[0])
        bias = {str(i): -100 for i in self.server.post("/tokenize", {"content": "the"})[1]["tokens"]}
        for form in ([["the", False]], {"the": -100}, [["the", -100.0]]):
            self.assertEqual(ids(logit_bias=form), ids(logit_bias=bias), form)
        for name, value in (("logit_bias", [["the", 1, 2]]), ("logit_bias", [7]), ("n_probs", 300),
                            ("mirostat", 2), ("xtc_probability", 0.5)):
            self.assert_error(self.server.post("/completion", {"prompt": "a", name: value}), 400,
                              name)

    def test_without_v1(self):
        """Routes that llama-server also has without /v1."""
        self.assertEqual(self.server.get("/models"), self.server.get("/v1/models"))
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
        answers = [self.server.post(path, body)[1]["choices"] for path in
                   ("/chat/completions", "/v1/chat/completions")]
        self.assertEqual(*answers)

    def test_streams_are_utf8(self):
        """Some clients, such as Python's requests, would read text without a charset as Latin-1."""
        for path, body in (("/v1/completions", {"prompt": "a", "max_tokens": 2}),
                           ("/completion", {"prompt": "a", "max_tokens": 2}),
                           ("/v1/responses", {"input": "a", "max_output_tokens": 2})):
            _, headers, _ = self.server.request("POST", path, {**body, "stream": True})
            self.assertEqual(headers["content-type"], "text/event-stream; charset=utf-8")

    def test_llama_others(self):
        props = self.server.get("/props")[1]
        self.assertEqual(props["default_generation_settings"]["n_ctx"], 2048)
        self.assertEqual(props["chat_sampling"], {
            "temperature": 0.7, "top_k": 0, "top_p": 0.95, "min_p": 0.05, "typical_p": 1,
            "repetition_penalty": 1})
        with open(TEMPLATE, encoding="utf-8") as f:
            self.assertEqual(props["chat_template"].strip(), f.read().strip())
        self.assertEqual(self.server.get("/slots"), (200, []))
        _, answer = self.server.post("/apply-template", {
            "messages": [{"role": "user", "content": "Hi"}]})
        self.assertEqual(answer["prompt"], "user: Hi\nassistant:")

    def test_infill_needs_tokens(self):
        for body in ({}, {"input_prefix": "a", "input_suffix": "b"}):
            self.assert_error(self.server.post("/infill", body), 501, words="infill")


def byte_level():
    """GPT-2's characters for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in plain}
    for b in range(256):
        if b not in letters:
            letters[b] = chr(256 + len(letters) - len(plain))
    return letters


class CallsInTemplates(unittest.TestCase):
    """Conversations with calls, as OpenAI's client sends them, with the logic of published
    templates: some fail on a null content, others omit the call if it is "", or want arguments as
    text."""
    CALL = {"id": "abcdefghi", "type": "function",
            "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}
    TOOL = {"type": "function", "function": {"name": "get_time", "description": "The time",
                                             "parameters": {"type": "object", "properties": {}}}}

    NOTHING = {name: None for name in ("tool_calls", "function_call", "refusal", "audio", "name",
                                       "annotations", "reasoning", "reasoning_content")}

    def test_each(self):
        for name in ("Qwen-Qwen3-0.6B", "Qwen-QwQ-32B", "openai-gpt-oss-120b", "GLM-4.6", "MiniMax-M2",
                     "unsloth-mistral-Devstral-Small-2507", "meta-llama-Llama-3.1-8B-Instruct",
                     "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
                     "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"):
            server = Server(template=os.path.join(SOURCE, f"tests/data/templates/{name}.jinja"))
            self.addCleanup(server.stop)
            for content in ({"content": None}, {"content": ""}, {}):
                status, answer = server.post("/apply-template", {"tools": [self.TOOL], "messages": [
                    {"role": "user", "content": "When?"},
                    {"role": "assistant", **content, "tool_calls": [self.CALL]},
                    {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_time",
                     "content": "12:00"}]})
                self.assertEqual(status, 200, (name, answer))
                said = answer["prompt"].split("When?")[-1]
                for word in ("get_time", "zone", "UTC", "12:00"):
                    self.assertIn(word, said, (name, content))
                self.assertNotIn("None", said, (name, content))
            prompts = [server.post("/apply-template", {"messages": [
                {"role": "user", "content": "When?"},
                {"role": "assistant", "content": None, "tool_calls": [{**self.CALL, "function": {
                    "name": "get_time", "arguments": arguments}}]},
                {"role": "tool", "tool_call_id": "abcdefghi", "content": "12:00"}]})[1]["prompt"]
                for arguments in ("{}", "")]
            self.assertEqual(*prompts, name)
            prompts = [server.post("/apply-template", {"messages": [
                {"role": "user", "content": "When?"},
                {"role": "assistant", "content": "Now.", **nothing},
                {"role": "user", "content": "Sure?"}]})[1]["prompt"]
                for nothing in ({}, self.NOTHING, {**self.NOTHING, "tool_calls": []})]
            self.assertEqual(prompts, prompts[:1] * 3, name)
            server.stop()


class Infill(Case):
    """A model whose vocabulary is the bytes and the tokens that fill-in-the-middle needs."""
    MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(os.path.join(GOLDEN, name), folder.name)
        vocab = {letter: b for b, letter in byte_level().items()}
        added = [{"id": 256 + i, "content": m, "special": True, "single_word": False,
                  "lstrip": False, "rstrip": False, "normalized": False}
                 for i, m in enumerate(cls.MARKS)]
        with open(os.path.join(folder.name, "tokenizer.json"), "w", encoding="utf-8") as f:
            json.dump({"version": "1.0", "added_tokens": added, "normalizer": None,
                       "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False,
                                         "trim_offsets": True, "use_regex": True},
                       "post_processor": None, "decoder": {"type": "ByteLevel"},
                       "model": {"type": "BPE", "vocab": vocab, "merges": []}}, f)
        cls.options = {"model": folder.name, "template": None}
        super().setUpClass()

    def both(self, ids, **body):
        """/infill must give the same answer as /completion for these ids."""
        options = {"n_predict": 6, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        status, answer = self.server.post("/infill", {**options, **body})
        self.assertEqual(status, 200, answer)
        _, plain = self.server.post("/completion", {**options, "prompt": ids})
        self.assertEqual(answer["tokens_evaluated"], len(ids))
        self.assertEqual(answer["tokens"], plain["tokens"])
        self.assertEqual(answer["content"], plain["content"])

    def test_prompt(self):
        self.both([256, *b"def f(", *b"x", 257, *b"return 1", 258], input_prefix="def f(",
                  prompt="x", input_suffix="return 1")
        self.both([256, *b"a", 257, 258], input_prefix="a", input_suffix="")

    def test_marks_in_texts_are_text(self):
        self.both([256, *b"<|fim_suffix|>", 257, *b"b", 258], input_prefix="<|fim_suffix|>",
                  input_suffix="b")

    def test_extras(self):
        self.both([259, *b"myproject\n", 260, *b"a.py\n", *b"A", 260, *b"b.py\n", *b"B",
                   260, *b"filename\n", 256, *b"x", 257, *b"y", 258],
                  input_prefix="x", input_suffix="y",
                  input_extra=[{"filename": "a.py", "text": "A"}, {"filename": "b.py", "text": "B"}])

    def test_what_is_too_long_is_cut(self):
        """Of 512 tokens of context, the end of the prefix and the beginning of the suffix are
        kept."""
        body = {"input_prefix": "p" * 5000 + "end", "input_suffix": "begin" + "s" * 5000,
                "n_predict": 6, "temperature": 0}
        status, answer = self.server.post("/infill", body)
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["tokens_evaluated"] + 6, 512)
        room = 512 - 6 - 3
        self.both([256, *(b"p" * 5000 + b"end")[-(room - room // 4):], 257,
                   *(b"begin" + b"s" * 5000)[:room // 4], 258],
                  input_prefix=body["input_prefix"], input_suffix=body["input_suffix"])

    def test_wrong_fields(self):
        for name, wrong in (("input_prefix", 1), ("input_suffix", None), ("prompt", ["a"]),
                            ("input_extra", "a"), ("input_extra", [{"filename": "a"}])):
            body = {"input_prefix": "a", "input_suffix": "b", name: wrong}
            self.assert_error(self.server.post("/infill", body), 400, name)


class Examples(Case):
    """The examples of docs/serving.md work as written."""

    def test_curl(self):
        if not shutil.which("curl"):
            self.skipTest("there is no curl here")
        with open(os.path.join(SOURCE, "docs/serving.md"), encoding="utf-8") as f:
            blocks = re.findall(r"```sh\n(.*?)```", f.read(), re.DOTALL)
        self.assertGreater(len(blocks), 5)
        for block in blocks:
            done = subprocess.run(["sh", "-c", block.replace("localhost:8000", self.server.url)],
                                  capture_output=True, check=True, timeout=PATIENCE)
            answer = json.loads(done.stdout)
            if "-1}" in block:  # which shows an error
                self.assertEqual(answer["error"]["param"], "temperature")
                continue
            self.assertIsNone(answer.get("error"), block)
            for choice in answer.get("choices", []):
                if "json_schema" in block:
                    self.assertIn("age", json.loads(choice["message"]["content"]))
                elif "tool_choice" in block:
                    self.assertEqual(choice["finish_reason"], "tool_calls")

    def test_flags(self):
        """Every documented flag exists, with the documented default."""
        with open(os.path.join(SOURCE, "docs/serving.md"), encoding="utf-8") as f:
            named = set(re.findall(r"`(--[a-z-]+)", f.read()))
        usage = subprocess.run([FRESHET, "serve", "--help-all"], capture_output=True, text=True,
                               check=True).stdout
        for flag in named:
            self.assertIn(flag + " ", usage.replace(",", " "), flag)


class SamplingDefaults(unittest.TestCase):
    """Settings in the model's generation_config.json apply if a request does not set them."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.model = os.path.join(folder.name, "m")
        shutil.copytree(GOLDEN, self.model)

    def write(self, **config):
        with open(os.path.join(self.model, "generation_config.json"), "w", encoding="ascii") as f:
            json.dump(config, f)

    def answers(self, server, **fields):
        """The number of distinct answers for six seeds."""
        def ids(seed):
            status, answer = server.post("/v1/completions", {
                "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "seed": seed,
                "return_token_ids": True, **fields})
            self.assertEqual(status, 200, answer)
            return tuple(answer["choices"][0]["token_ids"])
        return len({ids(seed) for seed in range(6)})

    def test_requests(self):
        self.write(temperature=0.8, top_k=1, repetition_penalty=1.1, max_length=20, eos_token_id=2)
        server = Server(model=self.model, template=None)
        self.addCleanup(server.stop)
        self.assertIn('{"temperature":0.8,"top_k":1,"repetition_penalty":1.1}', server.log())
        params = server.get("/props")[1]["default_generation_settings"]["params"]
        self.assertEqual(params, {"temperature": 0.8, "top_k": 1, "top_p": 1, "min_p": 0, "typical_p": 1,
                                  "repeat_penalty": 1.1})
        self.assertEqual(self.answers(server), 1)
        self.assertEqual(self.answers(server, top_k=None), 1)
        self.assertEqual(self.answers(server, top_k=0), 6)
        self.assertEqual(self.answers(server, use_beam_search=True), 1)
        chat = server.get("/props")[1]["chat_sampling"]  # what the model leaves out is off
        self.assertEqual((chat["temperature"], chat["top_k"], chat["min_p"]), (0.8, 1, 0))
        self.other_routes("--generation-config", self.model, differ=1)
        self.other_routes(differ=6)
        off = Server("--generation-config", "none", model=self.model, template=None)
        self.addCleanup(off.stop)
        self.assertEqual(self.answers(off), 6)

    def test_models_of_the_catalogue(self):
        """The cached GGUF file recommends nothing itself; the model card does."""
        snapshot = os.path.join(os.path.dirname(self.model), "models--bartowski--SmolLM2-135M-Instruct-GGUF/snapshots/a")
        os.makedirs(snapshot)
        model = os.path.join(snapshot, "m.gguf")
        os.symlink(os.path.abspath(os.path.join(SOURCE, "models/default.gguf")), model)
        for flags, temperature, chat in (((), 0.2, 0.2), (("--generation-config", "none"), 1, 0.7)):
            server = Server(*flags, model=model)
            self.addCleanup(server.stop)
            props = server.get("/props")[1]
            self.assertEqual(props["default_generation_settings"]["params"]["temperature"], temperature)
            self.assertEqual(props["chat_sampling"]["temperature"], chat)

    def other_routes(self, *flags, differ):
        server = Server(*flags, template=None)
        self.addCleanup(server.stop)
        for path, text in (("/completion", "content"), ("/v1/generate", "text")):
            texts = {server.post(path, {"prompt": "Once upon a time", "max_tokens": 8,
                                        "seed": seed})[1][text] for seed in range(6)}
            self.assertEqual(len(texts), differ, path)

    def test_wrong_ones(self):
        for config, says in (({"top_p": 7}, "'top_p'"), ({"temperature": "hot"}, "'temperature'")):
            self.write(**config)
            result = subprocess.run([FRESHET, "serve", self.model, "--port", "0"], timeout=PATIENCE,
                                    capture_output=True, text=True, check=False)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(says, result.stderr)
            self.assertIn("--generation-config none", result.stderr)


class Metrics(Case):
    def test_counts(self):
        before = self.server.metrics()
        self.complete(prompt="Once upon a time", max_tokens=7, ignore_eos=True, n=2)
        after = self.server.metrics()

        def grown(name, labels=""):
            return sum(v - before.get(k, 0) for k, v in after.items()
                       if k.split("{")[0] == name and labels in k)
        self.assertEqual(grown("vllm:generation_tokens_total"), 14)
        self.assertEqual(grown("vllm:request_success_total", 'finished_reason="length"'), 1)
        self.assertEqual(grown("vllm:request_generation_tokens_sum"), 14)
        self.assertEqual(grown("vllm:request_max_num_generation_tokens_sum"), 7)
        self.assertEqual(grown("vllm:request_params_n_sum"), 2)
        self.assertEqual(grown("vllm:request_params_max_tokens_sum"), 7)
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds",
                     "request_queue_time_seconds", "request_prefill_time_seconds",
                     "request_decode_time_seconds", "request_inference_time_seconds",
                     "request_prompt_tokens"):
            self.assertEqual(grown(f"vllm:{name}_count"), 1, name)
        self.assertEqual(after['http_requests_total{model_name="default",engine="0",'
                               'handler="/v1/completions",method="POST",status="200"}'], 1)

    @staticmethod
    def grown(before, after, names):
        """The increase per name; with {labels}, summed over the series that have these labels."""
        return {name: sum(v - before.get(k, 0) for k, v in after.items()
                          if k.split("{")[0] == name.split("{")[0]
                          and name.partition("{")[2].rstrip("}") in k) for name in names}

    def assert_grown(self, before, wanted, server=None):
        """Checks at once: a request is counted before its answer ends, including its last step."""
        self.assertEqual(self.grown(before, (server or self.server).metrics(), wanted), wanted)

    def test_tokens_of_steps(self):
        """Two samples of a prompt: one step for the prompt, which gives two tokens, then six steps
        of two."""
        before = self.server.metrics()
        status, answer = self.server.post("/v1/completions", {
            "prompt": list(range(500, 521)), "max_tokens": 7, "ignore_eos": True, "n": 2})
        self.assertEqual((status, answer["usage"]["prompt_tokens"]), (200, 21))
        wanted = {"vllm:iteration_tokens_total_count": 7, "freshet:steps_total": 7,
                  "vllm:iteration_tokens_total_sum": 21 + 2 + 6 * 2,
                  'vllm:iteration_tokens_total_bucket{le="1"}': 0,
                  'vllm:iteration_tokens_total_bucket{le="8"}': 6,
                  'vllm:iteration_tokens_total_bucket{le="16"}': 6,
                  'vllm:iteration_tokens_total_bucket{le="32"}': 7,
                  'vllm:iteration_tokens_total_bucket{le="+Inf"}': 7}
        self.assert_grown(before, wanted)

    def test_sources_of_prompt_tokens(self):
        """The second time the whole prompt is in the cache, but its last token is computed
        again."""
        names = ["vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total",
                 'vllm:prompt_tokens_by_source_total{source="local_compute"}',
                 'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}',
                 "vllm:prompt_tokens_recomputed_total", "vllm:request_prefill_kv_computed_tokens_sum"]
        for expected in ((32, 0, 32, 0, 0, 32), (32, 31, 1, 32, 1, 1)):
            before = self.server.metrics()
            status, _ = self.server.post("/v1/completions", {
                "prompt": list(range(600, 632)), "max_tokens": 3, "ignore_eos": True})
            self.assertEqual(status, 200)
            wanted = dict(zip(names, expected))
            self.assert_grown(before, wanted)

    def test_buckets(self):
        """The same as in vLLM."""
        tokens = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]  # up to the longest sequence
        latency = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
                   1920, 7680]
        gaps = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
                40, 80]
        expected = {
            "time_to_first_token_seconds": [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
                                            0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560],
            "inter_token_latency_seconds": gaps, "request_time_per_output_token_seconds": gaps,
            "iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
            "request_params_n": [1, 2, 5, 10, 20],
            **{name: latency for name in (
                "e2e_request_latency_seconds", "request_queue_time_seconds",
                "request_prefill_time_seconds", "request_decode_time_seconds",
                "request_inference_time_seconds")},
            **{name: tokens for name in (
                "request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens",
                "request_max_num_generation_tokens", "request_prefill_kv_computed_tokens")}}
        _, _, data = self.server.request("GET", "/metrics")
        for name, bounds in expected.items():
            found = re.findall(rf'^vllm:{name}_bucket{{model_name="default",engine="0",le="(.*?)"}} ',
                               data.decode(), re.MULTILINE)
            self.assertEqual([float(b) for b in found], [*bounds, float("inf")], name)

    def test_layout_of_the_cache(self):
        server = Server("--kv-cache-memory", "8M", "--kv-cache-dtype", "f32",
                        "--max-model-len", "256", "--no-enable-prefix-caching",
                        "--gpu-memory-utilization", "0.5")
        self.addCleanup(server.stop)
        inspect = subprocess.run([FRESHET, "inspect", "--json"], check=True, capture_output=True)
        token_bytes = 2 * json.loads(inspect.stdout)["kv_bytes_per_token_f16"]
        line = next(k for k in server.metrics() if k.startswith("vllm:cache_config_info"))
        labels = dict(re.findall(r'(\w+)="(.*?)"', line))
        blocks = 16 * ((8 << 20) // (256 * token_bytes))  # whole sequences
        self.assertEqual(labels, {
            "engine": "0", "block_size": "16", "cache_dtype": "f32", "enable_prefix_caching": "False",
            "gpu_memory_utilization": "0.5", "num_gpu_blocks": str(blocks),
            "kv_cache_size_tokens": str(16 * blocks), "sliding_window": "None",
            "kv_cache_memory_bytes": str(16 * blocks * token_bytes)})
        self.assertEqual(server.metrics()[line], 1)

    def test_lives_of_blocks(self):
        """Of 16 blocks, four belong to a prompt that comes three times and is then evicted by
        another. The last of the four is recomputed each time, for its last token, so three are
        reused."""
        self.assertNotIn("vllm:kv_block", str(self.server.metrics()))
        server = Server("--kv-cache-metrics", "--kv-cache-metrics-sample", "1", "--kv-cache-memory",
                        "700K", "--max-model-len", "256")
        self.addCleanup(server.stop)
        before = server.metrics()
        begin = time.monotonic()
        for prompt in (*[list(range(500, 564))] * 3, list(range(1000, 1255))):
            status, answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
            self.assertEqual(status, 200, answer)
        wanted = {"vllm:kv_block_lifetime_seconds_count": 4,
                  "vllm:kv_block_idle_before_evict_seconds_count": 4,
                  "vllm:kv_block_reuse_gap_seconds_count": 3,
                  'vllm:kv_block_lifetime_seconds_bucket{le="+Inf"}': 4}
        self.assert_grown(before, wanted, server)
        lived, idle, gaps = (server.metric(f"vllm:kv_block_{n}_seconds_sum")
                             for n in ("lifetime", "idle_before_evict", "reuse_gap"))
        self.assertTrue(0 < idle < lived < 4 * (time.monotonic() - begin), (idle, lived))
        self.assertTrue(0 < gaps < lived - idle, gaps)

    def test_why_requests_wait(self):
        for flags, capacity, deferred in (
                (("--max-num-seqs", "1"), 2, 0),
                (("--batching", "static", "--max-batch-size", "1", "--max-wait-time-ms", "1"), 0, 2)):
            server = Server(*flags)
            self.addCleanup(server.stop)
            first = BackgroundStream(server, {"max_tokens": 1900})
            first.start()
            self.assertTrue(first.begun.wait(PATIENCE))
            others = [BackgroundStream(server, {"max_tokens": 1}) for _ in range(2)]
            for stream in others:
                stream.start()
            wanted = {'vllm:num_requests_waiting_by_reason{reason="capacity"}': capacity,
                      'vllm:num_requests_waiting_by_reason{reason="deferred"}': deferred,
                      "vllm:num_requests_waiting": 2}
            until(lambda: self.grown({}, server.metrics(), wanted) == wanted)  # both have arrived
            self.assert_grown({}, wanted, server)
            for stream in (first, *others):
                stream.join(PATIENCE)
                self.assertEqual((stream.error, len(stream.ids)), (None, stream.body["max_tokens"]))

    def test_preemptions_of_requests(self):
        server = Server("--kv-cache-memory", "6M", "--max-model-len", "2048",
                        "--no-enable-prefix-caching")
        self.addCleanup(server.stop)
        low = {"prompt": list(range(500, 1500)), "max_tokens": 900, "priority": 5}
        alone = BackgroundStream.alone(server, low)
        before = server.metrics()
        stream = BackgroundStream(server, low)
        stream.start()
        self.assertTrue(stream.begun.wait(PATIENCE))
        status, _ = server.post("/v1/completions", {"prompt": list(range(1500, 3300)),
                                                    "max_tokens": 2, "priority": 0})
        self.assertEqual(status, 200)
        stream.join(PATIENCE)
        self.assertEqual((stream.error, stream.ids), (None, alone))
        wanted = {"vllm:num_preemptions_total": 1, "vllm:request_num_preemptions_sum": 1,
                  "vllm:request_num_preemptions_count": 2,
                  'vllm:request_num_preemptions_bucket{le="0"}': 1,
                  'vllm:request_num_preemptions_bucket{le="1"}': 2}
        self.assert_grown(before, wanted, server)

    def test_sleep_state(self):
        after = self.server.metrics()
        for state, value in (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)):
            self.assertEqual(after['vllm:engine_sleep_state{model_name="default",engine="0",'
                                   f'sleep_state="{state}"}}'], value)

    def test_one_stream_is_timed(self):
        BackgroundStream.alone(self.server, {"max_tokens": 20})
        before = self.server.metric("vllm:inter_token_latency_seconds_count")
        BackgroundStream.alone(self.server, {"max_tokens": 20})
        self.assertEqual(self.server.metric("vllm:inter_token_latency_seconds_count") - before, 19)

    def test_unknown_methods_and_paths_do_not_grow_it(self):
        for i in range(30):
            self.server.request("GET", f"/nothing/{i}")
            self.server.raw(f"BREW{i} /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
                            .encode())
        lines = [k for k in self.server.metrics() if k.startswith("http_requests_total")]
        self.assertLess(len(lines), 20, lines)

    def test_promtool(self):
        if not shutil.which("promtool"):
            self.skipTest("there is no promtool here")
        self.complete(prompt="a", max_tokens=3)
        _, headers, data = self.server.request("GET", "/metrics")
        self.assertEqual(headers["content-type"], "text/plain; version=0.0.4; charset=utf-8")
        done = subprocess.run(["promtool", "check", "metrics"], input=data, capture_output=True,
                              check=False)
        # The text parses (else 1). The linter (3) complains only about vLLM's metric names.
        names = re.findall(r"^# TYPE (\S+) ", data.decode(), re.MULTILINE)
        expected = [f"{n} metric names should not contain ':'" for n in names if ":" in n]
        expected.append('vllm:iteration_tokens_total non-counter metrics should not have "_total" '
                        'suffix')
        self.assertGreater(len(expected), 30)
        self.assertEqual(sorted(done.stderr.decode().splitlines()), sorted(expected))
        self.assertEqual((done.stdout, done.returncode), (b"", 3))

    def test_prometheus_scrapes_it(self):
        if not shutil.which("prometheus"):
            self.skipTest("there is no prometheus here")
        self.complete(prompt="a", max_tokens=3)
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "p.yml"), "w", encoding="ascii") as f:
                json.dump({"scrape_configs": [{"job_name": "freshet", "scrape_interval": "1s",
                                               "static_configs": [{"targets": [
                                                   f"127.0.0.1:{self.server.port}"]}]}]}, f)
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            with subprocess.Popen(["prometheus", f"--config.file={folder}/p.yml",
                                   f"--storage.tsdb.path={folder}/data",
                                   f"--web.listen-address=127.0.0.1:{port}"],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                self.addCleanup(process.kill)
                try:
                    want = self.server.metric("vllm:generation_tokens_total")
                    self.assertEqual(self.scraped(port, "vllm:generation_tokens_total"), want)
                    self.assertEqual(self.scraped(port, "up"), 1)
                finally:
                    process.kill()

    def scraped(self, port, name):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
                connection.request("GET", f"/api/v1/query?query={name}")
                result = json.load(connection.getresponse())["data"]["result"]
                connection.close()
                if result:
                    return float(result[0]["value"][1])
            except (OSError, http.client.HTTPException, KeyError, ValueError):  # not ready yet
                pass
            time.sleep(0.3)
        return None


class Idle(Case):
    SECONDS = float(os.environ.get("FRESHET_IDLE_SECONDS", "20"))

    def test_no_work_no_time(self):
        BackgroundStream.alone(self.server, {"max_tokens": 20})
        idle = self.server.connect()  # an open connection and a scrape need no CPU time either
        idle.request("GET", "/metrics")
        idle.getresponse().read()
        time.sleep(1)
        before = self.server.cpu_seconds()
        time.sleep(self.SECONDS)
        share = (self.server.cpu_seconds() - before) / self.SECONDS
        idle.close()
        print(f"idle: {100 * share:.3f} % of a core over {self.SECONDS:.0f} s")
        self.assertLess(share, 0.005)


class Drain(unittest.TestCase):
    # As long as the streams need on a slow machine.
    PATIENT = ("--shutdown-timeout", str(PATIENCE))

    def test_streams_end_first(self):
        server = Server(*self.PATIENT)
        self.addCleanup(server.stop)
        alone = BackgroundStream.alone(server)
        streams = [BackgroundStream(server) for _ in range(4)]
        for s in streams:
            s.start()
        for s in streams:
            self.assertTrue(s.begun.wait(PATIENCE))
        idle = server.connect()
        idle.request("GET", "/health")
        idle.getresponse().read()
        server.process.send_signal(signal.SIGTERM)
        self.refuses(server)
        for s in streams:
            s.join(PATIENCE)
            self.assertIsNone(s.error)
            self.assertEqual(s.ids, alone)
        self.assertEqual(server.process.wait(PATIENCE), 0)

    def refuses(self, server):
        """Waits until new requests are refused: the signal was heard."""
        def refused():
            try:
                server.get("/health")
                return False
            except (OSError, http.client.HTTPException):
                return True
        self.assertTrue(until(refused))

    def test_limit(self):
        server = Server("--shutdown-timeout", "0.3")
        self.addCleanup(server.stop)
        stream = BackgroundStream(server, {"max_tokens": 2000, "n": 16})
        stream.start()
        self.assertTrue(stream.begun.wait(PATIENCE))
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual(server.process.wait(PATIENCE), 1)
        self.assertIn("cut off", server.log())

    def test_second_signal(self):
        server = Server(*self.PATIENT)
        self.addCleanup(server.stop)
        stream = BackgroundStream(server, {"max_tokens": 2000, "n": 16})
        stream.start()
        self.assertTrue(stream.begun.wait(PATIENCE))
        server.process.send_signal(signal.SIGINT)
        self.refuses(server)
        time.sleep(0.3)  # longer than signals count as one
        server.process.send_signal(signal.SIGINT)
        self.assertEqual(server.process.wait(PATIENCE), 130)

    def test_a_signal_that_comes_twice(self):
        """timeout(1) sends it to the program and to its process group: this counts as one
        signal."""
        server = Server(*self.PATIENT)
        self.addCleanup(server.stop)
        alone = BackgroundStream.alone(server)
        stream = BackgroundStream(server)
        stream.start()
        self.assertTrue(stream.begun.wait(PATIENCE))
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
        server.process.send_signal(signal.SIGTERM)
        stream.join(PATIENCE)
        self.assertIsNone(stream.error)
        self.assertEqual(stream.ids, alone)
        self.assertEqual(server.process.wait(PATIENCE), 0)

    def test_log_that_nobody_reads(self):
        """The server continues, later reports the number of lost lines, and exits when told to."""
        command = [FRESHET, "serve", "--port", "0", "--access-log-polls"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, bufsize=0) as process:
            self.addCleanup(process.kill)
            self.assertIn(b"loading", process.stderr.readline())
            port = int(re.search(rb":(\d+)\n", process.stderr.readline()).group(1))
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            self.addCleanup(connection.close)

            def ask(count, path="/health"):
                for _ in range(count):
                    connection.request("GET", path)
                    answer = connection.getresponse()
                    if answer.status == 200:
                        self.assertEqual(answer.read(), b'{"status":"healthy"}')
                    answer.read()
            ask(30, "/" + "%01" * 10000)  # longer than the free space in the pipe
            ask(1500)
            os.read(process.stderr.fileno(), 1 << 20)
            ask(2)
            self.assertRegex(os.read(process.stderr.fileno(), 1 << 20),
                             rb"freshet: \d+ lines of the log were dropped")
            ask(1500)
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(PATIENCE), 0)

    def test_idle_server_leaves_at_once(self):
        server = Server("--shutdown-timeout", str(4 * PATIENCE))
        self.addCleanup(server.stop)
        server.get("/health")
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual(server.process.wait(PATIENCE), 0)


if __name__ == "__main__":
    unittest.main()
