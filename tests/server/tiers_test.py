"""Tiers below the KV cache: a warm prefix after `kill -9`, the same tokens, metrics, saved slots.

usage: tiers_test.py [Class[.test] ...]    needs FRESHET and FRESHET_SOURCE_DIR
"""
import glob
import os
import signal
import stat
import subprocess
import tempfile
import time
import unittest

from serving import FRESHET, PATIENCE, Server, until

TEXT = " ".join(f"Verse {i}: a fox crossed the river and counted {i * i} stones." for i in range(40))
QUESTION = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}


def ask(server, **changes):
    """(token ids, cached tokens, seconds)"""
    begin = time.monotonic()
    status, answer = server.post("/v1/completions", {**QUESTION, **changes}, timeout=600)
    if status != 200:
        raise AssertionError(answer)
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return answer["choices"][0]["token_ids"], cached, time.monotonic() - begin


def stored(server):
    """Waits until the writer, which gives way to everything else, has stored the whole prompt."""
    wanted = len(server.post("/tokenize", {"prompt": TEXT})[1]["tokens"]) // 16
    blocks = lambda: server.metric("freshet:kv_offload_disk_blocks")
    if not until(lambda: blocks() >= wanted):
        raise AssertionError(f"{blocks()} of {wanted} blocks are stored")
    return wanted


class Tiers(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, *names):
        return os.path.join(self.folder.name, *names)

    def serve(self, *flags):
        server = Server(*flags)
        self.addCleanup(server.stop)
        return server

    def check_kill(self, dtype):
        cache = self.path(dtype)
        flags = ("--kv-cache-dir", cache, "--kv-cache-dtype", dtype)
        first = self.serve(*flags)
        cold, cached, _ = ask(first)
        self.assertEqual(cached, 0)
        self.assertGreater(stored(first), 10)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        second = self.serve(*flags)
        warm, cached, _ = ask(second)
        self.assertEqual(warm, cold)
        self.assertGreater(cached, 500)
        metrics = {name: second.metric(f"vllm:{name}") for name in (
            "external_prefix_cache_queries_total", "external_prefix_cache_hits_total",
            "kv_offload_load_bytes_total", "prefix_cache_hits_total")}
        self.assertEqual(metrics["external_prefix_cache_hits_total"], cached)
        self.assertGreaterEqual(metrics["external_prefix_cache_queries_total"], cached)
        self.assertGreater(metrics["kv_offload_load_bytes_total"], 0)
        self.assertEqual(metrics["prefix_cache_hits_total"], 0)
        return second

    def test_kill_f16(self):
        server = self.check_kill("f16")
        cache = self.path("f16")
        self.assertEqual(stat.S_IMODE(os.stat(cache).st_mode), 0o700)
        for name in os.listdir(cache):
            self.assertEqual(stat.S_IMODE(os.stat(os.path.join(cache, name)).st_mode), 0o600, name)
        # Another salt finds nothing: neither a tenant's nor a key's.
        self.assertEqual(ask(server, cache_salt="other")[1], 0)

    def test_kill_int8(self):
        self.check_kill("int8")

    def test_damage_is_a_miss(self):
        cache = self.path("kv")
        first = self.serve("--kv-cache-dir", cache)
        cold, _, _ = ask(first)
        stored(first)
        first.stop()
        for log in glob.glob(os.path.join(cache, "*.log")):
            size = os.path.getsize(log)
            with open(log, "r+b") as f:  # in the middle of the third block
                f.seek(size // 5)
                byte = f.read(1)
                f.seek(size // 5)
                f.write(bytes([byte[0] ^ 16]))
                f.truncate(size - 100)
        second = self.serve("--kv-cache-dir", cache)
        warm, cached, _ = ask(second)
        self.assertEqual(warm, cold)
        self.assertGreater(second.metric("freshet:kv_offload_load_failures_total"), 0)
        second.stop()
        for log in glob.glob(os.path.join(cache, "*.log")):
            os.unlink(log)
        third = self.serve("--kv-cache-dir", cache)
        self.assertEqual(ask(third)[:2], (cold, 0))

    def test_other_settings_use_nothing(self):
        cache = self.path("kv")
        first = self.serve("--kv-cache-dir", cache, "--kv-cache-dtype", "f16")
        ask(first)
        stored(first)
        first.stop()
        second = self.serve("--kv-cache-dir", cache, "--kv-cache-dtype", "bf16", "-v")
        self.assertEqual(ask(second)[1], 0)
        self.assertIn("of another model, setting or version", second.log())
        self.assertRegex(second.log(), r"disk tier +10.0 GiB")
        error = subprocess.run([FRESHET, "serve", "--port", "0", "--kv-cache-dir", cache],
                               capture_output=True, text=True, timeout=PATIENCE)
        self.assertEqual(error.returncode, 1)
        self.assertIn("another process keeps its cache", error.stderr)

    def test_host_tier(self):
        server = self.serve("--kv-transfer-config", """{"kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 200000000, "eviction_policy": "arc"}}""",
                            "--kv-cache-memory", "24M", "--max-model-len", "1024")
        first = ask(server)[0]
        self.assertTrue(until(lambda: server.metric("vllm:kv_offload_store_bytes_total")))
        self.assertTrue(until(lambda: server.metric("vllm:kv_offload_cpu_cache_usage_perc")))
        for other in range(3):
            ask(server, prompt=f"{other} " + TEXT)
        again, cached, _ = ask(server)
        self.assertEqual(again, first)
        self.assertGreater(cached, 0)

    def test_wrong_options(self):
        for flags, said in (
                (("--kv-cache-dir-size", "1G"), "--kv-cache-dir-size needs --kv-cache-dir"),
                (("--kv-cache-dir", self.path("a"), "--no-enable-prefix-caching"),
                 "leave out --no-enable-prefix-caching"),
                (("--kv-offloading-size", "1", "--kv-transfer-config", "{}"), "give one"),
                (("--kv-transfer-config", '{"kv_connector": "NixlConnector"}'), "OffloadingConnector"),
                (("--kv-cache-dir", self.path("b"), "--kv-cache-dir-size", "1K"), "at least")):
            got = subprocess.run([FRESHET, "serve", "--port", "0", *flags], capture_output=True,
                                 text=True, timeout=PATIENCE)
            self.assertEqual(got.returncode, 2, got.stderr)
            self.assertIn(said, got.stderr)


class Slots(unittest.TestCase):
    def test_save_restore_erase(self):
        with tempfile.TemporaryDirectory() as folder:
            first = Server("--slot-save-path", folder)
            self.addCleanup(first.stop)
            self.assertEqual(first.post("/slots/3?action=save", {"filename": "a.bin"})[0], 400)
            cold, _, _ = ask(first, id_slot=3)
            status, saved = first.post("/slots/3?action=save", {"filename": "a.bin"})
            self.assertEqual(status, 200, saved)
            self.assertEqual(set(saved), {"id_slot", "filename", "n_saved", "n_written", "timings"})
            self.assertEqual((saved["id_slot"], saved["filename"]), (3, "a.bin"))
            self.assertGreater(saved["n_saved"], 500)
            path = os.path.join(folder, "a.bin")
            self.assertEqual(saved["n_written"], os.path.getsize(path))
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
            self.assertGreater(saved["timings"]["save_ms"], 0)

            second = Server("--slot-save-path", folder)
            self.addCleanup(second.stop)
            status, restored = second.post("/slots/0?action=restore", {"filename": "a.bin"})
            self.assertEqual(status, 200, restored)
            self.assertEqual(set(restored), {"id_slot", "filename", "n_restored", "n_read", "timings"})
            self.assertEqual(restored["n_restored"], saved["n_saved"])
            self.assertEqual(restored["n_read"], saved["n_written"])
            self.assertGreater(restored["timings"]["restore_ms"], 0)
            warm, cached, _ = ask(second)
            self.assertEqual(warm, cold)
            self.assertGreaterEqual(cached, restored["n_restored"] - 16)
            status, _, data = second.request("POST", "/slots/0?action=erase")
            self.assertEqual(status, 200, data)
            self.assertRegex(data.decode(), r'"n_erased": ?[1-9]')
            self.assertEqual(ask(second)[1], 0)

            for body, path, wanted in (({"filename": "../a.bin"}, "/slots/0?action=save", 400),
                                       ({"filename": "none"}, "/slots/0?action=restore", 404),
                                       ({"filename": ""}, "/slots/0?action=restore", 400),
                                       ({}, "/slots/0?action=copy", 400),
                                       ({}, "/slots/x?action=erase", 400)):
                status, answer = second.post(path, body)
                self.assertEqual(status, wanted, answer)
            with open(os.path.join(folder, "damaged"), "wb") as f:
                f.write(b"text")
            status, answer = second.post("/slots/0?action=restore", {"filename": "damaged"})
            self.assertEqual(status, 400)
            self.assertIn("cannot be restored", answer["error"]["message"])

    def test_without_a_folder(self):
        server = Server()
        self.addCleanup(server.stop)
        self.assertEqual(server.post("/slots/0?action=save", {"filename": "a"})[0], 501)


if __name__ == "__main__":
    unittest.main()
