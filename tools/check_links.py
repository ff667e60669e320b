#!/usr/bin/env python3
"""Checks that relative links in Markdown files lead somewhere, and that sources name existing documents.

usage: check_links.py [ROOT]      prints each dead link as file:line: text; exit code 1 if there is one
       check_links.py --self-test

A link's file must exist, and if it has a #fragment, the Markdown file must have a heading with that
anchor. In sources, scripts and documents every docs/....md that is named must exist.
"""
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\w/.-])docs/[\w/.-]+\.md\b")
TOPS = ("src", "include", "tests", "tools", "bench", "examples", "cmake")


def anchors(text):
    """The anchors of a Markdown file's headings, as GitHub makes them."""
    found = {}
    for heading in re.findall(r"^#{1,6} +(.*?)\s*#*$", without_code(text), flags=re.M):
        heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = found.get(anchor, 0)
        found[anchor] = count + 1
        if count:
            found[f"{anchor}-{count}"] = 1
    return found


def without_code(text):
    return re.sub(r"^```.*?^```", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.S | re.M)


def dead_link(root, name, target):
    """What is wrong with a link in the file `name`, or None."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    path, _, fragment = target.partition("#")
    file = (root / name).parent / path if path else root / name
    if not file.exists():
        return f"{target}: there is no such file"
    if fragment and file.suffix == ".md" and fragment not in anchors(file.read_text(encoding="utf8")):
        return f"{target}: there is no such heading"
    return None


def offences_in(root, name):
    text = (root / name).read_text(encoding="utf8")
    if name.endswith(".md"):
        text = without_code(text)
    for number, line in enumerate(text.split("\n"), 1):
        if name.endswith(".md"):
            for match in LINK.finditer(re.sub(r"`[^`]*`", "``", line)):
                wrong = dead_link(root, name, match.group(1))
                if wrong:
                    yield number, wrong
        for match in NAMED.finditer(line):
            if not (root / match.group(0)).exists():
                yield number, f"{match.group(0)}: there is no such file"


def offences(root):
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"],
                            check=True, capture_output=True, text=True).stdout.split("\n")
    for name in listed:
        source = name.split("/")[0] in TOPS and not name.startswith(("tests/data", "tests/fuzz/corpus"))
        source = source and re.search(r"\.(h|cc|inl|cu|cuh|py|txt|cmake)$", name)
        if (name.endswith(".md") or source) and name != "tools/check_links.py" and (root / name).is_file():
            for number, what in offences_in(root, name):
                yield f"{name}:{number}: {what}"


def self_test():
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "docs").mkdir()
        (root / "docs/a.md").write_text("# A `b` (c)\n\n## Twice\n\n## Twice\n")
        cases = [
            ("x.md", "[a](docs/a.md) [b](docs/a.md#a-b-c) [c](https://example.org) [d](#d)\n# D\n", 0),
            ("x.md", "[a](docs/a.md#twice-1)\n", 0),
            ("x.md", "[a](docs/b.md)\n", 2),  # as a link, and as a document that is named
            ("x.md", "[a](docs/a.md#none)\n", 1),
            ("x.md", "```\n[a](none.md)\n```\n`[a](none.md)`\n", 0),
            ("x.cc", "// See docs/a.md.\n", 0),
            ("x.cc", "// See docs/none.md.\n", 1),
        ]
        for name, text, wanted in cases:
            (root / name).write_text(text)
            found = list(offences_in(root, name))
            if len(found) != wanted:
                print(f"self-test: {text!r}: found {found}, wanted {wanted} offences")
                failed = 1
    return failed


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = list(offences(root))
    for offence in found:
        print(offence)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
