#!/usr/bin/env python3
"""Writes the table of GPU kernels in docs/cuda.md from src/backend/cuda/*/*_rows.cc.

usage: gpu_kernel_table.py [--check]    --check: fail if the docs differ, and change nothing
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CUDA = ROOT / "src/backend/cuda"
DOCS = ROOT / "docs/cuda.md"
BEGIN, END = "<!-- begin: tools/gpu_kernel_table.py -->\n", "<!-- end -->\n"
TABLES = (("gemm", "kGemmRows", "`matmul`: out = W x"),
          ("gemm", "kSwigluRows", "`swiglu`: gate and up with a SwiGLU epilogue"),
          ("attention", "kAttentionRows", "`attention`; tokens are queries of a sequence"),
          ("moe", "kMoeRows", "`moe`: experts"))
ROW = re.compile(r'\{"(\w+)",\s*(\d+),\s*([^"]+?),\s*([^,"]+),\s*([^,"]+),\s*"([^"]*)",\s*\w+(?:<\d+>)?\}')
MASK = re.compile(r"constexpr uint64_t (k\w+) =\s*([^;]+);")
NUMBERS = {"kRowWarps": 8, "kMaxRouterTokens": 512, "kExtendRows": 64}
NAMES = {"kExactF32": "F32 that BF16 holds", "kInt4G128": "INT4 groups of 128",
         "kInt4G32": "INT4 groups of 32", "kInt8": "INT8", "kInt4": "INT4", "kE4M3": "FP8"}


def masks(text, known):
    for name, expression in MASK.findall(text):
        python = re.sub(r"bit\(\w+::(k\w+)\)", r'{"\1"}', " ".join(expression.split()).replace("& ~", "- "))
        known[name] = eval(python, {}, known)  # sets, their unions and differences
    return known


def tokens(text):
    return sum(NUMBERS.get(t, None) or int(t) for t in text.split(" + "))


def formats_text(formats, known):
    blocks = known["kBlockFormats"]
    say = lambda names: ", ".join(NAMES.get(n, n[1:]) for n in sorted(names))
    if formats >= blocks:
        return ", ".join(["block formats"] + ([say(formats - blocks)] if formats > blocks else []))
    if len(blocks & formats) > len(blocks) / 2:
        return f"block formats but {say(blocks - formats)}"
    return say(formats)


def table():
    lines, common = [], masks((CUDA / "gemm/gemm_rows.h").read_text(), {})
    for folder, name, title in TABLES:
        text = (CUDA / folder / f"{folder}_rows.cc").read_text()
        known = masks((CUDA / folder / f"{folder}_rows.h").read_text() + text, dict(common))
        body = re.search(rf"\b{name}\[\w+\] = \{{(.*?)\n\}};", text, re.S).group(1)
        rows = ROW.findall(body)
        if len(rows) != body.count('{"'):
            sys.exit(f"{folder}_rows.cc: a row of {name} is not as {sys.argv[0]} reads it")
        lines += [f"**{title}**", "", "| kernel | GPU | formats | tokens | where |",
                  "|---|---|---|---|---|"]
        for kernel, capability, mask, first, last, condition in rows:
            formats = masks(f"constexpr uint64_t kThis = {mask};", dict(known))["kThis"]
            span = f"{tokens(first)} and more" if last == "kAnyTokens" else (
                f"{tokens(first)} to {tokens(last)}" if first != last else first)
            gpu = "9.0" if capability == "90" else f"{int(capability) / 10} and above"
            lines.append(f"| `{kernel}` | {gpu} | {formats_text(formats, known)} | {span} | "
                         f"{condition or 'any shape'} |")
        lines.append("")
    return "\n".join(lines)


def main():
    docs = DOCS.read_text()
    begin, end = docs.index(BEGIN) + len(BEGIN), docs.index(END)
    wanted = docs[:begin] + "\n" + table() + docs[end:]
    if sys.argv[1:] == ["--check"]:
        if docs != wanted:
            sys.exit("docs/cuda.md: the table of kernels is not that of the sources: "
                     "run tools/gpu_kernel_table.py")
    elif docs != wanted:
        DOCS.write_text(wanted)


if __name__ == "__main__":
    main()
