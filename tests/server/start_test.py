"""How `freshet serve` starts and what it logs.

usage: start_test.py [Class[.test] ...]    needs FRESHET, FRESHET_SOURCE_DIR and FRESHET_FAKE_GPUS
"""
import datetime
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import unittest

from serving import FRESHET, GOLDEN, PATIENCE, Case, Server, until

FAKE_GPUS = os.environ.get("FRESHET_FAKE_GPUS", "build/release/tests/cli")


def ask(port, path, method="GET", headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None, headers or {})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


class Start(unittest.TestCase):
    def test_requests_while_loading(self):
        """A GPU that takes two seconds to open stands for a model that takes as long to load."""
        env = {**os.environ, "LD_LIBRARY_PATH": f"{FAKE_GPUS}/fake_gpu", "FAKE_GPU_DELAY_MS": "2000"}
        command = [FRESHET, "serve", "--port", "0", "--kv-cache-dtype", "f32"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, env=env, text=True) as process:
            self.addCleanup(process.kill)
            line = process.stderr.readline()
            port = int(re.search(r"loading default; until then, http://127\.0\.0\.1:(\d+) answers 503", line).group(1))
            for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
                status, headers, body = ask(port, path, method)
                self.assertEqual((status, headers["retry-after"]), (503, "1"), path)
                error = json.loads(body)["error"]
                self.assertIn("the model is being loaded", error["message"])
                self.assertEqual((error["code"], error["type"]), (503, "service_unavailable_error"))
            status, headers, body = ask(port, "/", headers={"Accept": "text/html,*/*"})
            self.assertEqual((status, headers["content-type"]), (503, "text/html; charset=utf-8"))
            self.assertIn(b'http-equiv="refresh"', body)
            while "serving default at" not in line:
                line = process.stderr.readline()
                self.assertTrue(line)
            self.assertEqual(ask(port, "/health")[0], 200)
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(PATIENCE), 0)

    def test_signal_while_loading(self):
        env = {**os.environ, "LD_LIBRARY_PATH": f"{FAKE_GPUS}/fake_gpu", "FAKE_GPU_DELAY_MS": str(2000 * PATIENCE)}
        with subprocess.Popen([FRESHET, "serve", "--port", "0"], stderr=subprocess.PIPE, env=env,
                              text=True) as process:
            self.addCleanup(process.kill)
            self.assertIn("loading", process.stderr.readline())
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(PATIENCE), 130)

    def test_busy_port(self):
        """Said before the model is read: no weight cache is written."""
        with socket.socket() as taken, tempfile.TemporaryDirectory() as folder:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            cache = os.path.join(folder, "cache")
            got = subprocess.run([FRESHET, "serve", GOLDEN, "--port", str(taken.getsockname()[1]), "--weight-cache-dir",
                                  cache], capture_output=True, text=True, timeout=PATIENCE, check=False)
            self.assertEqual(got.returncode, 1)
            self.assertEqual(len(got.stderr.strip().split("\n")), 1, got.stderr)
            self.assertRegex(got.stderr, r"freshet: cannot listen on 127\.0\.0\.1:\d+: Address already in use; choose")
            self.assertFalse(os.path.exists(cache))

    def test_a_model_that_cannot_be_loaded(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as f:
                f.write("{")
            got = subprocess.run([FRESHET, "serve", folder, "--port", "0"], capture_output=True, text=True,
                                 timeout=PATIENCE, check=False)
            self.assertEqual(got.returncode, 2, got.stderr)
            self.assertIn("config.json", got.stderr)

    def test_reachable_without_a_key(self):
        for flags, env, warned in ((["--host", "0.0.0.0"], {}, True), (["--host", "0.0.0.0", "--api-key", "k"], {}, False),
                                   (["--host", "0.0.0.0"], {"FRESHET_API_KEY": "k"}, False),
                                   (["--host", "localhost"], {}, False)):
            server = Server(*flags, env=env)
            self.addCleanup(server.stop)
            self.assertEqual("warning: everyone who can reach http://0.0.0.0:" in server.log(), warned, flags)
            self.assertEqual(server.stop(), 0)


class Logs(Case):
    flags = ("--log-stats-interval", "0.5")

    def logged(self, marker):
        """The access log, with a request that has this id."""
        self.server.request("GET", "/version", headers={"X-Request-Id": marker})
        return self.server.logged(marker)

    def test_times(self):
        before = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(milliseconds=1)
        lines = self.logged("timed")
        line = next(line for line in lines if line["id"] == "timed")
        self.assertEqual(next(iter(line)), "time")
        time_of = datetime.datetime.strptime(line["time"], "%Y-%m-%dT%H:%M:%S.%f%z")
        self.assertLessEqual(before, time_of)
        self.assertLessEqual(time_of, datetime.datetime.now(datetime.timezone.utc))

    def test_polls(self):
        for path in ("/health", "/ping", "/ready", "/metrics", "/v1/metrics"):
            self.assertEqual(self.server.request("GET", path)[0], 200)
        self.server.request("POST", "/health", b"{}")
        lines = self.logged("after-the-polls")
        paths = [(line["path"], line["status"]) for line in lines]
        self.assertNotIn(("/health", 200), paths)
        self.assertNotIn(("/metrics", 200), paths)
        self.assertIn(("/health", 405), paths)
        server = Server("--access-log-polls")
        self.addCleanup(server.stop)
        server.request("GET", "/health", headers={"X-Request-Id": "poll"})
        server.logged("poll")

    def test_throughput(self):
        body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True}
        self.assertEqual(self.server.post("/v1/completions", body)[0], 200)
        form = (r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z Avg prompt throughput: ([\d.]+) tokens/s, Avg generation "
                r"throughput: ([\d.]+) tokens/s, Running: (\d+) reqs, Waiting: 0 reqs, KV cache usage: [\d.]+%, "
                r"Prefix cache hit rate: [\d.]+%$")
        lines = lambda: [float(m.group(2)) for m in re.finditer(form, self.server.log(), re.M)]
        self.assertTrue(until(lambda: sum(lines())), self.server.log())

        def quiet():
            before = lines()
            time.sleep(1.5)
            return lines() == before
        self.assertTrue(until(quiet))  # no work, no lines

    def test_levels(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        server = subprocess.Popen([FRESHET, "serve", "--port", str(port), "--log-level", "warning"],
                                  stderr=subprocess.PIPE, text=True)
        self.addCleanup(server.kill)

        def serves():
            try:
                return ask(port, "/health")[0] == 200
            except OSError:
                return False
        self.assertTrue(until(serves))
        server.send_signal(signal.SIGTERM)
        self.assertEqual(server.wait(PATIENCE), 0)
        self.assertEqual(server.stderr.read(), "")
        server.stderr.close()
        with tempfile.TemporaryDirectory() as cache:
            with open(os.path.join(cache, "ids.json"), "w", encoding="ascii") as f:
                f.write("[[1, 2]]")
            for level, told in (("info", True), ("warning", False)):
                got = subprocess.run([FRESHET, "run", GOLDEN, "--ids", os.path.join(cache, "ids.json"), "-n", "1",
                                      "--log-level", level, "--weight-cache-dir", cache],
                                     capture_output=True, text=True, check=True)
                self.assertEqual("packed weights are" in got.stderr, told, got.stderr)


if __name__ == "__main__":
    unittest.main()
