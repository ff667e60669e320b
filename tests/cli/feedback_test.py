"""What the program says: unknown options, help, version, devices, progress, units.

usage: feedback_test.py [Class[.test] ...]    needs FRESHET, FRESHET_SOURCE_DIR and FRESHET_FAKE_GPUS
"""
import json
import os
import pty
import re
import resource
import shutil
import subprocess
import unittest

from cli_test import FAKE_GPUS, FRESHET, LLAMA, SOURCE, Case, run

FAKE = {**os.environ, "LD_LIBRARY_PATH": f"{FAKE_GPUS}/fake_gpu"}
COMMANDS = [["run"], ["chat"], ["tokenize"], ["apply-template"], ["inspect"], ["convert"], ["eval"],
            ["eval", "logits"], ["eval", "perplexity"], ["eval", "compare"], ["eval", "quant"], ["eval", "tasks"],
            ["bench"], ["bench", "serve"], ["bench", "ceilings"], ["bench", "throughput"], ["serve"], ["devices"]]


def on_terminal(*arguments, env=None, preexec_fn=None):
    """Runs the program with standard error on a terminal. (exit code, what the terminal got)"""
    master, slave = pty.openpty()
    with subprocess.Popen([FRESHET, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=slave, preexec_fn=preexec_fn,
                          env={**os.environ, "NO_COLOR": "1", **(env or {})}) as process:
        os.close(slave)
        seen = b""
        while True:
            try:
                piece = os.read(master, 4096)
            except OSError:  # EIO: the program has closed it
                break
            if not piece:
                break
            seen += piece
        code = process.wait(300)
    os.close(master)
    return code, seen.decode(errors="replace")


class Options(Case):
    HELLO = ["run", "default", "Once upon a time"]

    def says(self, *flags):
        return self.succeeds(*self.HELLO, *flags)

    def test_unknown_options_name_the_nearest(self):
        for flags, says in ((["--max-token", "3"], "did you mean --max-tokens?"),
                            (["--temprature", "0"], "did you mean --temperature?"),
                            (["-temp", "0"], "did you mean --temp?"),
                            (["--no-such-thing-at-all"], "unknown option --no-such-thing-at-all of freshet run"),
                            (["-Z"], "unknown option -Z of freshet run"),
                            (["--ngl", "99"], "did you mean -ngl?"),
                            (["--served-model-name", "x"], "unknown option --served-model-name")):
            error = self.fails(2, *self.HELLO, *flags, says=says)
            self.assertNotIn("words", error)
        self.fails(2, "bench", "serve", "--num-prompt", "3", says="did you mean --num-prompts?")
        self.fails(2, "eval", "compare", "a", "b", "c", "--no-such-thing", says="of freshet eval compare")
        self.fails(2, "--versoin", says="did you mean --version?")

    def test_gpu_layers(self):
        want = self.says("-n", "4", "--temp", "0", "--device", "cpu")
        for layers in ("0", "99", "all", "-1"):
            self.assertEqual(self.says("-n", "4", "--temp", "0", "-ngl", layers), want)
        error = self.fails(2, *self.HELLO, "-ngl", "20", says="a model runs on one device")
        self.assertIn("--device", error)
        self.fails(2, "tokenize", "default", "x", "-ngl", "99", says="unknown option -ngl")

    def test_the_same_meaning(self):
        want = self.says("-n", "6", "--seed", "5", "--max-model-len", "64", "--repetition-penalty", "1.2")
        got = self.says("--n-predict", "6", "-s", "5", "--ctx-size=64", "--repeat-penalty", "1.2")
        self.assertEqual(got, want)
        self.assertEqual(self.says("--max_tokens", "6", "--seed=5", "-c", "64", "--repetition_penalty=1.2",
                                   "-fa", "--flash-attn", "on", "--dtype", "auto", "-tp", "1"), want)
        self.assertEqual(self.says("-n6", "--seed=5", "-c", "64", "--repeat-penalty", "1.2"), want)
        self.assertEqual(self.succeeds("run", "-m", "default", "-p", "Once upon a time", "-n", "6", "-s", "5",
                                       "-c", "64", "--repeat-penalty", "1.2"), want)
        self.assertEqual(self.succeeds("run", "-p", "Once upon a time", "default", "-n", "6", "-s", "5", "-c", "64",
                                       "--repeat-penalty", "1.2", "--logit-bias", "5=0"), want)
        self.fails(2, *self.HELLO, "-c", "x", says="--max-model-len: Value x")
        self.fails(2, *self.HELLO, "-c", says="-c needs a value")
        self.fails(2, *self.HELLO, "-np", "99999", says="--parallel")

    def test_values_are_no_options(self):
        self.assertEqual(self.says("-n", "4", "--temp", "0", "--stop", "-ngl"), self.says("-n", "4", "--temp", "0"))
        want = json.loads(self.succeeds("tokenize", "default", "--jsonl", stdin='"-c"\n'))
        self.assertEqual(json.loads(self.succeeds("tokenize", "default", "--json", "--", "-c")), want)

    def test_hints(self):
        for flags, says in ((["-fa", "off"], "always fused"), (["--dtype", "float16"], "convert --type"),
                            (["-tp", "2"], "one device"), (["--no-mmap"], "always mapped"),
                            (["--trust-remote-code"], "never run"), (["-cnv"], "freshet chat"),
                            (["-ctk", "q8_0"], "keys as q8_0 and values as f16; there are f32/f32, f16/f16, "
                                               "bf16/bf16, q8_0/q8_0, q4_0/q4_0, q8_0/q4_0"),
                            (["-ctk", "q5_1", "-ctv", "q5_1"], "keys as q5_1 and values as q5_1"),
                            (["-ctk", "q4_0", "-ctv", "q4_0", "--kv-cache-dtype", "int8"], "was given 2 times"),
                            (["--kv-cache-dtype-skip-layers", "5"], "the model has layers 0 to 4"),
                            (["--mirostat", "2"], "--min-p")):
            self.fails(2, *self.HELLO, *flags, says=says)

    def test_types_of_the_cache(self):
        """llama.cpp's and vLLM's names ask for what ours ask for."""
        for flags, ours in ((["-ctk", "q8_0", "--cache-type-v=q4_0"], "k8v4"), (["-ctv", "q4_0", "-ctk", "q4_0"], "int4"),
                            (["--cache_type_k", "bf16", "-ctv", "bf16"], "bf16")):
            got = json.loads(self.succeeds("inspect", "default", "--json", *flags))
            self.assertEqual(got["kv_cache_dtype"], ours)
            self.assertEqual(got, json.loads(self.succeeds("inspect", "default", "--json", "--kv-cache-dtype", ours)))
        size = {}
        for flags in (["f16"], ["int4"], ["int4", "--kv-cache-dtype-skip-layers", "0,4"]):
            got = json.loads(self.succeeds("inspect", "default", "--json", "--kv-cache-dtype", *flags))
            size[len(flags), flags[0]] = got["kv_bytes_per_token"]
        self.assertEqual(size[1, "f16"], 5 * 2 * 2 * got["layers"][0]["kv_heads"] * got["layers"][0]["head_dim"])
        self.assertAlmostEqual(size[1, "f16"] / size[1, "int4"], 16 / 4.5, delta=0.01)
        self.assertEqual(5 * size[3, "int4"], 2 * size[1, "f16"] + 3 * size[1, "int4"])

    def test_speculation(self):
        """llama.cpp's and vLLM's names. The tokens are those without a draft model, whatever it drafts."""
        ids = ["run", "default", "Once upon a time", "--temp", "0", "--json", "-n", "6"]
        want = json.loads(self.succeeds(*ids))
        self.assertNotIn("drafted_tokens", want)
        for flags in (["-md", "default", "--draft-max", "3"], ["--model-draft", "default", "--draft", "3"],
                      ["--speculative-model=default", "--num_speculative_tokens", "3", "-ngld", "99",
                       "--draft-min", "0", "--draft-p-min", "0.0", "--spec-type", "none"]):
            got = json.loads(self.succeeds(*ids, *flags))
            self.assertEqual(got["ids"], want["ids"], flags)
            self.assertGreater(got["drafted_tokens"], 0, flags)
        for flags, says in ((["--spec-type", "ngram-simple"], '--speculative-config \'{"method": "ngram"}\''),
                            (["--draft-min", "5"], "leave it out"), (["-cd", "512"], "leave it out"),
                            (["-hfd", "a/b"], "--spec-draft-model hf:ORG/REPO"),
                            (["-md", "smolm2-360m"], "did you mean smollm2-360m?"),
                            (["--draft-max", "3"], "--spec-draft-n-max needs --spec-draft-model")):
            self.fails(2, *ids, *flags, says=says)

    def test_every_name_is_documented(self):
        with open(os.path.join(SOURCE, "src/cli/foreign_options.cc"), encoding="utf-8") as f:
            source = f.read()
        with open(os.path.join(SOURCE, "docs/cli.md"), encoding="utf-8") as f:
            documented = set(re.findall(r"`(-[^`= ]+)`", f.read().split("| option | here |")[1].split("\n\n")[0]))
        table = source[source.index("kForeign[] = {"):source.index("bool in_list")]
        names = {name for group in re.findall(r'^ *\{?\s*"(-[\w,-]+)"|kGpuLayers = "([^"]+)"', table, re.M)
                 for names in group for name in names.split(",") if name}
        self.assertGreater(len(names), 80)
        self.assertEqual(names - documented, set())

    def test_number_of_tokens(self):
        self.fails(2, *self.HELLO, "-n", "-2", says="--max-tokens: must be at least 0, or -1 for no limit")
        nothing = json.loads(self.says("-n", "0", "--json"))
        self.assertEqual((nothing["ids"], nothing["text"]), ([], ""))
        line = json.loads(self.says("-n", "-1", "--max-model-len", "40", "--ignore-eos", "--json"))
        self.assertEqual(line["prompt_tokens"] + len(line["ids"]), 40)
        self.assertEqual(line["finish_reason"], "length")
        self.says("-n", "2", "--seed", "-1")

    def test_sampling_names_the_option(self):
        """Before a model is loaded or fetched, which may take minutes."""
        for flags, says in ((["--top-p", "2"], "--top-p must be above 0 and at most 1, not 2"),
                            (["--temp", "-1"], "--temperature must be"), (["--beams", "-2"], "--beams must be"),
                            (["--stop", ""], "--stop: a stop string must not be empty")):
            for command in (["run", "hf:none/such", "x"], ["chat", "hf:none/such"]):
                error = self.fails(2, *command, *flags, says=says)
                self.assertEqual(len(error.strip().split("\n")), 1, error)
        self.fails(2, *self.HELLO, "--max-model-len", "99999", says="--max-model-len is 99999: the model allows 2048")

    def test_seeds(self):
        self.fails(2, *self.HELLO, "--seed", "-2", says="--seed")

    def test_words(self):
        error = self.fails(2, "run", "default", "two", "words", says="quotes")
        self.assertNotIn("At Most", error)
        self.fails(2, "chat", says="MODEL is missing")
        self.fails(2, *self.HELLO, "-n", "1", "-n", "2", says="was given 2 times")
        self.fails(2, "inspect", "default", "other", says="unexpected argument 'other' of freshet inspect")

    def test_commands(self):
        self.assertEqual(self.succeeds("help"), self.succeeds("--help"))
        self.assertEqual(self.succeeds("help", "run"), self.succeeds("run", "--help"))
        self.assertEqual(self.succeeds("version"), self.succeeds("--version"))
        for word, ours in (("srve", "serve"), ("quantise", "quantize"), ("perplexity", "eval perplexity"),
                           ("tokenise", "tokenize"), ("gpus", "devices")):
            self.fails(2, word, says=f"there is no command '{word}': did you mean '{ours}'?")
        self.fails(2, "bench", "server", says="")
        self.fails(2, "eval", "perplexty", "x", says="did you mean 'perplexity'?")
        self.fails(2, says="needs a command: run, chat")


class Help(Case):
    def test_values_and_width(self):
        for command in [[]] + COMMANDS:
            for flag in ("--help", "--help-all"):
                text = self.succeeds(*command, flag)
                self.assertNotRegex(text, r"\b(INT|FLOAT|UINT)\b|TEXT[:=]|\{false\}|REQUIRED| in \[|(?<!=)\bVALUE\b")
                for line in text.split("\n"):
                    self.assertLessEqual(len(line), 120 if "curl" in line or "  freshet" in line else 100, line)
        text = self.succeeds("run", "--help")
        self.assertRegex(text, r"-m, --model MODEL ")
        self.assertRegex(text, r"-n, --max-tokens N ")
        self.assertIn("Usage: freshet run [OPTIONS] [MODEL] [PROMPT]", text)
        self.assertIn("Usage: freshet convert [OPTIONS] FOLDER", self.succeeds("convert", "--help"))

    def test_rare_options(self):
        usual, everything = self.succeeds("run", "--help"), self.succeeds("run", "--help-all")
        self.assertIn("Use this kernel", everything)
        self.assertNotIn("Use this kernel", usual)
        self.assertIn("--force-kernel", usual)
        self.assertIn("Worker threads", usual)
        self.assertIn("Use this kernel", self.succeeds("--help-all"))

    def test_examples_are_the_command_s_own(self):
        self.assertIn("freshet bench ceilings --json", self.succeeds("bench", "ceilings", "--help"))
        self.assertNotIn("bench smollm2", self.succeeds("bench", "ceilings", "--help"))


class Version(Case):
    def test_version(self):
        text = self.succeeds("--version")
        self.assertRegex(text, r"^freshet \d+\.\d+\.\d+\ncommit    .+\ncompiler  .+\n"
                               r"CPU       built for scalar .+; found \w+\nCUDA      .+\n$")
        git = subprocess.run(["git", "-C", SOURCE, "log", "-1", "--format=%h %cs"], capture_output=True,
                             text=True, check=False)
        commit = re.search("commit    (.+)", text).group(1)
        if git.returncode == 0:
            self.assertRegex(commit, r"^[0-9a-f]{7,} \d{4}-\d\d-\d\d$")
        else:
            self.assertEqual(commit, "unknown")
        fake = self.succeeds("--version", env=FAKE)
        self.assertRegex(fake, r"CUDA      plug-in .*libfreshet_cuda.so, interface \d+\n")

    def test_commit_without_git(self):
        shutil.copytree(os.path.join(SOURCE, "cmake"), self.path("source/cmake"))
        def commit_of(source):
            subprocess.run(["cmake", "-D", f"SOURCE_DIR={source}", "-D", f"OUTPUT={self.path('commit.cc')}", "-P",
                            os.path.join(source, "cmake/commit.cmake")], check=True)
            with open(self.path("commit.cc"), encoding="utf-8") as f:
                return re.search(r'kCommit\[\] = "(.*)"', f.read()).group(1)
        self.assertEqual(commit_of(self.path("source")), "")
        # Below a checkout of something else, it is not that commit.
        subprocess.run("git init -q . && git -c user.name=a -c user.email=b commit -q --allow-empty -m x", shell=True,
                       cwd=self.folder, check=True)
        self.assertEqual(commit_of(self.path("source")), "")
        # As `git archive` fills it in.
        self.write("source/cmake/commit.txt", "abc1234 2026-01-02\n")
        self.assertEqual(commit_of(self.path("source")), "abc1234 2026-01-02")

    def test_devices(self):
        cpu = json.loads(self.succeeds("devices", "--json"))[0]
        self.assertEqual(cpu["device"], "cpu")
        self.assertEqual(cpu["threads"], len(os.sched_getaffinity(0)))
        self.assertLessEqual(cpu["cores"], cpu["threads"])
        with open("/proc/meminfo", encoding="ascii") as f:
            self.assertEqual(cpu["memory_bytes"], int(f.readline().split()[1]) << 10)
        self.assertIn(f", {cpu['isa']}, ", self.succeeds("devices"))
        self.assertIn(f"found {cpu['isa']}\n", self.succeeds("--version"))

    def test_gpus(self):
        text = self.succeeds("devices", env=FAKE)
        self.assertIn("cuda:0  Fake GPU: 4.0 GiB of memory (4.0 GiB free), compute capability 9.0", text)
        self.assertIn("cuda:1  Another fake", text)
        gpus = json.loads(self.succeeds("devices", "--json", env=FAKE))[1:]
        self.assertEqual([(g["device"], g["compute_capability"]) for g in gpus],
                         [("cuda:0", "9.0"), ("cuda:1", "9.0")])
        other = {**os.environ, "LD_LIBRARY_PATH": f"{FAKE_GPUS}/fake_gpu_of_another_build"}
        self.assertIn("another version", self.succeeds("devices", env=other))


class Progress(Case):
    def test_each_command(self):
        ids = self.write("ids.json", json.dumps([[1, 2, 3, 4]] * 3))
        text = self.write("t.txt", "Once upon a time there was a little girl. " * 40)
        for arguments, says in ((["eval", "logits", LLAMA, "--ids", ids, "-o", self.path("l")], "computing logits"),
                                (["eval", "perplexity", "default", text, "--window", "32"], "scoring"),
                                (["bench", LLAMA, "-p", "8", "-n", "2", "-r", "2"], "tg2"),
                                (["convert", LLAMA, "-o", self.path("x.gguf")], "converting")):
            code, seen = on_terminal(*arguments)
            self.assertEqual(code, 0, seen)
            self.assertRegex(seen, rf"\r\x1b\[K{says} +\d+ %")
            self.assertNotRegex(seen, r"%[^\r]*$")  # the line is gone in the end
            self.assertNotIn("%", run(*arguments, *(["--force"] if arguments[0] == "convert" else [])).stderr)

    def test_warnings_clear_the_line(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (10000, resource.RLIM_INFINITY))
        code, seen = on_terminal("run", LLAMA, "--ids", self.write("ids.json", "[[1, 2]]"), "-n", "2",
                                 "--weight-cache-dir", self.path("cache"), preexec_fn=limit)
        self.assertEqual(code, 0, seen)
        self.assertIn("warning: packed weights are not kept", seen)
        self.assertNotRegex(seen, r"%[^\r\n]*warning")
        self.assertRegex(seen, r"(\x1b\[K|\n)warning")


class Said(Case):
    """Smaller remarks of the commands."""

    def test_inspect(self):
        self.assertIn("model         default (embedded)\n", self.succeeds("inspect"))
        text = self.succeeds("inspect", "default", "--kernels")
        kernels = text.split("kernels\n")[1].splitlines()
        about = json.loads(self.succeeds("inspect", "default", "--kernels", "--json"))["kernels"]
        self.assertLess(len(kernels), len(about))
        self.assertTrue(any(re.search(r"blk\.0-4\.attn_output.* x 5$", line) for line in kernels), text)
        counts = [re.search(r" x (\d+)$", line) for line in kernels]
        self.assertEqual(sum(int(c.group(1)) if c else 1 for c in counts), len(about))

    def test_architectures(self):
        names = self.succeeds("inspect", "--architectures").split()
        self.assertEqual(names, sorted(names))
        self.assertEqual(json.loads(self.succeeds("inspect", "--architectures", "--json")), names)
        with open(os.path.join(SOURCE, "src/models/architectures.h"), encoding="utf-8") as f:
            self.assertEqual(len(names), len(re.findall(r"^Architecture \w+\(\);", f.read(), re.M)))
        shutil.copytree(LLAMA, self.path("m"))
        with open(os.path.join(LLAMA, "config.json"), encoding="utf-8") as f:
            config = {**json.load(f), "model_type": "martian"}
        self.write("m/config.json", json.dumps(config))
        self.fails(2, "inspect", self.path("m"), says="unsupported architecture 'martian'; supported: "
                   + ", ".join(names) + "; nearest is llama")

    def test_the_nearest_architecture(self):
        shutil.copytree(LLAMA, self.path("m"))
        with open(os.path.join(LLAMA, "config.json"), encoding="utf-8") as f:
            config = {**json.load(f), "model_type": "martian", "canals": 2}
        self.write("m/config.json", json.dumps(config))
        with open(os.path.join(LLAMA, "model.safetensors"), "rb") as f:
            content = f.read()
        # Names of the same length, so that the rest of the file stays where it is.
        with open(self.path("m/model.safetensors"), "wb") as f:
            f.write(content.replace(b"self_attn.o_proj", b"self_attn.x_proj"))
        self.fails(2, "inspect", self.path("m"),
                   says="; nearest is llama: it has no place for model.layers.#.self_attn.x_proj; "
                   "it needs model.layers.#.self_attn.o_proj; it does not read canals")

    def test_weights_that_are_missing(self):
        os.mkdir(self.path("m"))
        shutil.copy(os.path.join(LLAMA, "config.json"), self.path("m"))
        shutil.copy(os.path.join(LLAMA, "golden.safetensors"), self.path("m/model.safetensors"))
        self.fails(2, "inspect", self.path("m"), says="lacks the weight model.embed_tokens.weight")

    def test_tokenize(self):
        one = self.succeeds("tokenize", "default", "a", "--no-special")
        self.assertIn("1 token\n", one)
        text = self.succeeds("tokenize", "default", "--no-special", stdin="naïve 東")
        self.assertEqual(text, self.succeeds("tokenize", "default", "naïve 東", "--no-special"))
        halves = re.findall(r"<([0-9A-F]{2})>", text)
        if halves:
            self.assertEqual(bytes.fromhex("".join(halves[-3:])), "東".encode())
        self.assertNotIn("\ufffd", text)

    def test_convert(self):
        self.fails(2, "convert", LLAMA, "-o", self.folder, says="is a folder")

    def test_bench(self):
        text = self.succeeds("bench", LLAMA, "-p", "8", "-n", "2", "-pg", "8,2", "-d", "0,16", "-r", "2", "-t", "1")
        table = [line for line in text.splitlines() if line.startswith("|")]
        self.assertEqual(len(table), 8)
        self.assertEqual({len(line) for line in table}, {len(table[0])})
        self.assertLessEqual(len(table[0]), 100)
        self.assertEqual({line.count("|") for line in table}, {8})
        self.assertRegex(text, r"\n- 1 thread on CPU: [\d.]+ GB/s")
        long_name = self.path("a" * 60 + "-end")
        os.symlink(LLAMA, long_name)
        rows = self.succeeds("bench", "-m", LLAMA, "-m", long_name, "-p", "8", "-n", "0", "-r", "1").splitlines()
        self.assertEqual({len(line) for line in rows if line.startswith("|")}, {len(rows[0])})
        self.assertLessEqual(len(rows[0]), 100)
        self.assertIn("-end |", rows[3])

    def test_units(self):
        """Sizes are binary, rates decimal (docs/glossary.md)."""
        decimal = re.compile(r"\d?\b[kKMGT]B\b(?!/s)|\bGop/s|\bMop/s")
        allowed = ("parse_bytes", "unit ==", "/proc/meminfo", "MemTotal", "// \"16384 kB\"")
        found = []
        for folder in ("src", "include"):
            for root, _, files in os.walk(os.path.join(SOURCE, folder)):
                for name in files:
                    if not name.endswith((".cc", ".h")) or name.endswith("_test.cc"):
                        continue
                    with open(os.path.join(root, name), encoding="utf-8") as f:
                        found += [f"{name}:{i}: {line.strip()}" for i, line in enumerate(f, 1)
                                  if decimal.search(line) and not any(a in line for a in allowed)]
        self.assertEqual(found, [])


if __name__ == "__main__":
    unittest.main()
