"""Tests of the program as scripts see it: exit codes, JSON, invalid input, signals.

usage: cli_test.py [Class[.test] ...]    needs FRESHET (the program), FRESHET_SOURCE_DIR and
FRESHET_UNPACKED_DATA (the build's tests/data, with the checkpoints that tests/seeded_checkpoints.cc writes)
"""
import array
import json
import os
import shutil
import pty
import re
import resource
import select
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import unittest

FRESHET = os.environ.get("FRESHET", "build/release/bin/freshet")
SOURCE = os.environ.get("FRESHET_SOURCE_DIR", ".")
FAKE_GPUS = os.environ.get("FRESHET_FAKE_GPUS", "build/release/tests/cli")
UNPACKED = os.environ.get("FRESHET_UNPACKED_DATA", "build/release/tests/data")
GOLDEN = os.path.join(UNPACKED, "golden")
LLAMA = os.path.join(GOLDEN, "llama")
# For what must happen soon. The machine may be slow and busy, so only what never happens takes as long.
PATIENCE = 180
# Flags for answers that last until they are interrupted, on fast machines, too.
SLOWLY = ("--reference", "-t", "1")


def run(*arguments, stdin="", timeout=300, **options):
    return subprocess.run([FRESHET, *arguments], input=stdin, capture_output=True, text=True,
                          timeout=timeout, check=False, **options)


def load_safetensors(path):
    """name -> (shape, numbers)"""
    with open(path, "rb") as f:
        data = f.read()
    size = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        numbers = array.array({"F32": "f", "I64": "q", "I32": "i"}[entry["dtype"]])
        numbers.frombytes(data[8 + size + first:8 + size + last])
        tensors[name] = (entry["shape"], numbers)
    return tensors


def indices(golden):
    """The numbers i of ids_i."""
    return sorted(int(name[4:]) for name in golden if name.startswith("ids_"))


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, content):
        with open(self.path(name), "wb" if isinstance(content, bytes) else "w") as f:
            f.write(content)
        return self.path(name)

    def succeeds(self, *arguments, **options):
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, 0, f"{arguments}: {result.stderr}")
        return result.stdout

    def fails(self, code, *arguments, says="", **options):
        """One line on standard error, nothing on standard output."""
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, code, f"{arguments}: {result.stderr}")
        self.assertEqual(len(result.stderr.strip().split("\n")), 1, result.stderr)
        self.assertIn("freshet: ", result.stderr)
        self.assertIn(says, result.stderr)
        self.assertEqual(result.stdout, "")
        return result.stderr


def cpu_seconds(pid):
    """The processor time of a process so far."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Terminal:
    """The user's side of a pseudo-terminal. All waits have a time limit."""
    NO_ANSWER = re.compile(r"prompt +\d+ %|\x1b\[[0-9;?]*[A-Za-z]|\s")

    def __init__(self, pid, master):
        self.pid = pid
        self.master = master
        self.seen = ""

    def write(self, text):
        os.write(self.master, text.encode())

    def read_until(self, found, what, seconds=PATIENCE):
        end = time.time() + seconds
        while not found():
            if not select.select([self.master], [], [], max(0.0, end - time.time()))[0]:
                raise AssertionError(f"no {what} within {seconds} s after {self.seen!r}")
            self.seen += os.read(self.master, 4096).decode(errors="replace")

    def wait_for(self, text):
        self.read_until(lambda: text in self.seen, repr(text))
        self.seen = self.seen.split(text, 1)[1]

    def wait_for_answer(self):
        """Until a piece of an answer is shown, which the progress of the prompt is not."""
        self.read_until(lambda: len(self.NO_ANSWER.sub("", self.seen)) >= 20, "answer")
        self.seen = ""

    def exit_code(self, seconds=PATIENCE):
        """Keeps reading until the program has exited."""
        end = time.time() + seconds
        while time.time() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid != 0:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.master, 4096).decode(errors="replace")
                except OSError:  # EIO: the other side is closed
                    time.sleep(0.05)
        raise AssertionError(f"still running after {seconds} s: {self.seen!r}")

    def close(self):
        if self.pid != 0:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)


class Usage(Case):
    COMMANDS = ["run", "chat", "tokenize", "apply-template", "inspect", "convert", "eval", "bench"]

    def test_help(self):
        text = self.succeeds("--help")
        for command in self.COMMANDS:
            self.assertIn(command, text)
            own = self.succeeds(command, "--help")
            self.assertIn("--help", own)
            if command != "eval":
                self.assertIn("Examples:", own)
        for deeper in ("logits", "perplexity", "speculation"):
            self.assertIn("Examples:", self.succeeds("eval", deeper, "--help"))

    def test_version(self):
        self.assertRegex(self.succeeds("--version"), r"^freshet \d+\.\d+\.\d+\n")

    def test_wrong_usage(self):
        for arguments in ([], ["no-such-command"], ["run", "--no-such-flag"], ["run", "-n"],
                          ["run", "-n", "many", "x"], ["bench", "-o", "xml"], ["eval"],
                          ["eval", "logits", LLAMA], ["tokenize", LLAMA], ["convert", LLAMA],
                          ["run", "--threads", "0", "x"], ["bench", "-p", "1,,2"],
                          ["bench", "-p", "0", "-n", "0"], ["bench", "-pg", "512"]):
            self.fails(2, *arguments)
        for arguments in (["no-such-command"], ["eval", "no-such-command", "x"]):
            self.fails(2, *arguments, says="no command 'no-such-command'")
        for wrong in ("many", "9999999999999"):
            self.fails(2, "run", "x", "-n", wrong, says=f"= {wrong}: not a number, or too large")


class WrongInput(Case):
    def test_missing_model(self):
        for arguments in (["run", "./missing.gguf", "x"], ["inspect", "missing"],
                          ["tokenize", "missing", "x"], ["bench", "-m", "missing"],
                          ["chat", "missing"], ["convert", "missing", "-o", self.path("o.gguf")],
                          ["eval", "perplexity", "missing", __file__]):
            self.fails(2, *arguments, says="missing")

    def test_published_model_that_was_not_fetched(self):
        environment = dict(os.environ, FRESHET_CACHE_DIR=self.folder, HF_HOME=self.folder, HF_HUB_OFFLINE="1")
        self.fails(2, "run", "smollm2", "x", says="tools/get_model", env=environment)

    def test_damaged_gguf(self):
        with open(os.path.join(SOURCE, "models/default.gguf"), "rb") as f:
            whole = f.read()
        for size in (0, 3, 4, 23, 24, 1000, 100000, 1000000, len(whole) - 1):
            path = self.write("cut.gguf", whole[:size])
            self.fails(2, "inspect", path)
            self.fails(2, "run", path, "x")
        lying = bytearray(whole)
        lying[8:16] = struct.pack("<Q", 1 << 60)  # tensors
        self.fails(2, "run", self.write("lying.gguf", bytes(lying)), "x")
        # A name that is too long and must not be printed raw to a terminal.
        name = b"\x1b[2J\n" * 2000
        error = self.fails(2, "inspect", self.write("long.gguf", b"GGUF" + struct.pack(
            "<IQQQ", 3, 0, 1, len(name)) + name + struct.pack("<I", 99)))
        self.assertLess(len(error), 5000)
        self.assertNotIn("\x1b", error)

    def test_damaged_folder(self):
        os.mkdir(self.path("m"))
        self.fails(2, "run", self.path("m"), "x")
        self.write("m/config.json", "{")
        self.fails(2, "inspect", self.path("m"))
        self.write("m/model.safetensors", b"\xff" * 100)
        self.fails(2, "inspect", self.path("m"))

    def test_unknown_architecture(self):
        os.mkdir(self.path("m"))
        with open(os.path.join(LLAMA, "config.json")) as f:
            config = json.load(f)
        config["model_type"] = "martian"
        self.write("m/config.json", json.dumps(config))
        with open(os.path.join(LLAMA, "model.safetensors"), "rb") as f:
            self.write("m/model.safetensors", f.read())
        self.fails(2, "inspect", self.path("m"), says="martian")

    def test_ids(self):
        for text, says in (("[[1, 2", ""), ("{}", "list"), ("[[1.5]]", "1.5"), ("[[-1]]", "-1"),
                           ("[[]]", "empty"), ("[]", "no list"), ("[[99999]]", "99999"),
                           ('[["a"]]', "token ids")):
            path = self.write("ids.json", text)
            self.fails(2, "eval", "logits", LLAMA, "--ids", path, "-o", self.path("o"), says=says)
            self.fails(2, "run", LLAMA, "--ids", path, "-n", "2", says=says)
        self.fails(2, "run", LLAMA, "--ids", self.path("none.json"), "-n", "2", says="none.json")

    def test_parameters(self):
        for flags in (["--temp", "-1"], ["--top-p", "0"], ["--top-p", "nan"], ["--top-k", "-1"],
                      ["--min-p", "2"], ["-n", "-2"], ["--beams", "9999"],
                      ["--logit-bias", "x"], ["--logit-bias", "99999999=1"], ["--stop", ""],
                      ["--cpu-isa", "mmx"], ["--kv-cache-dtype", "q1"], ["--kv-cache-memory", "x"],
                      ["--force-kernel", "matmul=none"], ["--samples", "0"], ["--logprobs", "3"]):
            self.fails(2, "run", "default", "Hello", *flags)

    def test_device(self):
        for device in ("tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x"):
            self.fails(2, "run", "default", "Hello", "--device", device, says="auto cpu cuda")
        for flags in (["--reference"], ["--cpu-isa", "scalar"], ["--force-kernel", "matmul=x"]):
            self.fails(2, "run", "default", "Hello", "--device", "cuda", *flags,
                       says="--device cpu")

    def test_prompt(self):
        self.fails(2, "run", "default", stdin="", says="no prompt")
        self.fails(2, "run", "default", "-f", self.path("none.txt"), says="none.txt")
        self.fails(2, "run", "default", "x", "-f", __file__)
        self.fails(2, "run", "default", "word " * 5000)

    def test_options_that_exclude_another(self):
        for options in (["--chat"], ["--system", "x"], ["--chat-template", "x"]):
            self.fails(2, "run", "default", "Hello", "--raw", *options, says="--raw")
            self.fails(2, "run", LLAMA, "--ids", "ids.json", *options, says="--ids")
        self.fails(2, "run", "default", "Hello", "--system", "x", says="no chat template")
        self.fails(2, "run", "default", "Hello", "--logprobs", "1", says="needs --json")

    def test_chat_without_a_template(self):
        self.fails(2, "run", "default", "Hello", "--chat", says="template")

    def test_memory_that_does_not_suffice(self):
        result = run("run", "default", "Hello", "--kv-cache-memory", "1K")
        self.assertIn(result.returncode, (1, 2))
        self.assertEqual(len(result.stderr.strip().split("\n")), 1)
        self.fails(1, "run", "default", "Hello", "--kv-cache-memory", "900T",
                   says="--kv-cache-memory ")


class Run(Case):
    def ids_and_greedy(self, folder):
        golden = load_safetensors(os.path.join(folder, "golden.safetensors"))
        return ([list(golden[f"ids_{i}"][1]) for i in indices(golden)],
                [list(golden[f"greedy_{i}"][1]) for i in indices(golden)])

    def test_greedy_ids_are_the_golden_ones(self):
        for name in ("llama", "gemma2", "qwen3", "gpt2", "mixtral"):
            ids, greedy = self.ids_and_greedy(os.path.join(GOLDEN, name))
            path = self.write("ids.json", json.dumps(ids))
            text = self.succeeds("run", os.path.join(GOLDEN, name), "--ids", path, "-n", "24",
                                 "--temp", "0", "--print-ids", "--reference")
            self.assertEqual([json.loads(line) for line in text.splitlines()], greedy, name)

    def test_weight_cache(self):
        ids, _ = self.ids_and_greedy(LLAMA)
        ids = self.write("ids.json", json.dumps(ids))
        cache = self.path("cache")
        flags = ["run", LLAMA, "--ids", ids, "-n", "12", "--temp", "0", "--print-ids"]
        plain = self.succeeds(*flags)
        for remark in ("packed weights are written", "packed weights are mapped"):
            got = run(*flags, "-v", "--weight-cache-dir", cache)
            self.assertEqual((got.returncode, got.stdout), (0, plain))
            self.assertEqual(got.stderr.count("packed weights are"),
                             2 if "written" in remark else 1, got.stderr)
            self.assertIn(remark, got.stderr)
        for command in (["eval", "logits", LLAMA, "--ids", ids, "-o", self.path("l.safetensors")],
                        ["bench", "-m", LLAMA, "-p", "8", "-n", "2", "-r", "1"],
                        ["inspect", LLAMA, "--kernels"]):
            self.assertIn("packed weights are mapped",
                          run(*command, "-v", "--weight-cache-dir", cache).stderr, command)
        self.assertEqual(len(os.listdir(cache)), 1)
        # The embedded model has no file by which a later run could recognise it.
        got = run("run", "Once", "-n", "2", "--weight-cache-dir", self.path("none"))
        self.assertEqual(got.returncode, 0, got.stderr)
        self.assertFalse(os.path.exists(self.path("none")))

    def test_weight_cache_of_processes_that_start_at_once(self):
        ids, greedy = self.ids_and_greedy(LLAMA)
        ids = self.write("ids.json", json.dumps(ids))
        cache = self.path("cache")
        flags = ["run", LLAMA, "--ids", ids, "-n", "12", "--temp", "0", "--print-ids"]
        plain = self.succeeds(*flags)
        started = [subprocess.Popen([FRESHET, *flags, "--weight-cache-dir", cache],
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                   for _ in range(5)]
        for process in started:
            self.assertEqual(process.communicate(timeout=300), (plain, ""))
        self.assertEqual(len(os.listdir(cache)), 1)

    def test_weight_cache_on_a_full_disk(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (10000, resource.RLIM_INFINITY))
        cache = self.path("cache")
        got = run("run", LLAMA, "--ids", self.write("ids.json", "[[1, 2]]"), "-n", "2",
                  "--weight-cache-dir", cache, preexec_fn=limit)
        self.assertEqual(got.returncode, 0, got.stderr)
        self.assertIn("warning: packed weights are not kept: cannot write", got.stderr)
        self.assertEqual(os.listdir(cache), [])

    def test_device_of_kernels_that_were_asked_for(self):
        for device in ("auto", "cpu"):  # independent of the machine
            result = run("run", "default", "Hello", "-n", "2", "--reference", "--device", device,
                         "-v")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("runs on cpu", result.stderr)

    def test_what_a_gpu_cannot_take_runs_on_the_processor(self):
        env = {**os.environ, "LD_LIBRARY_PATH": f"{FAKE_GPUS}/fake_gpu"}
        flags = ["run", LLAMA, "--ids", self.write("ids.json", "[[1, 2]]"), "-n", "2",
                 "--kv-cache-dtype", "f32"]
        result = run(*flags, env=env)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("runs on cpu (keys and values of type f32 on Fake GPU", result.stderr)
        result = run(*flags, "--device", "cuda", env=env)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("keys and values of type f32 on Fake GPU: it keeps f16, bf16, fp8, int8, int4 and k8v4",
                      result.stderr)
        for device, says in (("cuda:0", "on Fake GPU"), ("cuda:1", "on Another fake"),
                             ("cuda:2", "no GPU 2: this machine has 2")):
            result = run(*flags, "--device", device, env=env)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(says, result.stderr)

    def test_kernels_of_a_gpu_are_named_and_forced(self):
        env = {**os.environ, "LD_LIBRARY_PATH": f"{FAKE_GPUS}/fake_gpu"}
        flags = ["inspect", LLAMA, "--kernels", "--device", "cuda"]
        result = run(*flags, env=env)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("bf16_sm90_m33_128_", result.stdout)
        result = run(*flags, "--force-kernel", "matmul=bf16_sm90_m33", env=env)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("33+: bf16_sm90_m33\n", result.stdout)
        for forced, says in (("matmul=q4_0.avx2", "known:"),
                             ("matmul=bf16_sm90_m1_32", "it takes K of 2,048 or more"),
                             ("vector=x", "matmul, swiglu, attention or moe")):
            result = run(*flags, "--force-kernel", forced, env=env)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(says, result.stderr)

    def test_a_plug_in_of_another_build_is_named(self):
        env = {**os.environ, "LD_LIBRARY_PATH": f"{FAKE_GPUS}/fake_gpu_of_another_build"}
        flags = ["run", LLAMA, "--ids", self.write("ids.json", "[[1, 2]]"), "-n", "2"]
        result = run(*flags, env=env)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("no GPU is used: libfreshet_cuda.so belongs to another version",
                      result.stderr)
        result = run(*flags, "--device", "cuda", env=env)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("another version", result.stderr)

    def test_alone_as_in_parallel(self):
        ids, _ = self.ids_and_greedy(LLAMA)
        path = self.write("ids.json", json.dumps(ids * 4))
        flags = ["run", LLAMA, "--ids", path, "-n", "12", "--seed", "7", "--print-ids"]
        self.assertEqual(self.succeeds(*flags, "--parallel", "1"),
                         self.succeeds(*flags, "--parallel", "20"))

    def test_default_model_streams(self):
        text = self.succeeds("run", "Once upon a time", "-n", "20", "--temp", "0")
        self.assertGreater(len(text.split()), 5)
        self.assertEqual(text, self.succeeds("run", "default", "Once upon a time", "-n", "20",
                                             "--temp", "0"))
        self.assertEqual(text, self.succeeds("run", "-n", "20", "--temp", "0",
                                             stdin="Once upon a time\n"))

    def test_seeds(self):
        flags = ["run", "Once upon a time", "-n", "16"]
        self.assertEqual(self.succeeds(*flags, "--seed", "1"), self.succeeds(*flags, "--seed", "1"))
        self.assertNotEqual(self.succeeds(*flags, "--seed", "1"),
                            self.succeeds(*flags, "--seed", "2"))

    def test_recommended_sampling(self):
        """From generation_config.json, as in the server."""
        model = self.path("m")
        os.mkdir(model)
        for name in os.listdir(LLAMA):
            os.symlink(os.path.abspath(os.path.join(LLAMA, name)), os.path.join(model, name))

        def outputs(*flags):
            return len({self.succeeds("run", *flags, "-n", "8", "--seed", seed) for seed in "1234"})
        text = ("Once upon a time", "--generation-config", model)
        ids = (model, "--ids", self.write("ids.json", "[[5, 6, 7]]"), "--print-ids")
        self.write("m/generation_config.json", '{"top_k": 1, "temperature": 0.9}')
        self.assertEqual(outputs(*text), 1)
        self.assertEqual(outputs(*text, "--top-k", "0"), 4)
        self.assertEqual(outputs("Once upon a time"), 4)
        self.assertEqual(outputs(*ids), 4)
        self.assertEqual(outputs(*ids, "--generation-config", "auto"), 1)
        gguf = self.path("m.gguf")  # the GGUF file includes it, as with llama.cpp's converter
        self.succeeds("convert", model, "-o", gguf, "--type", "f16")
        self.assertEqual(outputs(gguf, *ids[1:], "--generation-config", "auto"), 1)
        self.assertEqual(outputs(gguf, *ids[1:]), 4)
        self.succeeds("convert", model, "-o", gguf, "--type", "f16", "--force",
                      "--set", "general.sampling.top_p=7.5")
        self.fails(2, "run", gguf, *ids[1:], "--generation-config", "auto",
                   says="--generation-config none")
        self.write("m/generation_config.json", '{"repetition_penalty": 1.1}')
        self.assertEqual(outputs(*text, "--beams", "2"), 1)
        self.write("m/generation_config.json", '{"top_p": 7}')
        for command in ("run", "chat"):
            self.fails(2, command, model, says="--generation-config none")

    def test_json(self):
        prompts = self.write("p.txt", 'Once upon\n"The\\nsea"\n\nA man\n')
        lines = self.succeeds("run", "default", "-f", prompts, "-n", "4", "--temp", "0", "--json",
                              "--samples", "2", "--logprobs", "2").splitlines()
        entries = [json.loads(line) for line in lines]
        self.assertEqual([e["prompt"] for e in entries],
                         ["Once upon"] * 2 + ["The\nsea"] * 2 + ["A man"] * 2)
        self.assertEqual([e["sample"] for e in entries], [0, 1] * 3)
        for e in entries:
            self.assertEqual(e["finish_reason"], "length")
            self.assertEqual(len(e["ids"]), 4)
            self.assertEqual(len(e["logprobs"]), 4)
            for id_, chosen in zip(e["ids"], e["logprobs"]):
                self.assertEqual(len(chosen), 3)
                self.assertEqual(chosen[0]["id"], id_)
                self.assertEqual(chosen[1], chosen[0])  # greedy: the chosen token is the best one
                self.assertLessEqual(chosen[2]["logprob"], chosen[1]["logprob"])

    def test_limits(self):
        flags = ["run", "Once upon a time", "--json"]
        ids = json.loads(self.succeeds("tokenize", "default", "Once upon a time", "--json"))
        nothing = json.loads(self.succeeds(*flags, "-n", "0"))
        self.assertEqual((nothing["text"], nothing["ids"]), ("", []))
        self.assertEqual(nothing["prompt_tokens"], len(ids))
        self.assertEqual(self.succeeds("run", "Once upon a time", "-n", "0"), "\n")
        result = run(*flags, "-n", "-1", "--ignore-eos", "--max-model-len", "300")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(len(json.loads(result.stdout)["ids"]), 300 - len(ids))
        self.assertIn("the context is full (300 tokens)", result.stderr)
        self.fails(2, *flags, "-n", "-2", says="--max-tokens: must be at least 0, or -1")
        self.fails(2, "chat", "default", "-n", "0", says="-n 0")

    TEMPLATE = ("{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                "<assistant>")

    def with_template(self):
        """A copy of the embedded model that has a chat template."""
        with open(os.path.join(SOURCE, "models/default.gguf"), "rb") as f:
            data = f.read()
        version, tensors, entries = struct.unpack("<IQQ", data[4:24])
        packed = [x.encode() for x in ("tokenizer.chat_template", self.TEMPLATE)]
        entry = (struct.pack("<Q", len(packed[0])) + packed[0] + struct.pack("<IQ", 8, len(packed[1])) + packed[1])
        # Tensors follow at a multiple of the alignment: the entry is padded to one.
        name = b"x"
        unused = -(len(entry) + 8 + len(name) + 4 + 8) % 32
        entry += struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, unused) + b" " * unused
        self.assertEqual(len(entry) % 32, 0)
        return self.write("chat.gguf", data[:4] + struct.pack("<IQQ", version, tensors, entries + 2)
                          + entry + data[24:])

    def test_template(self):
        model = self.with_template()
        flags = ["-n", "8", "--temp", "0"]
        rendered = self.succeeds("run", model, "--raw", "<user>Hello<assistant>", *flags)
        self.assertNotEqual(self.succeeds("run", model, "--raw", "Hello", *flags), rendered)
        said = run("run", model, "Hello", *flags)
        self.assertEqual((said.returncode, said.stdout), (0, rendered))
        self.assertEqual(said.stderr.count("--raw"), 1, said.stderr)
        asked = run("run", model, "--chat", "Hello", *flags)
        self.assertEqual((asked.stdout, asked.stderr), (rendered, ""))
        self.assertEqual(run("run", model, "--raw", "Hello", *flags).stderr, "")
        prompts = self.write("p.txt", "Hello\nHello\n")
        lines = self.succeeds("run", model, "-f", prompts, "--json", *flags).splitlines()
        for line in map(json.loads, lines):
            self.assertEqual((line["prompt"], line["text"] + "\n"), ("Hello", rendered))
        self.assertEqual(
            self.succeeds("run", model, "Hello", "--system", "Be brief.", *flags),
            self.succeeds("run", model, "--raw", "<system>Be brief.<user>Hello<assistant>", *flags))
        path = self.write("t.jinja", self.TEMPLATE)
        self.assertEqual(self.succeeds("run", "default", "Hello", "--chat-template", path,
                                       "--repetition-penalty", "1", *flags), rendered)

    def test_sampling_beside_a_file(self):
        model = self.with_template()

        def outputs(*flags):
            return len({self.succeeds("run", model, "--raw", "Once upon a time", "-n", "8", "--seed", seed, *flags)
                        for seed in "1234"})
        self.assertEqual(outputs(), 4)
        path = self.write("chat.generation_config.json", '{"top_k": 1}')
        self.assertEqual(outputs(), 1)
        self.assertEqual(outputs("--generation-config", "none"), 4)
        self.write("chat.generation_config.json", '{"top_k": -7}')
        self.fails(2, "run", model, "Hello", says=path)

    def test_the_embedded_model_says_the_same_each_time(self):
        first = self.succeeds("run", "Once upon a time", "-n", "40")
        self.assertEqual(self.succeeds("run", "Once upon a time", "-n", "40"), first)
        self.assertEqual(self.succeeds("run", "default", "Once upon a time", "-n", "40", "--seed",
                                       "2", "--temp", "0.6", "--repetition-penalty", "1.15"), first)

    def test_stop(self):
        flags = ["run", "Once upon a time", "-n", "40", "--temp", "0"]
        text = self.succeeds(*flags)
        word = text.split()[6]
        stopped = self.succeeds(*flags, "--stop", word)
        self.assertEqual(stopped.rstrip("\n"), text[:text.index(word)])

    def test_speed_line(self):
        result = run("run", "Once upon a time", "-n", "8", "--stats")
        self.assertRegex(result.stderr, r"\d+ tokens of prompt in .* tokens written in ")

    def test_verbose_prints_the_plan(self):
        result = run("run", "Once", "-n", "1", "--verbose")
        self.assertEqual(result.returncode, 0)
        self.assertRegex(result.stderr, r"(?i)weights")


class Tokenize(Case):
    TEXTS = ["Hello, world", "", " two  spaces", "naïve 東京 🙂", "a\nb\t", "\u0000x", "<s>"]

    def test_there_and_back(self):
        lines = "".join(json.dumps(t) + "\n" for t in self.TEXTS)
        ids = self.succeeds("tokenize", "default", "--jsonl", "--no-special", stdin=lines)
        self.assertEqual(len(ids.splitlines()), len(self.TEXTS))
        back = self.succeeds("tokenize", "default", "--jsonl", "--decode", stdin=ids)
        self.assertEqual([json.loads(line) for line in back.splitlines()], self.TEXTS)

    def test_special_tokens(self):
        with_bos = json.loads(self.succeeds("tokenize", "default", "--jsonl", stdin='"Hi"\n'))
        without = json.loads(self.succeeds("tokenize", "default", "--jsonl", "--no-special",
                                           stdin='"Hi"\n'))
        self.assertEqual(with_bos, [1] + without)

    def test_answers_line_by_line(self):
        with subprocess.Popen([FRESHET, "tokenize", "default", "--jsonl"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, bufsize=1) as process:
            for text in ("one", "two"):
                process.stdin.write(json.dumps(text) + "\n")
                process.stdin.flush()
                self.assertIsInstance(json.loads(process.stdout.readline()), list)
            process.stdin.close()
            self.assertEqual(process.wait(PATIENCE), 0)

    def test_ids_that_there_are_not(self):
        self.fails(2, "tokenize", "default", "--decode", "[1, 16384]", says="16384")
        self.fails(2, "tokenize", "default", "--decode", "--jsonl", stdin="[99999]\n",
                   says="line 1: token id 99999")

    def test_wrong_lines(self):
        for line in ("no json", "[1, 2]", '{"a": 1}'):
            self.fails(2, "tokenize", "default", "--jsonl", stdin=line + "\n", says="line 1")
        for line in ('"text"', "[1, -5]", "[1.5]", "[99999999999999]"):
            self.fails(2, "tokenize", "default", "--jsonl", "--decode", stdin=line + "\n")

    def test_text(self):
        self.assertIn("2 tokens", self.succeeds("tokenize", "default", "Once upon", "--no-special"))
        self.assertIsInstance(json.loads(self.succeeds("tokenize", "default", "Hi", "--json")), list)


class Templates(Case):
    TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                "{% if add_generation_prompt %}<assistant>{% endif %}{{ name }}")

    def test_variables(self):
        path = self.write("t.jinja", self.TEMPLATE)
        messages = [{"role": "user", "content": "Hi"}]
        self.assertEqual(self.succeeds("apply-template", path, stdin=json.dumps(messages)),
                         "<user>Hi<assistant>")
        context = {"messages": messages, "add_generation_prompt": False, "name": "é"}
        self.assertEqual(self.succeeds("apply-template", path, stdin=json.dumps(context)),
                         "<user>Hié")

    def test_time(self):
        path = self.write("t.jinja", "{{ strftime_now('%d %b %Y') }}")
        self.assertEqual(self.succeeds("apply-template", path, "--now", "2024-07-26T12:30:00",
                                       stdin="{}"), "26 Jul 2024")
        self.fails(2, "apply-template", path, "--now", "yesterday", stdin="{}")

    def test_wrong(self):
        path = self.write("t.jinja", "{{ raise_exception('no') }}")
        self.fails(2, "apply-template", path, stdin="{}", says="no")
        self.fails(2, "apply-template", self.write("u.jinja", "{% if %}"), stdin="{}")
        self.fails(2, "apply-template", path, stdin="not json")
        self.fails(2, "apply-template", path, stdin="5")
        self.fails(2, "apply-template", self.path("none.jinja"), stdin="{}")
        endless = self.write("e.jinja", "{% for i in range(99999999999) %}x{% endfor %}")
        self.fails(2, "apply-template", endless, stdin="{}")


class Inspect(Case):
    def test_json(self):
        about = json.loads(self.succeeds("inspect", "default", "--json", "--kernels"))
        self.assertEqual(about["architecture"], "llama")
        self.assertEqual(about["container"], "gguf")
        self.assertEqual(len(about["layers"]), 5)
        self.assertEqual([l["branches"] for l in about["layers"]], [["gqa", "mlp"]] * 5)
        self.assertEqual(about["layers"][0]["attention"], "gqa")
        self.assertEqual(sum(f["tensors"] for f in about["formats"]), len(about["tensors"]))
        self.assertEqual(sum(t["bytes"] for t in about["tensors"]), about["bytes"])
        self.assertTrue(all(k["kernel"] for k in about["kernels"]))

    def test_forced_kernels(self):
        about = json.loads(self.succeeds("inspect", "default", "--json", "--kernels", "--cpu-isa",
                                         "scalar"))
        for kernel in about["kernels"]:
            self.assertTrue(kernel["kernel"].endswith(".scalar"), kernel)

    def test_folder_as_text(self):
        text = self.succeeds("inspect", os.path.join(GOLDEN, "deepseek-v2"), "--tensors")
        for word in ("latent attention", "experts", "BF16"):
            self.assertIn(word, text)
        self.assertIsInstance(json.loads(self.succeeds("inspect", LLAMA, "--metadata")), dict)


class Convert(Case):
    def logits(self, model, ids):
        self.succeeds("eval", "logits", model, "--ids", ids, "-o", self.path("o.safetensors"),
                      "--reference")
        return load_safetensors(self.path("o.safetensors"))["logits_0"][1]

    def test_every_architecture_computes_the_same(self):
        ids = self.write("ids.json", json.dumps([list(range(3, 40))]))
        for name in sorted(os.listdir(GOLDEN)):
            if name in ("deepseek-v2", "deepseek-v3", "gpt-oss", "opt"):
                continue
            folder, file = os.path.join(GOLDEN, name), self.path(name + ".gguf")
            self.succeeds("convert", folder, "-o", file, "--type", "bf16")
            want, got = self.logits(folder, ids), self.logits(file, ids)
            largest = max(abs(x) for x in want)
            worst = max(abs(a - b) for a, b in zip(want, got))
            self.assertLess(worst, 1e-5 * largest, name)

    def test_a_model_without_vocabulary_says_so(self):
        path = self.path("o.gguf")
        self.succeeds("convert", LLAMA, "-o", path, "--type", "f32")
        self.fails(2, "run", path, "hi", "-n", "2", says="no vocabulary")
        about = json.loads(self.succeeds("inspect", "default", "--json"))
        self.assertEqual(about["model"], "default")

    def test_the_head_in_the_file_counts(self):
        folder = self.path("head")
        shutil.copytree(LLAMA, folder)
        with open(os.path.join(folder, "config.json")) as f:
            config = json.load(f)
        self.write(os.path.join(folder, "config.json"),
                   json.dumps({**config, "tie_word_embeddings": True}))
        ids = self.write("ids.json", json.dumps([[5, 6, 7, 8]]))
        run_it = ["--ids", ids, "-n", "8", "--temp", "0", "--print-ids"]
        want = self.succeeds("run", LLAMA, *run_it)
        self.assertEqual(self.succeeds("run", folder, *run_it), want)
        index = os.path.join(folder, "model.safetensors.index.json")
        self.write(index, json.dumps({"weight_map": {"lm_head.weight": "gone.safetensors"}}))
        self.assertEqual(self.succeeds("run", folder, *run_it), want)
        path = self.path("head.gguf")  # the converter ignores that index as well
        self.succeeds("convert", folder, "-o", path, "--type", "f32")
        self.assertEqual(self.succeeds("run", path, *run_it), want)

    def test_types(self):
        sizes = {}
        for name in ("f32", "f16", "bf16", "q8_0", "q6_k", "q4_k", "q4_k_m", "q4_0"):
            path = self.path(name + ".gguf")
            self.succeeds("convert", LLAMA, "-o", path, "--type", name)
            self.succeeds("inspect", path)
            sizes[name] = os.path.getsize(path)
        self.assertGreater(sizes["f32"], sizes["bf16"])
        self.assertGreater(sizes["bf16"], sizes["q8_0"])

    def gguf_types(self, path):
        """Tensor name -> ggml type, from the file's tensor table."""
        with open(path, "rb") as f:
            data = f.read()
        sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
        at = 24

        def text(at):
            size = struct.unpack_from("<Q", data, at)[0]
            return data[at + 8:at + 8 + size].decode(), at + 8 + size

        def value(kind, at):
            if kind == 8:
                return text(at)[1]
            if kind != 9:
                return at + sizes[kind]
            inner, count = struct.unpack_from("<IQ", data, at)
            at += 12
            for _ in range(count):
                at = value(inner, at)
            return at

        tensors, keys = struct.unpack_from("<QQ", data, 8)
        for _ in range(keys):
            _, at = text(at)
            at = value(struct.unpack_from("<I", data, at)[0], at + 4)
        types = {}
        for _ in range(tensors):
            name, at = text(at)
            dimensions = struct.unpack_from("<I", data, at)[0]
            at += 4 + 8 * dimensions
            types[name] = struct.unpack_from("<I", data, at)[0]
            at += 12
        return types

    def importance(self, name, columns, dataset=b"text.txt"):
        """A .dat for the golden model: `columns` is the width of the first tensor."""
        entries = []
        for layer in range(2):
            for part, width in (("attn_q", columns), ("attn_k", 64), ("attn_v", 64), ("attn_output", 64),
                                ("ffn_gate", 64), ("ffn_up", 64), ("ffn_down", 160)):
                tensor = f"blk.{layer}.{part}.weight".encode()
                values = struct.pack(f"<{width}f", *(1.0 + 100.0 * (i % 3) for i in range(width)))
                entries.append(struct.pack("<i", len(tensor)) + tensor + struct.pack("<ii", 1, width) + values)
        return self.write(name, struct.pack("<i", len(entries)) + b"".join(entries) +
                          struct.pack("<ii", 7, len(dataset)) + dataset)

    def test_types_of_tensors(self):
        path = self.path("o.gguf")
        self.succeeds("convert", LLAMA, "-o", path, "--type", "q4_0", "--tensor-type", "attn_(q|k)=q8_0",
                      "--tensor-type", "blk.0.attn=q5_1", "--output-tensor-type", "f16",
                      "--token-embedding-type", "bf16")
        types = self.gguf_types(path)
        want = {"blk.0.attn_q": 8, "blk.0.attn_v": 7, "blk.1.attn_v": 2, "blk.1.ffn_up": 2, "output": 1,
                "token_embd": 30, "blk.0.attn_norm": 0}
        self.assertEqual({name: types[name + ".weight"] for name in want}, want)
        for option, says in ((["--tensor-type", "attn_x=q8_0"], "applies to no quantised tensor"),
                             (["--tensor-type", "attn_q"], "PATTERN=TYPE"),
                             (["--tensor-type", "attn_q=q9"], "q8_0"),
                             (["--output-tensor-type", "q6_k"], "rows of 64 numbers"),
                             (["--token-embedding-type", "q9"], "--token-embedding-type"),
                             (["--include-weights", "attn"], "--imatrix")):
            self.fails(2, "convert", LLAMA, "-o", path, "--force", *option, says=says)

    def test_importance_matrix(self):
        plain, weighted, path = self.path("p.gguf"), self.path("w.gguf"), self.path("o.gguf")
        matrix = self.importance("m.dat", 64)
        self.succeeds("convert", LLAMA, "-o", plain, "--type", "q4_1")
        self.succeeds("convert", LLAMA, "-o", weighted, "--type", "q4_1", "--imatrix", matrix)
        metadata = json.loads(self.succeeds("inspect", weighted, "--metadata"))
        self.assertEqual(metadata["quantize.imatrix.file"], matrix)
        self.assertEqual(metadata["quantize.imatrix.dataset"], "text.txt")
        self.assertEqual(metadata["quantize.imatrix.entries_count"], 14)
        self.assertEqual(metadata["quantize.imatrix.chunks_count"], 7)
        self.assertNotIn("quantize.imatrix.file", json.loads(self.succeeds("inspect", plain, "--metadata")))
        ids = self.write("ids.json", json.dumps([[5, 6, 7, 8, 9]]))
        self.assertNotEqual(list(self.logits(plain, ids)), list(self.logits(weighted, ids)))
        self.succeeds("convert", LLAMA, "-o", path, "--type", "q4_1", "--imatrix", matrix, "--exclude-weights",
                      "blk")
        self.assertEqual(list(self.logits(plain, ids)), list(self.logits(path, ids)))
        for wrong, says in ((self.importance("w.dat", 32), "made for another model"),
                            (self.write("cut.dat", b"\x01\0\0\0\xff\xff"), "importance matrix"),
                            (plain, "without an importance matrix"), (self.path("none.dat"), "none.dat")):
            self.assertNotEqual(run("convert", LLAMA, "-o", path, "--force", "--imatrix", wrong).returncode, 0)
            self.assertIn(says, run("convert", LLAMA, "-o", path, "--force", "--imatrix", wrong).stderr)

    def test_target_sizes(self):
        path, other = self.path("o.gguf"), self.path("p.gguf")
        for size in (75000, 100000):
            self.succeeds("convert", LLAMA, "-o", path, "--target-size", str(size), "--force")
            self.assertLessEqual(os.path.getsize(path), size)
            self.assertGreater(os.path.getsize(path), 0.9 * size)
            self.succeeds("convert", LLAMA, "-o", other, "--target-size", str(size), "--force", "-t", "1")
            with open(path, "rb") as a, open(other, "rb") as b:
                self.assertEqual(a.read(), b.read())
        self.succeeds("convert", LLAMA, "-o", path, "--target-bpw", "6.5", "--tensor-type", "attn_q=q4_0",
                      "--force")
        types = self.gguf_types(path)
        self.assertEqual({types[f"blk.{i}.attn_q.weight"] for i in range(2)}, {2})
        self.assertGreater(len(set(types.values())), 2)
        for options, says in ((["--target-size", "1000"], "too small"), (["--target-bpw", "-1"], "--target-bpw"),
                              (["--target-size", "many"], "not a size"),
                              (["--target-bpw", "4", "--type", "q8_0"], "leave out --type")):
            self.fails(2, "convert", LLAMA, "-o", path, "--force", *options, says=says)

    def test_refusals(self):
        path = self.path("o.gguf")
        self.fails(2, "convert", LLAMA, "-o", path, "--type", "q9", says="q8_0")
        self.fails(2, "convert", os.path.join(GOLDEN, "deepseek-v2"), "-o", path, says="deepseek_v2")
        self.assertFalse(os.path.exists(path))
        self.succeeds("convert", LLAMA, "-o", path)
        self.fails(2, "convert", LLAMA, "-o", path, says="--force")
        self.fails(2, "convert", path, "-o", self.path("p.gguf"), says="Hugging Face")
        self.fails(1, "convert", LLAMA, "-o", self.path("no/such/folder/o.gguf"))
        pipe = self.path("pipe")
        os.mkfifo(pipe)  # stands in for a device: only regular files are replaced
        self.fails(1, "convert", LLAMA, "-o", pipe, "--force", says="not a regular file")
        self.assertTrue(stat.S_ISFIFO(os.stat(pipe).st_mode))

    def golden_with(self, name, **changes):
        """A golden model with a byte-level vocabulary of its size, and changes to its files."""
        folder = self.path(name)
        shutil.copytree(LLAMA, folder)
        with open(os.path.join(folder, "config.json")) as f:
            rows = json.load(f)["vocab_size"]
        letters = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
        others = [b for b in range(256) if b not in letters]
        vocab = {chr(b): i for i, b in enumerate(letters)}
        vocab.update({chr(256 + i): len(letters) + i for i in range(len(others))})
        self.assertGreater(rows, 258)
        added = [{"id": 257, "content": "<s>", "special": True, "normalized": False},
                 {"id": 258, "content": "</s>", "special": True, "normalized": False}]
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        tokenizer = {"version": "1.0", "added_tokens": added, "normalizer": None,
                     "pre_tokenizer": level, "decoder": {"type": "ByteLevel"},
                     "post_processor": None,
                     "model": {"type": "BPE", "vocab": vocab, "merges": ["h i"]}}
        tokenizer["model"]["vocab"]["hi"] = 256
        tokenizer.update(changes.pop("tokenizer", {}))
        files = {"tokenizer.json": tokenizer,
                 "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}}
        for file, value in {**files, **changes.pop("files", {})}.items():
            os.makedirs(os.path.dirname(os.path.join(folder, file)), exist_ok=True)
            with open(os.path.join(folder, file), "w") as f:
                f.write(value if isinstance(value, str) else json.dumps(value))
        return folder

    def test_folder_and_file_are_one_language(self):
        ends = {"type": "TemplateProcessing", "pair": [], "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]}
                               for t, i in (("<s>", 257), ("</s>", 258))}}
        level = {"type": "ByteLevel", "add_prefix_space": True}
        for name, changes, named in (
                ("plain", {}, ""), ("ends", {"post_processor": ends}, ""),
                ("lower", {"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
                ("prefix", {"pre_tokenizer": level}, "add_prefix_space")):
            folder, file = self.golden_with(name, tokenizer=changes), self.path(name + ".gguf")
            done = run("convert", folder, "-o", file)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(named, done.stderr)
            self.assertEqual(done.stderr.count("warning"), 1 if named else 0, done.stderr)
            text = json.dumps("Hi hi THERE </s>")
            ids = self.succeeds("tokenize", folder, "--jsonl", stdin=text)
            self.assertEqual(self.succeeds("tokenize", file, "--jsonl", stdin=text), ids)

    def test_templates_go_along(self):
        named = [{"name": "default", "template": "plain {{ pad_token + 'x' }}"},
                 {"name": "tool_use", "template": "{{ tools | length }} tools"}]
        config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": {"content": "<pad>"},
                  "chat_template": named}
        folder = self.golden_with("named", files={"tokenizer_config.json": config})
        file = self.path("named.gguf")
        self.succeeds("convert", folder, "-o", file)
        tools = json.dumps({"messages": [], "tools": [{"type": "function"}]})
        for model in (folder, file):
            self.assertEqual(self.succeeds("apply-template", model, stdin="[]"), "plain <pad>x")
            self.assertEqual(self.succeeds("apply-template", model, stdin=tools), "1 tools")
        only = self.golden_with("only", files={"tokenizer_config.json": {"chat_template": named[1:]}})
        self.fails(2, "apply-template", only, stdin="[]", says="no default chat template")
        self.assertEqual(self.succeeds("apply-template", only, stdin=tools), "1 tools")

    def test_malformed_vocabularies_are_named(self):
        model = {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0, "b": 1, "ab": 2},
                 "merges": ["ab"]}
        folder = self.golden_with("bad", tokenizer={"model": model, "pre_tokenizer": None})
        self.fails(2, "convert", folder, "-o", self.path("b.gguf"), says="tokenizer.json: model")

    def test_metadata(self):
        path = self.path("o.gguf")
        self.succeeds("convert", LLAMA, "-o", path, "--set", "general.license=mit", "--set",
                      "x.flag=true", "--name", "Test")
        metadata = json.loads(self.succeeds("inspect", path, "--metadata"))
        self.assertEqual(metadata["general.license"], "mit")
        self.assertEqual(metadata["general.name"], "Test")
        self.assertIs(metadata["x.flag"], True)


class Eval(Case):
    def test_logits_are_the_golden_ones(self):
        golden = load_safetensors(os.path.join(LLAMA, "golden.safetensors"))
        lists = [list(golden[f"ids_{i}"][1]) for i in indices(golden)]
        ids = self.write("ids.json", json.dumps(lists))
        out = self.path("o.safetensors")
        about = json.loads(self.succeeds("eval", "logits", LLAMA, "--ids", ids, "-o", out, "--json",
                                         "--reference"))
        self.assertEqual(about["sequences"], len(lists))
        got = load_safetensors(out)
        for place, i in enumerate(indices(golden)):
            self.assertEqual(got[f"logits_{place}"][0], golden[f"logits_{i}"][0])
            want = golden[f"logits_{i}"][1]
            largest = max(abs(x) for x in want)
            worst = max(abs(a - b) for a, b in zip(want, got[f"logits_{place}"][1]))
            self.assertLess(worst, 2e-4 * largest)

    def test_inputs_are_read_from_golden_files(self):
        """A file of reference outputs, as it is: the same as its ids in JSON."""
        path = os.path.join(LLAMA, "golden.safetensors")
        golden = load_safetensors(path)
        by_ids, by_inputs = self.path("a.safetensors"), self.path("b.safetensors")
        count = 0
        while f"ids_{count}" in golden:
            count += 1
        lists = [list(golden[f"ids_{i}"][1]) for i in range(count)]
        ids = self.write("ids.json", json.dumps(lists))
        self.succeeds("eval", "logits", LLAMA, "--ids", ids, "-o", by_ids)
        self.succeeds("eval", "logits", LLAMA, "--inputs", path, "-o", by_inputs)
        with open(by_ids, "rb") as a, open(by_inputs, "rb") as b:
            self.assertEqual(a.read(), b.read())
        flags = ("-n", "8", "--temp", "0", "--print-ids")
        self.assertEqual(self.succeeds("run", LLAMA, "--inputs", path, *flags),
                         self.succeeds("run", LLAMA, "--ids", ids, *flags))
        self.fails(2, "eval", "logits", LLAMA, "--inputs", path, "--ids", ids, "-o", by_ids,
                   says="either --ids or --inputs")
        self.fails(2, "eval", "logits", LLAMA, "-o", by_ids, says="either --ids or --inputs")
        self.fails(2, "run", LLAMA, "--inputs", path, "--ids", ids, says="either --ids or --inputs")
        weights = os.path.join(LLAMA, "model.safetensors")
        self.fails(2, "eval", "logits", LLAMA, "--inputs", weights, "-o", by_ids, says="'ids_0'")

    def test_perplexity(self):
        text = self.write("t.txt", "The sea was calm and the ship lay still. " * 40)
        about = json.loads(self.succeeds("eval", "perplexity", "default", text, "--window", "64",
                                         "--json"))
        self.assertEqual(about["tokens"], about["windows"] * 64)
        self.assertGreater(about["nats_per_token"], 0.0)
        self.assertLess(about["nats_per_token"], 9.7)  # log(16384): a uniform guess
        shorter = json.loads(self.succeeds("eval", "perplexity", "default", text, "--window", "64",
                                           "--max-chars", "600", "--json"))
        self.assertLess(shorter["tokens"], about["tokens"])
        self.fails(2, "eval", "perplexity", "default", text, "--max-chars", "5", says="window")

    def test_speculation(self):
        text = self.write("t.txt", "The sea was calm and the ship lay still. " * 40)
        flags = ["eval", "speculation", "default", "--text", text, "--prompts", "2", "--turns", "2",
                 "--prompt-tokens", "40", "--max-tokens", "40", "--speculative-config"]
        for config, more in (({"method": "ngram", "num_speculative_tokens": 3}, []),
                             ({"method": "ngram"}, ["--clients", "2"]),
                             ({"method": "early_exit", "num_speculative_tokens": 2},
                              ["--temp", "0.8", "--seed", "7"])):
            about = json.loads(self.succeeds(*flags, json.dumps(config), "--json", *more))
            self.assertIs(about["equal"], True)
            self.assertGreaterEqual(about["acceptance_length"], 1.0)
            positions = about["acceptance_by_position"]
            self.assertEqual(positions, sorted(positions, reverse=True))
            self.assertAlmostEqual(about["acceptance_length"], 1.0 + sum(positions))
            self.assertGreater(about["speedup"], 0.0)
            self.assertGreater(about["predicted_speedup"], 0.0)
            self.assertNotIn("wiring", about)
            if "num_speculative_tokens" in config:
                self.assertGreater(about["drafts"], 0)
                self.assertLessEqual(len(positions), config["num_speculative_tokens"])
        out = self.succeeds(*flags, '{"method": "ngram"}')
        self.assertIn("equal to plain decoding", out)
        self.fails(2, *flags[:-1], says="--speculative-config")
        self.fails(2, *flags, '{"method": "x"}', says="unknown method")
        self.fails(2, *flags, '{"method": "ngram"}', "--prompt-tokens", "4000", says="tokens")

    def test_batches_do_not_change_perplexity(self):
        text = self.write("t.txt", "She had never seen the town before, and it pleased her. " * 40)
        flags = ["eval", "perplexity", "default", text, "--window", "50", "--json"]
        self.assertEqual(self.succeeds(*flags, "--batch", "1"), self.succeeds(*flags, "--batch", "7"))


class Bench(Case):
    FLAGS = ["bench", "-p", "16", "-n", "4", "-pg", "8,4", "-d", "0,32", "-r", "2", "-m", LLAMA]
    TESTS = ["pp16", "tg4", "pp8+tg4", "pp16 @ d32", "tg4 @ d32", "pp8+tg4 @ d32"]

    def test_ceilings(self):
        rates = {c["name"]: c["rate"] for c in json.loads(self.succeeds("bench", "ceilings", "--json", "-t", "1"))}
        self.assertGreater(rates["read"], 1e8)
        self.fails(2, "bench", "ceilings", "--cpu-isa", "mmx")

    def test_beyond_the_context(self):
        for prompt, beyond in (("512", False), ("513", True)):
            done = run("bench", "-m", LLAMA, "-p", prompt, "-n", "0", "-r", "1")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual("513 tokens exceed the model's context of 512" in done.stderr, beyond)

    def test_shapes_load(self):
        for kind in ("q4_0", "q8_0", "q4_k_m", "q6_k", "bf16", "f16"):
            path = self.path(kind + ".gguf")
            subprocess.run([sys.executable, os.path.join(SOURCE, "tools/shape_gguf.py"), path, "--type", kind,
                            "--layers", "2", "--hidden", "256", "--ffn", "512", "--heads", "4", "--kv-heads", "2",
                            "--vocab", "1024"], check=True)
            rows = json.loads(self.succeeds("bench", "-m", path, "-p", "8", "-n", "2", "-r", "1", "--json"))
            self.assertEqual([row["test"] for row in rows], ["pp8", "tg2"])
            # For prompt tokens, the last layer computes only keys and values; it computes
            # everything else for the last token alone.
            keys, layer, head = 2 * 128 * 256, 3 * 256 * 256 + 3 * 256 * 512, 1024 * 256
            for row, n, want in ((rows[0], 8, 16 * layer - 7 * (layer - keys) + head),
                                 (rows[1], 2, 2 * (2 * layer + head))):
                done = row["operations_per_s"] * n / row["median_ts"]
                self.assertAlmostEqual(done / (2 * want), 1.0, places=6)

    def test_json(self):
        rows = json.loads(self.succeeds(*self.FLAGS, "-o", "json"))
        self.assertEqual([r["test"] for r in rows], self.TESTS)
        for r in rows:
            self.assertGreater(r["median_ts"], 0.0)
            self.assertEqual(len(r["samples_ts"]), 2)
            self.assertGreater(r["ceiling_read_bytes_per_s"], 0.0)
            self.assertIn("read_fraction", r)
        self.assertEqual(rows, sorted(rows, key=lambda r: r["n_depth"]))

    def test_md_and_csv(self):
        text = self.succeeds(*self.FLAGS)
        for name in self.TESTS:
            self.assertRegex(text, rf"\| {re.escape(name)} +\|")
        lines = self.succeeds(*self.FLAGS, "-o", "csv").splitlines()
        self.assertEqual(len(lines), 7)
        self.assertEqual({len(line.split(",")) for line in lines}, {len(lines[0].split(","))})

    def test_what_fails_prints_no_table(self):
        for form in ("md", "csv", "json"):
            self.fails(2, "bench", "-m", LLAMA, "--load-format", "dummy:q9", "-o", form, says="dummy:q9")

    def test_speculation(self):
        config = json.dumps({"method": "draft_model", "model": LLAMA, "num_speculative_tokens": 3})
        flags = ["bench", "-m", LLAMA, "-p", "16", "-n", "24", "-pg", "8,12", "-d", "0,32", "-r", "2",
                 "--speculative-config", config]
        rows = json.loads(self.succeeds(*flags, "--json"))
        self.assertEqual([r["test"] for r in rows],
                         ["pp16", "tg24", "pp8+tg12", "pp16 @ d32", "tg24 @ d32", "pp8+tg12 @ d32"])
        for r in rows:
            self.assertGreater(r["median_ts"], 0.0)
            self.assertEqual(len(r["samples_ts"]), 2)
            self.assertNotIn("read_fraction", r)
            if r["n_gen"] == 0:
                self.assertNotIn("spec_decode_num_drafts", r)
                continue
            # The model agrees with itself: 4 tokens a step, but for the end of each text.
            self.assertEqual(r["spec_decode_acceptance_rate"], 100.0)
            self.assertGreater(r["spec_decode_acceptance_length"], 3.5)
            self.assertEqual(r["spec_decode_accepted_tokens"], r["spec_decode_draft_tokens"])
        lines = self.succeeds(*flags, "-o", "csv").splitlines()
        self.assertEqual({len(line.split(",")) for line in lines}, {len(lines[0].split(","))})
        self.assertRegex(self.succeeds(*flags), r"tg24 +\| .* \| +[34]\.\d\d \| +100\.0 % \|")
        several = json.loads(self.succeeds("bench", "-m", LLAMA, "-p", "0", "-n", "8", "--sequences", "3", "-r", "1",
                                           "--speculative-config", '{"method": "ngram"}', "--json"))
        self.assertEqual(several[0]["test"], "tg8 x 3")
        self.fails(2, "bench", "-m", LLAMA, "--speculative-config", '{"method": "x"}', says="unknown method")

    # A small model as config.json alone.
    def shape(self):
        folder = os.path.join(self.folder, "shape")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump({"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2000, "rms_norm_eps": 1e-5,
                       "max_position_embeddings": 2048, "tie_word_embeddings": False}, f)
        return folder

    def bench_random(self, config, *flags):
        config = json.dumps({"rejection_sample_method": "synthetic", **config})
        return json.loads(self.succeeds("bench", "-m", self.shape(), "--load-format", "dummy:bf16", "-p", "0", "-t",
                                        "1", "--json", "--speculative-config", config, *flags))[0]

    def test_random_weights_draft_with_a_synthetic_acceptance(self):
        for rates in ([0.73, 0.52, 0.36, 0.23, 0.15], [0.9, 0.2, 0.1, 0.1, 0.1]):
            row = self.bench_random({"method": "eagle3", "num_speculative_tokens": 5, "synthetic_acceptance_rates": rates},
                                    "-n", "400", "--sequences", "4", "-r", "2")
            # Drafts that are kept: their mean, and the standard error of the mean that was measured.
            mean = sum(rates)
            square = sum((2 * i + 1) * rate for i, rate in enumerate(rates))
            error = ((square - mean * mean) / row["spec_decode_num_drafts"]) ** 0.5
            # Four and a half errors: one run in 150,000 is further off. The last steps of a text have fewer drafts.
            self.assertLess(abs(row["spec_decode_acceptance_length"] - 1 - mean), 4.5 * error + 0.03)
            self.assertGreater(row["spec_decode_num_drafts"], 700)
            self.assertGreater(row["spec_decode_round_ms"], 0.0)
            self.assertGreater(row["spec_decode_step_ms"]["8"], row["spec_decode_step_ms"]["1"] * 0.5)
            self.assertGreater(row["spec_decode_gain"], 0.0)

    def test_random_weights_of_other_drafters(self):
        three = {"num_speculative_tokens": 3, "synthetic_acceptance_length": 3}
        for config in ({"method": "ngram", "prompt_lookup_min": 1}, {"method": "suffix"},
                       {"method": "draft_model", "model": self.shape()}, {"method": "early_exit", "exit_layer": 2},
                       {"method": "eagle3", "model": self.shape()}):
            row = self.bench_random({**config, **three}, "-n", "100", "-r", "1")
            self.assertGreater(row["spec_decode_acceptance_length"], 1.0, config)
        flags = ("bench", "-m", self.shape(), "--load-format", "dummy:f16", "--speculative-config")
        self.fails(2, *flags, json.dumps({"method": "medusa", "model": self.shape()}),
                   says="method medusa has no random weights")
        self.fails(2, *flags, '{"method": "draft_model"}', says="a folder with the drafter's config.json")
        self.fails(2, "bench", "-m", self.shape(), "--load-format", "dummy:q9", "--speculative-config",
                   '{"method": "ngram"}', says="dummy:q9")

    def test_engine_without_a_drafter(self):
        rows = json.loads(self.succeeds("bench", "-m", self.shape(), "--load-format", "dummy:bf16", "-p", "0", "-n", "8",
                                        "-t", "1", "-r", "1", "--engine", "--json"))
        self.assertEqual(rows[0]["test"], "tg8")
        self.assertNotIn("spec_decode_gain", rows[0])

    def test_throughput_of_random_weights(self):
        numbers = os.path.join(self.folder, "numbers.json")
        config = {"method": "eagle3", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
                  "synthetic_acceptance_length": 4}
        self.succeeds("bench", "throughput", self.shape(), "--load-format", "dummy:q8_0", "--num-prompts", "3",
                      "--input-len", "20", "--output-len", "41", "--speculative-config", json.dumps(config),
                      "--output-json", numbers)
        with open(numbers) as f:
            result = json.load(f)
        self.assertEqual(result["total_num_tokens"], 3 * 61)
        self.assertEqual(result["spec_decode_acceptance_rate"], 100.0)

    def test_sequences(self):
        rows = json.loads(self.succeeds("bench", "-m", LLAMA, "-p", "0", "-n", "4", "--sequences",
                                        "1,3", "-r", "1", "--json"))
        self.assertEqual([r["test"] for r in rows], ["tg4", "tg4 x 3"])


class Chat(Case):
    TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

    def test_turns_and_commands(self):
        path = self.write("t.jinja", self.TEMPLATE)
        script = "Hello\n/history\n/undo\n/history\n/system Be brief.\n/history\n/help\n/exit\nnever"
        text = self.succeeds("chat", "default", "--chat-template", path, "--temp", "0", "-n", "5",
                             stdin=script)
        self.assertIn("user: Hello\n", text)
        self.assertIn("assistant: ", text)
        self.assertIn("system: Be brief.\n", text)
        self.assertEqual(text.count("user: Hello"), 1)
        self.assertIn("/retry", text)
        self.assertNotIn("never", text)

    def test_several_lines(self):
        path = self.write("t.jinja", self.TEMPLATE)
        script = 'one\\\ntwo\n"""\nthree\n/exit\n"""\n /exit\n/history\n'
        text = self.succeeds("chat", "default", "--chat-template", path, "-n", "1", stdin=script)
        for message in ("one\ntwo", "three\n/exit", "/exit"):
            self.assertIn(f"user: {message}\nassistant:", text)

    def test_thoughts(self):
        """What the template opens as a thought is not part of the answer."""
        path = self.write("t.jinja", self.TEMPLATE + "{% if 0 %}</think>{% endif %}\n<think>\n")
        flags = ["chat", "default", "--chat-template", path, "--temp", "0", "-n", "6"]
        saved = self.path("chat.json")
        hidden = self.succeeds(*flags, stdin=f"Hello\n/save {saved}\n")
        with open(saved, encoding="utf-8") as f:
            messages = json.load(f)
        self.assertEqual(messages[1]["content"], "")
        self.assertTrue(messages[1]["reasoning_content"])
        self.assertEqual(hidden.strip(), "")
        shown = self.succeeds(*flags, "--show-thoughts", stdin="Hello\n")
        self.assertEqual(shown.strip(), messages[1]["reasoning_content"])

    def test_load(self):
        path = self.write("t.jinja", self.TEMPLATE)
        flags = ["chat", "default", "--chat-template", path, "-n", "1"]
        for wrong in ("{}", '[{"role": "king", "content": "x"}]', '[{"role": "user"}]', "[", "[1]"):
            self.fails(2, *flags, stdin=f"/load {self.write('c.json', wrong)}\n", says="c.json")
        saved = self.write("c.json", '{"messages": [{"role": "user", "content": "Hi"}]}')
        self.assertIn("user: Hi\n", self.succeeds(*flags, stdin=f"/load {saved}\n/history\n"))
        self.fails(2, *flags, stdin=f"/load {self.path('none.json')}\n", says="none.json")

    def test_unknown_command(self):
        path = self.write("t.jinja", self.TEMPLATE)
        result = run("chat", "default", "--chat-template", path, stdin="/nonsense\n")
        self.assertEqual(result.returncode, 2)
        self.assertIn("/help", result.stderr)

    def test_save_keeps_what_it_cannot_replace(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        path, saved = self.write("t.jinja", self.TEMPLATE), self.path("chat.json")
        model = os.path.join(SOURCE, "models/default.gguf")  # the embedded model uses a file itself
        flags = ["chat", model, "--chat-template", path, "-n", "1"]
        self.succeeds(*flags, stdin=f"Hello\n/save {saved}\n")
        with open(saved, encoding="utf-8") as f:
            text = f.read()
        self.assertEqual(json.loads(text)[0], {"role": "user", "content": "Hello"})
        env = {**os.environ, "FRESHET_CACHE_DIR": self.path("none")}
        result = run(*flags, stdin=f"A much longer text\n/save {saved}\n", preexec_fn=limit,
                     env=env)
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"cannot write {saved}: File too large", result.stderr)
        with open(saved, encoding="utf-8") as f:
            self.assertEqual(f.read(), text)
        self.assertEqual(sorted(os.listdir(self.folder)), ["chat.json", "t.jinja"])
        self.assertEqual(run(*flags, stdin="/save\n").returncode, 2)
        os.chmod(saved, 0o600)
        self.succeeds(*flags, stdin=f"Hi\n/save {saved}\n")
        self.assertEqual(os.stat(saved).st_mode & 0o777, 0o600)
        self.succeeds(*flags, stdin="Hello\n/save /dev/stdout\n")

    def on_a_terminal(self, *arguments, term="xterm"):
        """Starts a chat on its own terminal. Tests that wait for an answer need a seed: the small model's words, which
        come whole, are very long now and then.
        """
        path = self.write("t.jinja", self.TEMPLATE)
        pid, master = pty.fork()
        if pid == 0:
            os.environ.update(FRESHET_CACHE_DIR=self.folder, TERM=term)
            os.execv(FRESHET, [FRESHET, "chat", "default", "--chat-template", path, *arguments])
        terminal = Terminal(pid, master)
        # What shows the prompt; answers have other lines that begin like it.
        terminal.prompt = "\r\n> " if term == "dumb" else "\r\x1b[J> "
        self.addCleanup(terminal.close)
        terminal.wait_for("/help")
        terminal.wait_for(terminal.prompt)
        return terminal

    def test_terminal(self):
        """On a terminal Ctrl-C stops an answer and the conversation continues; Ctrl-D exits."""
        for term in ("xterm", "dumb", "none-such"):
            with self.subTest(term):
                terminal = self.on_a_terminal("-n", "1500", "--ignore-eos", "--seed", "1", *SLOWLY, term=term)
                terminal.write("Tell me a story\n")
                terminal.wait_for("\n")
                terminal.wait_for_answer()
                terminal.write("\x03")
                terminal.wait_for(terminal.prompt)
                terminal.write("/history\n")
                terminal.wait_for("user: Tell me a story")
                terminal.wait_for(terminal.prompt)
                terminal.write("half a line")
                terminal.wait_for("half a line")
                terminal.write("\x03")
                terminal.wait_for(terminal.prompt)
                terminal.write("\x04")
                self.assertEqual(terminal.exit_code(), 0)

    def test_typed_ahead(self):
        """Text typed while an answer is printed is used after the answer."""
        terminal = self.on_a_terminal("-n", "1500", "--ignore-eos", "--seed", "1", *SLOWLY)
        terminal.write("Tell me a story\n")
        terminal.wait_for("\n")
        terminal.wait_for_answer()
        terminal.write("\x03")
        terminal.write("/history\n")
        terminal.wait_for("user: Tell me a story")
        terminal.wait_for(terminal.prompt)
        terminal.write("And another\n")
        terminal.wait_for("And another")
        terminal.wait_for("\n")
        terminal.write("\x03\x04")
        self.assertEqual(terminal.exit_code(), 0)


class Interrupts(Case):
    def start(self, *arguments):
        """With the usual SIGINT: what a shell starts in the background, the tests too, ignores it."""
        return subprocess.Popen([FRESHET, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def compute(self, process, seconds=2):
        """Waits until the program is past loading, which takes a part of a second."""
        end = time.monotonic() + PATIENCE
        while cpu_seconds(process.pid) < seconds:
            self.assertIsNone(process.poll(), "it has ended by itself")
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def test_while_writing(self):
        # By itself, before the one second of grace is over: a busy machine may be too slow for it now and
        # then, but a program that waits for the end of the grace always is.
        took = {}
        for _ in range(20):
            for number in (signal.SIGINT, signal.SIGTERM):
                with self.start("run", "default", "Once upon a time", "-n", "1900", "--ignore-eos") as p:
                    self.assertTrue(p.stdout.read(1))
                    p.send_signal(number)
                    begin = time.monotonic()
                    self.assertEqual(p.wait(PATIENCE), 130)
                    took[number] = min(time.monotonic() - begin, took.get(number, PATIENCE))
            if max(took.values()) < 0.9:
                return
        self.fail(f"at best it took {took} s")

    def test_while_loading(self):
        with self.start("run", "default", "Once", "-n", "1900", "--ignore-eos") as p:
            time.sleep(0.05)
            p.send_signal(signal.SIGINT)
            self.assertIn(p.wait(PATIENCE), (130, -signal.SIGINT))

    def test_a_step_that_takes_long(self):
        # The plain reference takes seconds for each prompt of this length: the program must not
        # wait for it.
        ids = self.write("ids.json", json.dumps([[1 + (i * k) % 500 for i in range(1900)] for k in range(1, 41)]))
        text = self.write("t.txt", "The sea was calm and the ship lay still. " * 5000)
        for arguments in (["run", "default", "--ids", ids, "-n", "1", "--reference"],
                          ["eval", "perplexity", "default", text, "--window", "1000",
                           "--reference"]):
            with self.start(*arguments) as p:
                self.compute(p)
                p.send_signal(signal.SIGINT)
                self.assertEqual(p.wait(PATIENCE), 130)

    def test_measuring(self):
        text = self.write("t.txt", "The sea was calm and the ship lay still. " * 20000)
        with self.start("eval", "perplexity", "default", text) as p:
            self.compute(p)
            p.send_signal(signal.SIGINT)
            self.assertEqual(p.wait(PATIENCE), 130)


class Output(Case):
    COMMANDS = (["run", "Once upon a time", "-n", "30"], ["inspect", "default", "--json"],
                ["tokenize", "default", "Hello"], ["--help"])

    def test_full_disk(self):
        for arguments in self.COMMANDS[:3]:
            with open("/dev/full", "wb") as full:
                result = subprocess.run([FRESHET, *arguments], stdout=full, stderr=subprocess.PIPE,
                                        text=True, timeout=300, check=False)
            self.assertEqual(result.returncode, 1, arguments)
            self.assertIn("No space left", result.stderr)

    def test_reader_that_leaves(self):
        for arguments in self.COMMANDS[:3]:
            read, write = os.pipe()
            os.close(read)
            result = subprocess.run([FRESHET, *arguments], stdout=write, stderr=subprocess.PIPE,
                                    text=True, timeout=300, check=False)
            os.close(write)
            self.assertEqual(result.returncode, 1, arguments)
            self.assertIn("Broken pipe", result.stderr)

    def test_logits_to_a_full_disk(self):
        ids = self.write("ids.json", "[[1, 2, 3]]")
        self.fails(1, "eval", "logits", LLAMA, "--ids", ids, "-o", "/dev/full", says="No space left")

    def test_closed_output(self):
        result = subprocess.run(["sh", "-c", f'"{FRESHET}" tokenize default Hello >&-'],
                                stderr=subprocess.PIPE, text=True, timeout=300, check=False)
        self.assertEqual(result.returncode, 1)


if __name__ == "__main__":
    unittest.main()
