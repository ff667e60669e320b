"""The cache of models, shared with huggingface_hub in both directions.

usage: shared_cache_test.py    in a Python environment with huggingface_hub; needs FRESHET,
                               FRESHET_SOURCE_DIR and FRESHET_UNPACKED_DATA
"""
import json
import os
import subprocess
import sys
import unittest

from fake_hub import Repo, sha256
from hub_test import BYTES, LLAMA, PATIENCE, Case, folder_files

# Runs in a process of its own, because huggingface_hub reads its environment when it is imported.
CLIENT = """
import json, sys
import huggingface_hub as h
command, *arguments = sys.argv[1:]
if command == "file":
    print(h.hf_hub_download(*arguments))
elif command == "snapshot":
    print(h.snapshot_download(*arguments))
elif command == "local":
    print(h.snapshot_download(arguments[0], local_files_only=True))
    for name in arguments[1:]:
        print(h.hf_hub_download(arguments[0], name, local_files_only=True))
elif command == "scan":
    info = h.scan_cache_dir()
    print(json.dumps([[str(w) for w in info.warnings], sorted(
        [r.repo_id, r.size_on_disk, r.nb_files, sorted(x for v in r.revisions for x in v.refs)] for r in info.repos)]))
elif command == "delete":
    h.scan_cache_dir().delete_revisions(*arguments).execute()
"""


class SharedCache(Case):
    def client(self, *arguments, **env):
        env = self.environment(HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1", NO_PROXY="*",
                               HF_HUB_ETAG_TIMEOUT=str(PATIENCE), **env)
        result = subprocess.run([sys.executable, "-c", CLIENT, *arguments], capture_output=True, text=True,
                                timeout=PATIENCE, check=False, env=env)
        self.assertEqual(result.returncode, 0, result.stderr[-2000:])
        return result.stdout.split("\n")[:-1]

    def test_what_freshet_wrote_is_read(self):
        files = folder_files(LLAMA)
        self.hub.repos["org/folder"] = Repo(files)
        self.hub.repos["org/gguf"] = Repo({"dir/m-Q4_K_M.gguf": BYTES})
        folder, gguf = self.pulled("hf:org/folder"), self.pulled("hf:org/gguf")
        seen = len(self.hub.log)
        offline = {"HF_HUB_OFFLINE": "1"}
        lines = self.client("local", "org/folder", "config.json", "model.safetensors", **offline)
        self.assertEqual(lines, [folder, f"{folder}/config.json", f"{folder}/model.safetensors"])
        self.assertEqual(self.client("local", "org/gguf", "dir/m-Q4_K_M.gguf", **offline)[1], gguf)
        warnings, repos = json.loads(self.client("scan", **offline)[0])
        self.assertEqual(warnings, [])
        self.assertEqual(repos[1], ["org/gguf", len(BYTES), 1, ["main"]])
        self.assertEqual(repos[0][0], "org/folder")
        self.assertEqual(len(self.hub.log), seen)
        # It finds nothing to download, and its deletion is understood.
        self.assertEqual(self.client("file", "org/gguf", "dir/m-Q4_K_M.gguf"), [gguf])
        self.assertEqual(len(self.hub.requests("cdn")), 1 + sum(n.endswith(".safetensors") for n in os.listdir(folder)))
        self.client("delete", self.hub.repos["org/gguf"].commit())
        self.assertNotIn("org/gguf", self.succeeds("list").stdout)

    def test_what_huggingface_hub_wrote_is_used(self):
        with open(os.path.join(os.environ["FRESHET_SOURCE_DIR"], "models/default.gguf"), "rb") as f:
            model = f.read()
        self.hub.repos["org/gguf"] = Repo({"m-Q8_0.gguf": model, "m-Q4_K_M.gguf": BYTES})
        self.hub.repos["org/folder"] = Repo({**folder_files(LLAMA), "tokenizer_config.json": b"{}"})
        (gguf,) = self.client("file", "org/gguf", "m-Q8_0.gguf")
        (folder,) = self.client("snapshot", "org/folder")
        self.assertEqual(os.path.basename(os.readlink(gguf)), sha256(model))
        seen = len(self.hub.log)
        self.succeeds("run", "hf:org/gguf", "Once", "-n", "2")
        self.succeeds("inspect", "hf:org/gguf:Q8_0", HF_HUB_OFFLINE="1")
        self.succeeds("inspect", "hf:org/folder")
        self.assertEqual(len(self.hub.log), seen)
        rows = json.loads(self.succeeds("list", "--json").stdout)
        self.assertEqual([(r["name"], r["path"]) for r in rows],
                         [("hf:org/folder", folder), ("hf:org/gguf:Q8_0", gguf)])
        # A pull sees that nothing is missing.
        downloads = len(self.hub.requests("cdn"))
        self.assertIn("up to date", self.succeeds("pull", "hf:org/gguf:Q8_0").stderr)
        self.assertEqual(len(self.hub.requests("cdn")), downloads)

    def test_each_goes_on_where_the_other_was_killed(self):
        self.hub.repos["org/gguf"] = Repo({"m.gguf": BYTES})
        blobs = os.path.join(self.cache, "models--org--gguf", "blobs")
        os.makedirs(blobs)
        with open(os.path.join(blobs, sha256(BYTES) + ".incomplete"), "wb") as f:
            f.write(BYTES[:100_000])
        self.assertEqual(self.read(self.pulled("hf:org/gguf")), BYTES)
        self.assertEqual(self.hub.requests("cdn")[0][3].get("Range"), "bytes=100000-")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[1:]])
