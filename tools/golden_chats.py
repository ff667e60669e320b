#!/usr/bin/env python3
"""Writes golden_chats.json: conversations as transformers renders them with published templates.

usage: golden_chats.py OUT      (in tests/data/templates; needs transformers and jinja2 3.1)

OUT is the unpacked tests/data/templates.tar.xz. Messages that go on, contents as parts, and calls
whose arguments are text. Where transformers refuses a shape that a client may send, the text is that
of the shape which the template takes.
"""
import copy, glob, json, sys

from transformers.utils.chat_template_utils import render_jinja_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
USER = {"role": "user", "content": "first question"}
ENDINGS = ["The answer is ", "x\n", "i", "<", "im", "", "  lead", "assistant"]
TOOLS = [{"type": "function", "function": {
    "name": "f", "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "z"}},
                   "required": ["a"]}}}]
ARGUMENTS = '{"a": 1,  "b": [1, 2]}'


def render(source, messages, **options):
    try:
        texts, _ = render_jinja_template([copy.deepcopy(messages)], chat_template=source,
                                         **{**TOKENS, **options})
        return texts[0]
    except Exception:
        return None


def parts(source):
    texts = [("system", ["be brief"]), ("user", ["first", " second"]), ("assistant", ["answer"]),
             ("user", ["third"])]
    lists = [{"role": r, "content": [{"type": "text", "text": t} for t in ts]} for r, ts in texts]
    joined = [{"role": r, "content": "".join(ts)} for r, ts in texts]
    text = render(source, lists, add_generation_prompt=True)
    if text is None or "'type'" in text or '"type"' in text or "third" not in text:
        text = render(source, joined, add_generation_prompt=True)
    return lists, text


def call(source):
    def history(arguments):
        calls = [{"id": "abcdefghi", "type": "function",
                  "function": {"name": "f", "arguments": arguments}}]
        return [USER, {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "ok"}]
    sent = history(ARGUMENTS)
    options = {"tools": TOOLS, "add_generation_prompt": True}
    text = render(source, sent, **options)
    if text is None or ARGUMENTS not in text:
        text = render(source, history(json.loads(ARGUMENTS)), **options)
    return sent, text if text and '"b"' in text else None


def main(out):
    golden = {}
    for path in sorted(glob.glob("*.jinja")):
        source = open(path, encoding="utf8").read()
        if "strftime_now" in source:
            continue
        cases = []
        for ending in ENDINGS:
            messages = [USER, {"role": "assistant", "content": ending}]
            cases.append({"messages": messages, "continue": True,
                          "text": render(source, messages, continue_final_message=True)})
        messages, text = parts(source)
        if not path.startswith("google-gemma-4"):  # whose roles differ
            cases.append({"messages": messages, "text": text})
        messages, text = call(source)
        cases.append({"messages": messages, "tools": TOOLS, "text": text})
        golden[path] = [c for c in cases if c["text"] is not None]
    with open(f"{out}/golden_chats.json", "w", encoding="utf8") as f:
        json.dump({"tokens": TOKENS, "templates": golden}, f, ensure_ascii=False, indent=0)


main(sys.argv[1])
