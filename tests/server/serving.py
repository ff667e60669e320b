"""Starts `freshet serve` for tests, on a free port, and talks to it with the standard library.

FRESHET_TEST_MODEL names a model to run the suites with instead of the embedded one;
FRESHET_UNPACKED_DATA the build's tests/data, with the checkpoints that tests/seeded_checkpoints.cc writes.
"""
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import unittest

FRESHET = os.environ.get("FRESHET", "build/release/bin/freshet")
SOURCE = os.environ.get("FRESHET_SOURCE_DIR", ".")
TEMPLATE = os.path.join(SOURCE, "tests/server/chat.jinja")
UNPACKED = os.environ.get("FRESHET_UNPACKED_DATA", "build/release/tests/data")
GOLDEN = os.path.join(UNPACKED, "golden/llama")
SEEDED = os.path.join(UNPACKED, "seeded")

SANITIZER_EXIT = 99  # sanitizer exit code, set in CMakePresets.json
# A program with a sanitizer is several times slower and keeps freed memory for a while.
SANITIZED = any(f"exitcode={SANITIZER_EXIT}" in os.environ.get(name, "")
                for name in ("ASAN_OPTIONS", "TSAN_OPTIONS"))
SLOWER = 4 if SANITIZED else 1
# For what must happen soon. The machine may be slow and busy, so only what never happens takes as long.
PATIENCE = 600 * SLOWER


def until(holds, seconds=PATIENCE, pause=0.02):
    """Waits until `holds()` is true; returns its last value."""
    end = time.monotonic() + seconds
    while True:
        value = holds()
        if value or time.monotonic() > end:
            return value
        time.sleep(pause)


class Server:
    """The embedded model, unless `model` names another."""

    def __init__(self, *flags, model=None, env=None, template=TEMPLATE):
        model = model or os.environ.get("FRESHET_TEST_MODEL")
        command = [FRESHET, "serve"] + ([model, "--served-model-name", "default"] if model else [])
        command += ["--port", "0", *flags]
        if template:
            command += ["--chat-template", template]
        self.folder = tempfile.TemporaryDirectory()
        self.log_path = os.path.join(self.folder.name, "log")
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log,
                                            env={**os.environ, **(env or {})})
        end = time.monotonic() + PATIENCE
        self.port = None
        while self.port is None:
            found = re.search(r"serving .* at (https?)://\S+:(\d+)", self.log())
            if found:
                self.scheme, self.port = found.group(1), int(found.group(2))
                break
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise RuntimeError("the server did not start: " + self.log())
            time.sleep(0.05)
        self.url = f"{self.scheme}://127.0.0.1:{self.port}"

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as f:
            return f.read()

    def access_log(self):
        return [json.loads(line) for line in self.log().split("\n") if line.startswith("{")]

    def stop(self):
        """Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        found = self.process.returncode == SANITIZER_EXIT and os.path.exists(self.log_path)
        log = self.log() if found else ""
        self.folder.cleanup()
        if found:
            raise AssertionError("a sanitizer found something: " + log[-20000:])
        return self.process.returncode

    def connect(self, timeout=PATIENCE, context=None):
        if self.scheme == "https":
            return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout,
                                               context=context or ssl._create_unverified_context())
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def request(self, method, path, body=None, headers=None, timeout=PATIENCE):
        """(status, headers with lower-case names, body bytes)"""
        connection = self.connect(timeout)
        data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
        if isinstance(data, str):
            data = data.encode()
        try:
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path, **options):
        status, _, data = self.request("GET", path, **options)
        return status, json.loads(data)

    def post(self, path, body, **options):
        status, _, data = self.request("POST", path, body, **options)
        return status, json.loads(data)

    def raw(self, data, end_input=False):
        """Sends bytes; returns everything received until the server closes, which it must."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as s:
            try:
                s.sendall(data)
                if end_input:
                    s.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # refused before all was sent: the answer gives the reason
            out = b""
            while True:
                try:
                    piece = s.recv(1 << 16)
                except ConnectionResetError:
                    return out
                if not piece:
                    return out
                out += piece

    def metrics(self):
        """name{labels} -> number, from the text format."""
        _, _, data = self.request("GET", "/metrics")
        out = {}
        for line in data.decode().split("\n"):
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                out[name] = float(value)
        return out

    def metric(self, name):
        """The sum over the labels."""
        return sum(v for k, v in self.metrics().items() if k.split("{")[0] == name)

    def becomes_idle(self):
        """Whether all requests end soon."""
        return until(lambda: not self.metric("vllm:num_requests_running"), pause=0.05)

    def logged(self, request_id):
        """The access log, once it has the request with this id; its line comes after the answer."""
        found = until(lambda: [line for line in self.access_log() if line["id"] == request_id])
        if not found:
            raise AssertionError(f"request {request_id} was not logged")
        return self.access_log()

    def cpu_seconds(self):
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self):
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


class Case(unittest.TestCase):
    """One server per class, started with `flags`."""
    flags = ()
    options = {}

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.flags, **cls.options)
        cls.addClassCleanup(cls.server.stop)

    def complete(self, **body):
        """The first choice of a completion."""
        status, answer = self.server.post("/v1/completions", body)
        self.assertEqual(status, 200, answer)
        return answer["choices"][0]

    def assert_error(self, answer, status, param=None, words=""):
        """OpenAI's error format, which its client turns into exceptions."""
        got, body = answer
        self.assertEqual(got, status, body)
        self.assertEqual(set(body), {"error"})
        error = body["error"]
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        self.assertEqual(error["code"], status)
        self.assertEqual(error["param"], param)
        self.assertNotIn("\n", error["message"])
        self.assertIn(words, error["message"])


class BackgroundStream(threading.Thread):
    """A long greedy stream that continues while other clients misbehave; compare `ids` with
    alone()."""
    BODY = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": True}

    def __init__(self, server, body=None):
        super().__init__(daemon=True)
        self.server = server
        self.body = {**self.BODY, **(body or {})}
        self.ids = []
        self.error = None
        self.begun = threading.Event()

    def run(self):
        try:
            connection = self.server.connect()
            connection.request("POST", "/v1/completions", json.dumps(self.body))
            answer = connection.getresponse()
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event)
                for choice in event["choices"]:
                    self.ids += choice["token_ids"]
                self.begun.set()
            connection.close()
        except Exception as e:  # shown by the test
            self.error = e
            self.begun.set()

    @classmethod
    def alone(cls, server, body=None):
        stream = cls(server, body)
        stream.run()
        if stream.error:
            raise stream.error
        return stream.ids
