"""Malicious clients: each is refused within limits while another stream continues undisturbed.

usage: hostile_test.py [Class[.test] ...]    needs FRESHET and FRESHET_SOURCE_DIR
"""
import contextlib
import http.client
import json
import os
import re
import socket
import threading
import time
import unittest

from serving import PATIENCE, SANITIZED, SLOWER, BackgroundStream, Case, until

HEAD = b"POST /tokenize HTTP/1.1\r\nHost: a\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: a\r\n"
BODY = b'{"prompt": "abc"}'
# The request that a smuggler would get through.
SECRET = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"


class Hostile(Case):
    flags = ("--header-timeout", "2", "--body-timeout", "3", "--max-body-bytes", "16000000")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.alone = BackgroundStream.alone(cls.server)

    @contextlib.contextmanager
    def quick(self, seconds, what):
        """What takes the server no longer than this, in processor time: others may keep the machine busy. The
        streams that run meanwhile count, on all cores."""
        begin = self.server.cpu_seconds()
        yield
        self.assertLess(self.server.cpu_seconds() - begin, seconds * SLOWER * os.cpu_count(), what)

    @contextlib.contextmanager
    def undisturbed(self):
        """Streams run one after another meanwhile; each must give the same tokens as alone, and
        none may stop."""
        over = threading.Event()
        streams = []

        def work():
            while not over.is_set() or not streams:
                streams.append(BackgroundStream(self.server))
                streams[-1].run()  # waits at most PATIENCE for a piece
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        for stream in streams:
            self.assertIsNone(stream.error)
            self.assertEqual(stream.ids, self.alone)

    def answers(self, data):
        """The status codes received until the server closes, which it must, and all that was received."""
        out = self.server.raw(data)
        return [int(s) for s in re.findall(rb"HTTP/1\.1 (\d+) ", out)], out


class Framing(Hostile):
    def refused(self, data, name, status=400):
        got, out = self.answers(data + SECRET)
        self.assertEqual(got, [status], (name, out[:400]))
        self.assertIn(b"Connection: close", out, name)

    def test_headers(self):
        length = f"Content-Length: {len(BODY)}\r\n".encode()
        chunked = b"Transfer-Encoding: chunked\r\n"
        end = b"\r\n0\r\n\r\n"
        with self.undisturbed():
            for name, data in {
                    "CL and TE": HEAD + length + chunked + end,
                    "TE and CL": HEAD + chunked + length + end,
                    "CL twice": HEAD + length + length + b"\r\n" + BODY,
                    "two CL": HEAD + length + b"Content-Length: 1\r\n\r\n" + BODY,
                    "CL list": HEAD + b"Content-Length: 17, 17\r\n\r\n" + BODY,
                    "CL plus": HEAD + b"Content-Length: +17\r\n\r\n" + BODY,
                    "CL minus": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
                    "CL hex": HEAD + b"Content-Length: 0x11\r\n\r\n" + BODY,
                    "CL empty": HEAD + b"Content-Length:\r\n\r\n" + BODY,
                    "CL of 2^64": HEAD + b"Content-Length: 18446744073709551617\r\n\r\n" + BODY,
                    "CL and space": HEAD + b"Content-Length : 17\r\n\r\n" + BODY,
                    "TE and space": HEAD + b"Transfer-Encoding : chunked\r\n" + end,
                    "TE twice": HEAD + chunked + chunked + end,
                    "TE gzip": HEAD + b"Transfer-Encoding: gzip, chunked\r\n" + end,
                    "TE unknown": HEAD + b"Transfer-Encoding: xchunked\r\n" + end,
                    "TE identity": HEAD + b"Transfer-Encoding: identity\r\n" + end,
                    "TE parameter": HEAD + b"Transfer-Encoding: chunked;q=1\r\n" + end,
                    "TE vertical tab": HEAD + b"Transfer-Encoding:\x0bchunked\r\n" + end,
                    "TE in 1.0": b"POST /tokenize HTTP/1.0\r\n" + chunked + end,
                    "folded": HEAD + b"X: a\r\n b\r\n" + length + b"\r\n" + BODY,
                    "folded TE": HEAD + b"Transfer-Encoding:\r\n chunked\r\n" + end,
                    "bare LF": HEAD.replace(b"\r\n", b"\n") + length + b"\r\n" + BODY,
                    "one bare LF": HEAD + b"X: a\nY: b\r\n\r\n",
                    "bare CR": HEAD + b"X: a\rContent-Length: 3\r\n\r\n",
                    "NUL": HEAD + b"X: a\0b\r\n\r\n",
                    "no Host": b"GET /version HTTP/1.1\r\n\r\n",
                    "two Hosts": GET + b"Host: b\r\n\r\n",
                    "no name": HEAD + b": value\r\n\r\n",
                    "no colon": HEAD + b"Transfer-Encoding chunked\r\n\r\n",
                    "name with space": HEAD + b"X Y: a\r\n\r\n",
                    "version 2": b"GET /version HTTP/2.0\r\nHost: a\r\n\r\n",
                    "version 0.9": b"GET /version\r\n\r\n",
                    "two spaces": b"GET  /version HTTP/1.1\r\nHost: a\r\n\r\n",
                    "no slash": b"GET version HTTP/1.1\r\nHost: a\r\n\r\n",
                    "bad percent": b"GET /ver%zzsion HTTP/1.1\r\nHost: a\r\n\r\n",
                    "percent NUL": b"GET /version%00 HTTP/1.1\r\nHost: a\r\n\r\n",
                    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
            }.items():
                self.refused(data, name)

    def test_chunks(self):
        head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        with self.undisturbed():
            for name, chunks in {
                    "size with 0x": b"0x11\r\n" + BODY + b"\r\n0\r\n\r\n",
                    "size with plus": b"+11\r\n" + BODY + b"\r\n0\r\n\r\n",
                    "size with minus": b"-11\r\n" + BODY + b"\r\n0\r\n\r\n",
                    "size with space": b" 11\r\n" + BODY + b"\r\n0\r\n\r\n",
                    "size of 2^64": b"10000000000000011\r\n" + BODY + b"\r\n0\r\n\r\n",
                    "size empty": b"\r\n" + BODY + b"\r\n0\r\n\r\n",
                    "size by bare LF": b"11\n" + BODY + b"\r\n0\r\n\r\n",
                    "no end of chunk": b"11\r\n" + BODY + b"0\r\n\r\n",
                    "longer than said": b"10\r\n" + BODY + b"\r\n0\r\n\r\n",
                    "extension": b"11;" + b"a" * 1000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
                    "bare LF at the end": b"11\r\n" + BODY + b"\r\n0\n\n",
            }.items():
                self.refused(head + chunks, name)

    def test_trailers_are_no_headers(self):
        data = (HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n11\r\n" + BODY
                + b"\r\n0\r\nX-Request-Id: from-trailer\r\nHost: evil\r\n\r\n")
        got, out = self.answers(data)
        self.assertEqual(len(got), 1)
        self.assertNotIn(b"from-trailer", out)

    def test_what_is_legal(self):
        """The same shapes, valid: two requests on one connection get two answers, in order."""
        last = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        for name, first in {
                "length": HEAD + b"Content-Length: 17\r\n\r\n" + BODY,
                "chunks": HEAD + b"transfer-encoding: Chunked\r\n\r\n8\r\n" + BODY[:8] +
                          b"\r\n9;x=y\r\n" + BODY[8:] + b"\r\n0\r\n\r\n",
                "space": HEAD + b"Content-Length:\t 17 \t\r\n\r\n" + BODY,
                "query": b"GET /version?a=b HTTP/1.1\r\nHost: a\r\n\r\n",
                "percent": b"GET /v%65rsion HTTP/1.1\r\nHost: a\r\n\r\n",
                "expect": HEAD + b"Expect: 100-continue\r\nContent-Length: 17\r\n\r\n" + BODY,
        }.items():
            got, out = self.answers(first + last)
            self.assertEqual([s for s in got if s != 100], [200, 200], (name, out))
            self.assertTrue(out.endswith(b'{"status":"healthy"}'), out[-200:])

    def test_header_injection(self):
        """Client input cannot break out of a header line of the answer."""
        for value in (b"a\rb", b"a\x00b", b"a\nSet-Cookie: x"):
            got, out = self.answers(GET + b"X-Request-Id: " + value + b"\r\n\r\n")
            self.assertEqual(got, [400])
            self.assertNotIn(b"Set-Cookie", out)


class Slow(Hostile):
    def test_slow_headers(self):
        """A hundred clients that send a byte now and then are disconnected after
        --header-timeout."""
        with self.undisturbed():
            begin = time.monotonic()
            clients = [socket.create_connection(("127.0.0.1", self.server.port))
                       for _ in range(100)]
            open_ = set(range(100))
            while open_ and time.monotonic() - begin < PATIENCE:
                for i in list(open_):
                    try:
                        clients[i].sendall(b"G")
                        clients[i].setblocking(False)
                        if clients[i].recv(10) == b"":
                            open_.discard(i)
                    except BlockingIOError:
                        clients[i].setblocking(True)
                    except OSError:
                        open_.discard(i)
                time.sleep(0.25)
            self.assertEqual(open_, set())
            self.assertGreater(time.monotonic() - begin, 1.5)
        for c in clients:
            c.close()

    def test_slow_body(self):
        with self.undisturbed():
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE) as s:
                s.sendall(HEAD + b"Content-Length: 100000\r\n\r\n{")
                with self.assertRaises(OSError):  # at this pace the body would take hours
                    for _ in range(5 * PATIENCE):
                        s.sendall(b" ")
                        time.sleep(0.2)

    def test_never_reads(self):
        """Data queued for a client that does not read is bounded; then its request is cancelled."""
        body = json.dumps({"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True,
                           "logprobs": 20, "n": 16}).encode()
        before = self.server.resident_bytes()
        with self.undisturbed(), socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.connect(("127.0.0.1", self.server.port))
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: "
                      + str(len(body)).encode() + b"\r\n\r\n" + body)
            name = 'finished_reason="abort"'
            self.assertTrue(until(lambda: any(name in k for k in self.server.metrics()), pause=0.1))
            if not SANITIZED:
                self.assertLess(self.server.resident_bytes() - before, 60 << 20)

    def test_silence(self):
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE) as s:
            self.assertEqual(s.recv(10), b"")


class Connections(Hostile):
    flags = ("--max-connections", "40", "--header-timeout", "2")

    def test_too_many(self):
        stream = BackgroundStream(self.server, {"max_tokens": 1500})
        stream.start()
        stream.begun.wait(PATIENCE)
        held = [socket.create_connection(("127.0.0.1", self.server.port)) for _ in range(200)]
        time.sleep(0.3)
        self.assertLess(self.server.open_files(), 120)
        for s in held:
            s.close()

        def healthy():
            try:
                return self.server.get("/health")[0] == 200
            except (OSError, http.client.HTTPException):
                return False
        self.assertTrue(until(healthy, pause=0.1))
        stream.join(PATIENCE)
        self.assertIsNone(stream.error)
        self.assertEqual(stream.ids[:400], self.alone)


class Bodies(Hostile):
    flags = ("--body-timeout", "600", "--max-body-bytes", "16000000")

    def test_sizes(self):
        with self.undisturbed():
            for name, data, want in (
                    ("declared", HEAD + b"Content-Length: 16000001\r\n\r\n", 413),
                    ("declared more", HEAD + b"Content-Length: 999999999999999999\r\n\r\n", 413),
                    ("header", GET + b"X: " + b"a" * 40000 + b"\r\n\r\n", 431),
                    ("many headers", GET + b"X: a\r\n" * 9000 + b"\r\n", 431),
                    ("long target", b"GET /" + b"a" * 40000 + b" HTTP/1.1\r\n\r\n", 431),
                    ("endless header", b"a" * 100000, 431)):
                got, out = self.answers(data)
                self.assertEqual(got, [want], (name, out[:300]))
            chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
            got, _ = self.answers(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 12)
            self.assertEqual(got, [413])

    def test_many_large_ones_at_once(self):
        """Declared bodies share one budget: memory stays bounded whatever length is announced."""
        before = self.server.resident_bytes()
        clients = []
        with self.undisturbed():
            for _ in range(20):
                s = socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE)
                s.sendall(HEAD + b"Content-Length: 15000000\r\n\r\n" + b" " * 100000)
                s.setblocking(False)
                clients.append(s)
            refused = set()

            def refusals():
                for s in clients:
                    with contextlib.suppress(BlockingIOError):
                        if b" 503 " in s.recv(4096):
                            refused.add(s)
                return len(refused)
            until(lambda: refusals() >= 16)
            time.sleep(0.3)
            self.assertEqual(refusals(), 16)  # four fit
            for s in clients:
                s.close()
        self.assertLess(self.server.resident_bytes() - before, 150 << 20)
        self.assertEqual(self.server.get("/health")[0], 200)

    def test_json(self):
        deep = 200000
        with self.undisturbed():
            for name, body in {
                    "arrays": b"[" * deep, "objects": b'{"a":' * deep,
                    "closed": b'{"prompt":' + b"[" * deep + b"]" * deep + b"}",
                    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
                    "overlong UTF-8": b'{"prompt": "\xc0\x80"}',
                    "UTF-8 surrogate": b'{"prompt": "\xed\xa0\x80"}',
                    "UTF-8 beyond": b'{"prompt": "\xf4\x90\x80\x80"}',
                    "cut UTF-8": b'{"prompt": "\xe2\x82"}',
                    "key in invalid UTF-8": b'{"\xff": 1}',
                    "lone surrogate": b'{"prompt": "\\ud800"}',
                    "control character": b'{"prompt": "a\nb"}', "NaN": b'{"prompt": NaN}',
                    "trailing comma": b'{"prompt": "a",}', "two values": b'{"prompt": "a"} {}',
                    "single quotes": b"{'prompt': 'a'}", "empty": b"", "NUL": b"\0",
                    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
            }.items():
                with self.quick(5, name):
                    answer = self.server.post("/v1/completions", body)
                self.assert_error(answer, 400, words="JSON")

    def test_long_numbers(self):
        for number in ("1" + "0" * 1000000, "1e999999999", "-1e999999999", "0." + "0" * 1000000 + "1"):
            for field in ("temperature", "max_tokens", "seed", "priority"):
                status, answer = self.server.post(
                    "/v1/completions", f'{{"prompt":"a","max_tokens":1,"{field}":{number}}}')
                self.assertIn(status, (200, 400), (number[:20], field, answer))

    def test_escaped_nul_is_text(self):
        status, answer = self.server.post("/tokenize", {"prompt": "a\0b"})
        self.assertEqual(status, 200)
        self.assertEqual(self.server.post("/detokenize", {"tokens": answer["tokens"]})[1]["prompt"]
                         .replace("<s>", ""), "a\0b")


class Parameters(Hostile):
    def refused(self, field, value, path="/v1/completions", **others):
        with self.quick(10, field):
            answer = self.server.post(path, {"prompt": "a", "max_tokens": 5, **others, field: value})
        self.assert_error(answer, 400, field)

    def test_counts(self):
        with self.undisturbed():
            self.refused("stop", [f"s{i}" for i in range(10000)])
            self.refused("stop", "s" * 1000000)
            self.refused("stop_token_ids", list(range(10000)))
            self.refused("logit_bias", {str(i): 1 for i in range(10000)})
            self.refused("n", 10**6)
            self.refused("logprobs", 10**6)
            self.refused("prompt", ["a"] * 100000)
            self.refused("prompt", "word " * 2000000)
            self.refused("tools", [{}] * 100000, path="/v1/chat/completions",
                         messages=[{"role": "user", "content": "a"}])
            self.refused("input", ["a"] * 100000, path="/v1/embeddings")

    def test_samples_that_wait_take_little(self):
        before = self.server.resident_bytes()
        with self.undisturbed():
            status, _ = self.server.post("/v1/completions", {
                "prompt": ["a"] * 256, "n": 128, "max_tokens": 2000, "presence_penalty": 1,
                "logit_bias": {str(i): 1 for i in range(4000)}, "timeout": 2})
            self.assertEqual(status, 200)
        self.assertLess(self.server.resident_bytes() - before, 500 << 20)

    def test_truncated_giant_is_served(self):
        status, answer = self.server.post("/v1/completions", {
            "prompt": "word " * 2000000 + "Once upon a time", "truncate_prompt_tokens": 4,
            "max_tokens": 5, "temperature": 0, "return_token_ids": True})
        self.assertEqual(status, 200, answer)
        ids = self.server.post("/tokenize", {"prompt": "word Once upon a time"})[1]["tokens"]
        self.assertEqual(answer["choices"][0]["prompt_token_ids"], ids[-4:])

    def test_giant_chat_template_input(self):
        with self.undisturbed():
            status, _ = self.server.post("/v1/chat/completions", {"messages": [
                {"role": "user", "content": "a"}] * 100000})
            self.assertEqual(status, 400)


class Grammars(Hostile):
    """Each is refused, or served, in time; the memory limits are never exceeded."""

    def ask(self, kind, value):
        with self.quick(40, (kind, str(value)[:80])):
            status, answer = self.server.post("/v1/completions", {
                "prompt": "a", "max_tokens": 20, "structured_outputs": {kind: value}})
        self.assertIn(status, (200, 400), (kind, str(value)[:80], answer))
        return status

    def test_regex(self):
        with self.undisturbed():
            for pattern, want in (("((a{1,100}){1,100}){1,100}", 400),
                                  ("(a|b|ab|ba){0,2000}c", 400), (".*a.{20}", 400),
                                  ("(" * 100000 + "a" + ")" * 100000, 400), ("(a+)+" * 50, 200),
                                  (".*" * 2000 + "x", 200), ("[" * 10000, 400),
                                  ("\\" * 9999, 400), ("(?=a)b", 400), ("(a)\\1", 400),
                                  ("a" * 1000000, 400)):
                self.assertEqual(self.ask("regex", pattern), want, pattern[:40])

    def test_schemas(self):
        wide = {"type": "object", "additionalProperties": False,
                "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}
        branching = {"$ref": "#/$defs/a0", "$defs": {
            **{f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)},
            "a40": {"type": "null"}}}
        with self.undisturbed():
            # Most of these mean little or nothing; they must end in time.
            for schema in ({"$ref": "#"}, wide, branching):
                self.ask("json", schema)
            for schema, want in (({"enum": [f"value{i}" * 9 for i in range(20000)]}, 400),
                                 ({"type": "string", "minLength": 10**9}, 400),
                                 ({"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"}, 400),
                                 ({"$ref": "http://127.0.0.1:1/x"}, 400)):
                self.assertEqual(self.ask("json", schema), want, str(schema)[:60])

    def test_ebnf(self):
        doubling = "\n".join(["root ::= a0"] + [f"a{i} ::= a{i + 1} a{i + 1}" for i in range(60)]
                             + ['a60 ::= "x"'])
        with self.undisturbed():
            for grammar, want in (('root ::= root "a" | "b"', 400),
                                  ('root ::= a\na ::= b\nb ::= a', 400), (doubling, 200),
                                  ('root ::= s\ns ::= "a" s s | "a"', 200),
                                  ("root ::= (a*)*\na ::= \"b\"*", 200), ("root ::= " + "(" * 9999, 400)):
                self.assertEqual(self.ask("grammar", grammar), want, grammar[:40])

    def test_hundred_different_ones(self):
        """Compiled grammars do not accumulate."""
        before = self.server.resident_bytes()
        with self.undisturbed():
            for i in range(100):
                self.ask("regex", f"[a-z]{{1,50}}{i}[0-9]{{1,{i + 1}}}")
        self.assertLess(self.server.resident_bytes() - before, 400 << 20)


if __name__ == "__main__":
    unittest.main()
