#!/usr/bin/env python3
"""Checks what keeps the sources readable, beyond their layout.

usage: check_style.py [ROOT]      prints each offence as file:line: text; exit code 1 if there is one
       check_style.py --self-test

Budgets: a file has at most 600 lines (kernels, tables and tests 900), a function 70 (kernels 150, tests
120), a line 100 columns. Headers begin with their contract. Conditional compilation stays in base/,
backend/ and quant/; the environment is read in base/env.cc only; the library never prints or exits.
The step loop names no kind of request. No unfinished work, no ticket numbers, no paths of somebody's
machine.
"""
import re
import sys
import tempfile
from pathlib import Path

SUFFIXES = (".h", ".cc", ".inl", ".cu", ".cuh")
BANNED = [
    (re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b"), "unfinished work"),
    (re.compile(r"\b(stub|placeholder|not implemented yet)\b", re.I), "unfinished work"),
    (re.compile(r"(\bissue|\bticket|\bPR|\bbug) ?#?\d+\b|(?<![\w&])#\d{2,}\b", re.I), "a ticket number"),
    (re.compile(r"(?<![\w.])/(work|home|root)/\w"), "a path of somebody's machine"),
]
PRINTS = re.compile(r"\bstd::(cout|cerr|clog)\b|(?<![\w:>.])(printf|puts|putchar|fmt::print)\s*\(|\bfprintf\s*\(")
EXITS = re.compile(r"(?<![\w:>.])(std::)?(exit|_exit|quick_exit|abort|terminate)\s*\(")
GETENV = re.compile(r"\b(secure_)?getenv\s*\(")
CONDITIONAL = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b")
# The step loop knows requests, but not their kinds: those are in src/engine/outputs/.
STEP_LOOP = re.compile(r"src/engine/step_loop\.(h|cc)$")
KINDS = re.compile(r"beam|embedding|pooling|prompt_?logprobs|matcher|\bsamplers?\b|outputs/kinds\.h|params\.\w", re.I)
CONTAINER = re.compile(r"\b(namespace|class|struct|union|enum)\b|\bextern\s*$")


def without_text(source):
    """The source with comments, strings and preprocessor lines blanked; lines stay."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match.group(0))
    pattern = (r'//[^\n]*|/\*.*?\*/|R"(?P<d>[^()\\\s]*)\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"'
               r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'")
    source = re.sub(pattern, blank, source, flags=re.S)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, source, flags=re.M)


def functions(code):
    """(first line, lines) of each function body outside functions."""
    scopes, start, line, head = [], None, 1, ""
    for char in code:
        if char == "\n":
            line += 1
        if char == "{":
            inside = any(s[0] == "function" for s in scopes)
            if inside or "(" not in head or (CONTAINER.search(head) and not head.rstrip().endswith(")")
                                             and "(" not in head.split("=")[0].split("class")[0]):
                scopes.append(("other", line))
            else:
                scopes.append(("function", line - head.lstrip("\n \t").count("\n")))
            head = ""
        elif char == "}":
            if scopes:
                kind, start = scopes.pop()
                if kind == "function":
                    yield start, line - start + 1
            head = ""
        elif char == ";":
            head = ""
        else:
            head += char


def limits_for(name):
    """(lines of a file, lines of a function)"""
    if name.endswith("_test.cc") or name.startswith(("tests/", "bench/")):
        return 900, 120
    if re.search(r"src/(backend|quant)/|src/ops/reference|_tables?\.(h|cc|inl)$|_data\.(h|cc)$", name):
        return 900, 150
    return 600, 70


def offences_in(name, source):
    lines = source.split("\n")
    code = without_text(source)
    code_lines = code.split("\n")
    file_limit, function_limit = limits_for(name)
    room = name.split("/")[1] if name.startswith("src/") else ""
    test = name.endswith("_test.cc") or name.startswith(("tests/", "bench/"))
    if len(lines) > file_limit:
        yield 1, f"{len(lines)} lines; {file_limit} are allowed"
    if name.endswith(".h") and not lines[0].startswith("// "):
        yield 1, "a header begins with its contract"
    for number, line in enumerate(lines, 1):
        if len(line) > 100 and "http" not in line and 'R"' not in line and not test:
            yield number, f"{len(line)} columns; 100 are allowed"
        for pattern, what in BANNED:
            if pattern.search(line) and not (test and "path" in what):
                yield number, f"{what}: {pattern.search(line).group(0)}"
        if CONDITIONAL.match(line) and room not in ("base", "backend", "quant") and not test:
            yield number, "conditional compilation belongs in base/, backend/ or quant/"
    if STEP_LOOP.search(name):
        for number, line in enumerate(lines, 1):
            if KINDS.search(line.split("//")[0]):
                yield number, f"the step loop names a kind of request: {KINDS.search(line).group(0)}"
    for number, line in enumerate(code_lines, 1):
        if GETENV.search(line) and name != "src/base/env.cc" and not test:
            yield number, "the environment is read in base/env.cc"
        if room not in ("", "cli") and not test and "/tool/" not in name:
            if PRINTS.search(line) and name not in ("src/base/log.cc", "src/base/status.cc"):
                yield number, "the library never prints"
            if EXITS.search(line) and name != "src/base/status.cc":
                yield number, "the library never exits"
    for number, length in functions(code):
        if length > function_limit:
            yield number, f"a function of {length} lines; {function_limit} are allowed"


def offences(root):
    root = Path(root)
    for top in ("include", "src", "tests", "bench"):
        for file in sorted((root / top).glob("**/*")):
            if file.suffix in SUFFIXES and file.is_file():
                name = file.relative_to(root).as_posix()
                for number, what in offences_in(name, file.read_text(encoding="utf8")):
                    yield f"{name}:{number}: {what}"


def self_test():
    header = "// What it is.\n//\n#pragma once\n"
    long_body = "  x += 1;\n" * 80
    cases = [
        ("src/ops/a.h", header + "int f();\n", 0),
        ("src/ops/a.h", "#pragma once\nint f();\n", 1),
        ("src/ops/a.cc", "void f(int x) {\n" + long_body + "}\n", 1),
        ("src/ops/a.cc", "namespace n {\nclass C {\n" + "  int f(int);\n" * 80 + "};\n}\n", 0),
        ("src/ops/a.cc", "namespace n {\nstruct S {\n  void f() {\n" + long_body + "  }\n};\n}\n", 1),
        ("src/ops/a.cc", 'const char* t = "{ // TO" "DO";\nint b = 1\'000;\n', 0),
        ("src/ops/a.cc", "// TO" "DO: more\n", 1),
        ("src/ops/a.cc", "#if defined(X)\n#endif\n", 1),
        ("src/backend/cpu/a.cc", "#if defined(X)\n#endif\n", 0),
        ("src/ops/a.cc", 'int f() { return getenv("X") != 0; }\n', 1),
        ("src/ops/a.cc", 'void f() { printf("x"); exit(1); }\n', 2),
        ("src/cli/a.cc", 'void f() { printf("x"); }\n', 0),
        ("src/ops/a.cc", "int x;\n" * 700, 1),
        ("src/ops/a.cc", "int x; " + "/" * 120 + "\n", 1),
        ("src/engine/step_loop.cc", "if (live.beams) advance_beams(live);\n", 1),
        ("src/engine/step_loop.cc", "if (r.request.params.beam_width > 0) return;\n", 1),
        ("src/engine/step_loop.cc", '#include "engine/outputs/kinds.h"\n', 1),
        ("src/engine/step_loop.h", "// Contract.\nvoid embed(const Embedding& e);\n", 1),
        ("src/engine/step_loop.cc", "// Beams are an output.\noutput->commit(task);\n", 0),
        ("src/engine/outputs/beams.cc", "class Beams {};\n", 0),
    ]
    failed = 0
    for name, source, wanted in cases:
        found = list(offences_in(name, source))
        if len(found) != wanted:
            print(f"self-test: {source[:60]!r}: found {found}, wanted {wanted} offences")
            failed = 1
    return failed


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
