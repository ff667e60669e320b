"""README.md tells the truth: its commands run, and its table of architectures is the registry's.

usage: readme_test.py     needs FRESHET (the program), FRESHET_SOURCE_DIR and
FRESHET_UNPACKED_DATA (the build's tests/data)
"""
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import unittest

FRESHET = os.environ.get("FRESHET", "build/release/bin/freshet")
SOURCE = os.environ.get("FRESHET_SOURCE_DIR", ".")
UNPACKED = os.environ.get("FRESHET_UNPACKED_DATA", "build/release/tests/data")
# These wait for a person or a network: --help shows whether their options exist.
INTERACTIVE = {"chat", "serve", "pull"}


def readme():
    with open(os.path.join(SOURCE, "README.md"), encoding="utf-8") as f:
        return f.read()


class Readme(unittest.TestCase):
    def commands(self):
        """The commands in indented blocks, without comments."""
        found = []
        for line in re.findall(r"^    (.*\bfreshet .*)$", readme(), re.M):
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if words[:1] == ["freshet"]:
                    found.append(words[1:])
        self.assertGreater(len(found), 8)
        return found

    def test_commands_run_as_printed(self):
        known = subprocess.run([FRESHET, "--help"], capture_output=True, text=True, check=True).stdout
        with tempfile.TemporaryDirectory() as folder:
            model = os.path.join(SOURCE, "models/default.gguf")
            os.makedirs(os.path.join(folder, "cache/models"))
            for name in ("model.gguf", "cache/models/smollm2.gguf"):
                shutil.copy(model, os.path.join(folder, name))
            os.symlink(os.path.abspath(os.path.join(UNPACKED, "golden/llama")), os.path.join(folder, "model"))
            for name in ("prompts.txt", "text.txt"):
                with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
                    f.write("Once upon a time there was a river.\nIt ran down to the sea.\n" * (1 if name == "prompts.txt" else 99))
            with open(os.path.join(folder, "ids.json"), "w", encoding="utf-8") as f:
                json.dump([list(range(1, 200))], f)
            environment = {**os.environ, "FRESHET_CACHE_DIR": os.path.join(folder, "cache")}
            for words in self.commands():
                if words[0] in INTERACTIVE:
                    words = [words[0], "--help"]
                if words[0] == "pull" and not re.search(r"^  pull ", known, re.M):
                    continue
                if words[0] in ("tokenize", "eval"):  # the folder has no vocabulary
                    words = ["model.gguf" if w == "model/" else w for w in words]
                if words[0] == "quantize":  # narrow, and no vocabulary either
                    words = [{"W4A16": "W4A16_G32", "text.txt": "ids.json"}.get(w, w) for w in words]
                if words[0] == "convert":
                    words = ["other.gguf" if w == "model.gguf" else "q8_0" if w == "q4_k" else w
                             for w in words]
                result = subprocess.run([FRESHET, *words], cwd=folder, env=environment, timeout=300,
                                        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
                self.assertEqual(result.returncode, 0, f"{words}: {result.stderr}")
                self.assertNotEqual(result.stdout + result.stderr, "", words)

    def test_architectures(self):
        table = readme().split("| Family | `model_type` |")[1].split("\n\n")[0]
        listed = re.findall(r"`([\w-]+)`", table)
        types = subprocess.run([FRESHET, "inspect", "--architectures"], capture_output=True, text=True,
                               check=True).stdout.split()
        self.assertGreater(len(types), 20)
        self.assertEqual(sorted(listed), sorted(types))
        # docs/models.md: how many configurations of each are compared with transformers.
        with open(os.path.join(SOURCE, "docs/models.md"), encoding="utf-8") as f:
            rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \|", f.read(), re.M)
        counts = dict.fromkeys(types, 0)
        configs = []
        for kind in ("golden", "seeded"):
            for path in glob.glob(os.path.join(SOURCE, "tests/data", kind, "*/config.json")):
                with open(path, encoding="utf-8") as f:
                    configs.append(json.load(f))
        with tarfile.open(os.path.join(SOURCE, "tests/data/golden-variants.tar.xz")) as packed:
            configs += [json.load(packed.extractfile(name)) for name in packed.getnames()
                        if name.endswith("/config.json")]
        for config in configs:
            # Models that read pictures have a language model of a known type.
            text = config.get("text_config", {}).get("model_type")
            for name in (config["model_type"], text):
                if name in counts:
                    counts[name] += 1
                    break
        self.assertEqual({name: int(count) for name, count in rows}, counts)


if __name__ == "__main__":
    unittest.main()
