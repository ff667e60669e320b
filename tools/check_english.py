#!/usr/bin/env python3
"""Checks that comments and documents use the standard terms of the field.

usage: check_english.py [ROOT]      prints each offence as file:line: text; exit code 1 if there is one
       check_english.py --shrink    lowers the counts in english_granted.txt to what is still there
       check_english.py --self-test

Looks at comments in sources and at the text of Markdown files outside code blocks; identifiers, strings
and the records in docs/lab/ are free. docs/glossary.md explains the terms. Files that had offences before this check existed
are listed with their number in english_granted.txt: the numbers may only shrink.
"""
import re
import subprocess
import sys
from pathlib import Path

# (where, what is wrong, what to write instead)
KERNELS = r"^src/backend/|^docs/kernels/"
BANNED = [
    ("", r"\b(the )?mend(s|ed|ing)?\b", "fix"),
    ("", r"\b(bring|brings|bringing|brought) \w+ ?near\b|\bbring(s|ing)? near\b|\bbrought near\b", "prefetch"),
    ("", r"\bgated units?\b", "GLU (SwiGLU, GeGLU)"),
    ("", r"\bof equals\b", "ties go to the lowest id"),
    ("", r"\bseats?\b", "running slots"),
    ("", r"\bthe machine (said|says) no\b", "out of memory, disk full, ..."),
    ("", r"\bthe house\b|\bhouse('s)? (law|rule)s?\b|\blaws? of the house\b", "the rules of this project"),
    ("", r"\bwhere there (is|are) such\b", "if there is one"),
    ("", r"\bso many\b(?! (that|as|\w+ that)\b)", "this many, at most N, the given number of"),
    ("", r"\bone a (physical core|line|prompt|token|row|block|layer|step|request|sequence)\b", "one per ..."),
    ("", r"\ban? (object|prompt|list|number|string|line|row|block|byte) a "
         r"(line|request|token|step|row|layer|sequence|block|token|expert)\b", "one ... per ..."),
    ("", r"\b(Of|With|Behind|Beside) [^.;:]{3,40} the [^.;:]{3,40} (is|are) (wanted|taken|made|told)\b", "plain word order"),
    ("", r"\bwords\(0x|\bthe words of a row\b", "the sampling descriptor"),
    (KERNELS, r"\bleaf\b|\bleaves\b(?= of (K|the sum|a sum)\b)", "split-K slice"),
    (KERNELS, r"\brings?\b(?! buffer)", "pipeline"),
    (KERNELS, r"\blet(s)? (the )?next start\b|\blet_next_start\b(?=\s*$)", "programmatic dependent launch"),
]
RULES = [(re.compile(where), re.compile(what, re.I), hint) for where, what, hint in BANNED]
SOURCES = (".h", ".cc", ".inl", ".cu", ".cuh")
SCRIPTS = (".py", ".cmake", ".txt", ".yml")
HERE = Path(__file__).resolve().parent
GRANTED = HERE / "english_granted.txt"
SELF = ("tools/check_english.py", "tools/english_granted.txt", "docs/glossary.md", "CHANGELOG.md")
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//([^\n]*)|/\*(.*?)\*/', re.S)


def comments_of_source(text):
    """The text with everything but comments blanked; lines stay."""
    out, at = [], 0
    for match in COMMENT.finditer(text):
        out.append(re.sub(r"[^\n]", " ", text[at:match.start()]))
        inside = match.group(1) or match.group(2)
        out.append(match.group(0) if inside is not None else re.sub(r"[^\n]", " ", match.group(0)))
        at = match.end()
    out.append(re.sub(r"[^\n]", " ", text[at:]))
    return "".join(out)


def prose_of(name, text):
    if name.endswith(SOURCES):
        return comments_of_source(text)
    if name.endswith(".md"):
        text = re.sub(r"^```.*?^```", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.S | re.M)
        return re.sub(r"`[^`\n]*`", "``", text)
    if name.endswith(SCRIPTS):
        return "\n".join(line[line.index("#"):] if "#" in line else "" for line in text.split("\n"))
    return ""


def offences_in(name, text):
    # A phrase may go on in the next line of a comment.
    lines = prose_of(name, text).split("\n")
    for number, line in enumerate(lines, 1):
        following = lines[number] if number < len(lines) else ""
        following = re.sub(r"^\s*(//|#|\*|>)?\s*", "", following)
        joined = line.rstrip() + " " + following
        for where, what, hint in RULES:
            if not where.search(name):
                continue
            for match in what.finditer(joined):
                if match.start() < len(line.rstrip()) + 1 and match.start() < len(line):
                    yield number, f"“{match.group(0)}”: write “{hint}”"


def files(root):
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"],
                            check=True, capture_output=True, text=True).stdout.split("\n")
    for name in listed:
        if name in SELF or not (root / name).is_file():
            continue
        top = name.split("/")[0]
        if name.endswith(".md") or top in ("src", "include", "tests", "tools", "bench", "examples", "cmake"):
            if name.endswith(SOURCES + SCRIPTS + (".md",)) and not name.startswith(("tests/fuzz/corpus", "docs/lab/")):
                yield name


def granted():
    counts = {}
    for line in GRANTED.read_text(encoding="utf8").split("\n"):
        if line and not line.startswith("#"):
            count, name = line.split(" ", 1)
            counts[name] = int(count)
    return counts


def shrink(found, allowed):
    kept = {name: min(len(found.get(name, [])), count) for name, count in allowed.items()}
    head = "# Offences that check_english.py still allows, by file. The numbers may only shrink.\n"
    lines = [f"{count} {name}\n" for name, count in sorted(kept.items()) if count]
    GRANTED.write_text(head + "".join(lines), encoding="utf8")


def self_test():
    cases = [
        ("src/a.cc", "// Of equals, the lowest id.\n", 1),
        ("src/a.cc", "// Ties go to the lowest id.\n", 0),
        ("src/a.cc", "int of_equals;  // fine\n", 0),
        ("src/a.cc", 'const char* s = "the mend // of equals";\n', 0),
        ("src/a.cc", "// of\n// equals\n", 1),
        ("src/a.cc", "/* a gated\n   unit */\n", 1),
        ("docs" "/a.md", "One a line.\n", 1),
        ("docs" "/a.md", "```\nthe mend\n```\n`the mend`\n", 0),
        ("src/kv_cache/a.cc", "// A leaf of the tree; a ring.\n", 0),
        ("src/backend/cuda/a.cu", "// A leaf of the sum; the ring of stages.\n", 2),
        ("tools/a.py", "x = 1  # the mends\n", 1),
        ("src/a.cc", "// so many that it fails\n", 0),
        ("src/a.cc", "// pinned: so many first tokens\n", 1),
    ]
    failed = 0
    for name, text, wanted in cases:
        found = list(offences_in(name, text))
        if len(found) != wanted:
            print(f"self-test: {name} {text!r}: found {found}, wanted {wanted} offences")
            failed = 1
    return failed


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    root = HERE.parent if not arguments or arguments[0].startswith("--") else Path(arguments[0])
    found = {name: list(offences_in(name, (root / name).read_text(encoding="utf8"))) for name in files(root)}
    allowed = granted()
    if arguments == ["--shrink"]:
        shrink(found, allowed)
        return 0
    failed = 0
    for name, offences in found.items():
        if len(offences) > allowed.get(name, 0):
            failed = 1
            for number, what in offences:
                print(f"{name}:{number}: {what}")
            if name in allowed:
                print(f"{name}: {len(offences)} offences; {allowed[name]} are granted")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
