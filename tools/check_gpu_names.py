#!/usr/bin/env python3
"""Fails if a type name means two things in one namespace of the GPU backend.

Kernels of a folder are separate translation units, so the compiler does not notice; readers do.
"""
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKEN = re.compile(r"^namespace (freshet[\w:]*|\w+)? ?\{|^(\})  // namespace|"
                   r"^(?:template <[^;{]*>\s*)?(?:struct|class|enum class|using) (\w+)[^;{(]*[{=]",
                   re.M)


def types(path):
    scopes = []
    for match in TOKEN.finditer(path.read_text()):
        scope, closes, name = match.groups()
        if name and name != "namespace":
            yield "::".join(s for s in scopes if s), name
        elif closes:
            scopes.pop()
        elif not name:
            scopes.append(scope or "")  # an unnamed namespace is its parent's, for a reader


def main():
    places = collections.defaultdict(set)
    for path in sorted((ROOT / "src/backend/cuda").rglob("*")):
        if path.suffix in (".cu", ".cuh", ".h"):
            for scope, name in types(path):
                places[scope, name].add(path.name)
    twice = [f"{scope}::{name}: {', '.join(sorted(files))}"
             for (scope, name), files in sorted(places.items()) if len(files) > 1]
    if twice:
        sys.exit("type names that mean two things:\n  " + "\n  ".join(twice))


if __name__ == "__main__":
    main()
