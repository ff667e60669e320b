#!/usr/bin/env python3
"""Checks the form of a commit message.

usage: check_commit_message.py FILE        the message that git is about to commit
       check_commit_message.py --self-test

The subject has at most 72 characters and no period at its end; an empty line separates it from the
body; the body's lines have at most 100 characters, except those that hold a URL or are indented.
Messages that git writes itself (merge, revert, fixup) pass.
"""
import sys

SUBJECT = 72
BODY = 100


def offences(message):
    lines = [line for line in message.split("\n") if not line.startswith("#")]
    while lines and not lines[-1].strip():
        lines.pop()
    subject = lines[0] if lines else ""
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")):
        return
    if not subject.strip():
        yield "the subject is empty"
    if len(subject) > SUBJECT:
        yield f"the subject has {len(subject)} characters; {SUBJECT} are allowed"
    if subject.endswith("."):
        yield "the subject ends with a period"
    if len(lines) > 1 and lines[1].strip():
        yield "an empty line must separate subject and body"
    for number, line in enumerate(lines[2:], 3):
        if len(line) > BODY and "://" not in line and not line.startswith(" "):
            yield f"line {number} has {len(line)} characters; {BODY} are allowed"


def self_test():
    good = ["cpu: prefetch the next panel", "a: b\n\nReasons.\n", "Merge branch 'x'\nanything",
            "x" * 72, "a\n\n" + "see https://example.org/" + "x" * 100, "a\n# a comment\n"]
    bad = ["", "x" * 73, "a: b.", "a: b\nbody", "a\n\n" + "x" * 101]
    for message in good:
        assert not list(offences(message)), (message, list(offences(message)))
    for message in bad:
        assert list(offences(message)), message


def main(arguments):
    if arguments == ["--self-test"]:
        self_test()
        return 0
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with open(arguments[0], encoding="utf-8") as file:
        found = list(offences(file.read()))
    for offence in found:
        print(f"commit message: {offence}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
