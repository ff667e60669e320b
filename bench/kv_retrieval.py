#!/usr/bin/env python3
"""What a policy of --kv-eviction still finds: copying a marked span from a long text.

usage: kv_retrieval.py FRESHET MODEL TEXT [--tokens 2000] [--items 64] [--policy JSON ...]

Each item is a passage of TEXT with the sentence "Remember this: the secret code is NNNNN." at a random
place, and the same words without the number at its end. An item counts if the model continues with the
number, greedily. Prints one line for each policy, and the share of the items that the full cache gets
which the policy gets too. Needs Python 3 alone.
"""
import argparse
import json
import random
import subprocess
import tempfile

MARK, DIGITS = "\n\nRemember this: the secret code is ", 5


def ids_of(freshet, model, texts, *flags):
    run = subprocess.run([freshet, "tokenize", model, "--jsonl", *flags], capture_output=True, text=True,
                         check=True, input="\n".join(json.dumps(text) for text in texts))
    return [json.loads(line) for line in run.stdout.splitlines()]


def items_of(freshet, model, text, tokens, count):
    random.seed(5)
    (ids,) = ids_of(freshet, model, [text])
    codes = ["".join(random.choices("0123456789", k=DIGITS)) for _ in range(count)]
    (cue,) = ids_of(freshet, model, [MARK], "--no-special")
    marks = ids_of(freshet, model, [f"{MARK}{code}.\n\n" for code in codes], "--no-special")
    answers = ids_of(freshet, model, codes, "--no-special")
    items = []
    for mark, answer in zip(marks, answers, strict=True):
        length = tokens - len(mark) - len(cue)
        at = random.randrange(len(ids) - length)
        body = ids[at:at + length]
        place = random.randrange(length // 20, length * 19 // 20)
        items.append((body[:place] + mark + body[place:] + cue, answer))
    return items


def found(freshet, model, items, policy):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
        json.dump([prompt for prompt, _ in items], f)
        f.flush()
        command = [freshet, "run", model, "--ids", f.name, "-n", str(DIGITS), "--temp", "0",
                   "--print-ids", "--device", "cpu"]
        if policy:
            command += ["--kv-eviction", policy]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    return [answer[:len(want)] == want for answer, (_, want) in zip(answers, items, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("freshet")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--policy", action="append", default=[])
    o = parser.parse_args()
    with open(o.text, encoding="utf-8") as f:
        items = items_of(o.freshet, o.model, f.read(400_000), o.tokens, o.items)
    full = found(o.freshet, o.model, items, None)
    print(f"{'full cache':60} {sum(full):4} of {len(items)}")
    for policy in o.policy:
        got = found(o.freshet, o.model, items, policy)
        both = sum(a and b for a, b in zip(full, got))
        print(f"{policy:60} {sum(got):4} of {len(items)}  {100 * both / max(1, sum(full)):.1f} % of full")


if __name__ == "__main__":
    main()
