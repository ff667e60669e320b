#!/usr/bin/env python3
"""Checks the order of the rooms: a file includes only its own room and rooms above it.

usage: check_layers.py [ROOT]     prints each offence as file:line: text; exit code 1 if there is one
       check_layers.py --self-test

The order is ORDER below, the same as in CMakeLists.txt. Tests (x_test.cc, tests/, bench/) may include
any room. Besides: an architecture (models/x.cc) includes no other architecture; the scheduler knows
integers only (base, freshet, the block ids of kv_cache and itself); includes are written from src/ or
include/, never relative.
"""
import re
import sys
import tempfile
from pathlib import Path

# Highest first: a room may include those before it. "freshet" is include/freshet.
ORDER = ["base", "freshet", "tensor", "quant", "comm", "ops", "backend/cpu", "backend/cuda", "loader",
         "tokenizer", "grammar", "media", "kv_cache", "layers", "models", "runtime", "sampling", "speculative", "lora",
         "scheduler", "engine", "speech", "quantizer", "eval", "server", "http", "hub", "bench_client", "cli"]
ONLY = {"scheduler": {"base", "freshet", "kv_cache", "scheduler"}, "freshet": {"base", "freshet"}}
TENSORS = re.compile(r"kv_cache/kv_storage\.h$")
DEFINES_ARCHITECTURE = re.compile(r"^Architecture \w+\(\) \{", re.M)
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')


def room_of(path):
    for room in sorted(ORDER, key=len, reverse=True):
        if path.startswith(room + "/"):
            return room
    return None


def offences(root):
    root = Path(root)
    files = sorted(root.glob("src/**/*")) + sorted(root.glob("include/**/*"))
    for file in files:
        if file.suffix not in (".h", ".cc", ".inl", ".cu", ".cuh") or not file.is_file():
            continue
        name = file.relative_to(root).as_posix()
        inside = name.split("/", 1)[1]
        room = room_of(inside)
        if room is None:
            yield f"{name}:1: in no known room"
            continue
        is_test = file.stem.endswith("_test")
        for number, line in enumerate(file.read_text(encoding="utf8").splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            target = match.group(1)
            where = f"{name}:{number}"
            other = room_of(target)
            if other is None:
                if "/" not in target or target.startswith("."):
                    yield f'{where}: write the include from src/: "{target}"'
                continue
            if is_test:
                continue
            if ORDER.index(other) > ORDER.index(room):
                yield f"{where}: {room} is above {other} and must not include it"
            if room in ONLY and other not in ONLY[room]:
                yield f"{where}: {room} may include only {', '.join(sorted(ONLY[room]))}"
            if room == "scheduler" and TENSORS.search(target):
                yield f"{where}: the scheduler knows no tensor ({target})"
            if room == "models" and other == "models":
                source = root / "src" / Path(target).with_suffix(".cc")
                if source.stem != file.stem and source.exists() and \
                        DEFINES_ARCHITECTURE.search(source.read_text(encoding="utf8")):
                    yield f"{where}: an architecture must not be included ({target})"


def self_test():
    cases = {
        "src/base/a.cc": '#include "ops/ops.h"\n',
        "src/ops/b.cc": '#include "base/status.h"\n#include "ops.h"\n',
        "src/models/llama.cc": '#include "models/llama.h"\nArchitecture llama() {\n}\n',
        "src/models/qwen.cc": '#include "models/llama.h"\n#include "models/assemble.h"\n',
        "src/scheduler/s.cc": '#include "ops/ops.h"\n#include "freshet/engine.h"\n',
        "src/nowhere/x.cc": "",
        "src/base/c_test.cc": '#include "engine/engine.h"\n',
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, text in cases.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        found = sorted(o.split(":")[0] for o in offences(folder))
    wanted = ["src/base/a.cc", "src/models/qwen.cc", "src/nowhere/x.cc", "src/ops/b.cc",
              "src/scheduler/s.cc"]
    if found != wanted:
        print(f"self-test: found {found}, wanted {wanted}")
        return 1
    return 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    root = arguments[0] if arguments else Path(__file__).resolve().parent.parent
    found = list(offences(root))
    for offence in found:
        print(offence)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
