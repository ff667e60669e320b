"""Many streams at once on loopback: some leave early, some read slowly; nothing is lost or leaked.

usage: load_test.py [--streams 200] [--leavers 50] [--slow 10]    needs FRESHET, FRESHET_SOURCE_DIR

The full size is --streams 2000 --leavers 500 --slow 100.
"""
import argparse
import asyncio
import json
import resource
import socket
import sys
import time

from serving import SANITIZED, Server, until

PROMPTS = ["Once upon a time", "The dog ran into", "She opened the door and", "In the garden",
           "It was raining when", "They walked along", "A long road led", "The old man said"]
TOKENS = {"whole": 24, "leaver": 1000, "slow": 100}


def request(i, tokens, slow):
    body = json.dumps({"prompt": f"{PROMPTS[i % 8]} {i}", "max_tokens": tokens, "temperature": 0.8,
                       "seed": i, "ignore_eos": True, "stream": True, "return_token_ids": True,
                       "stream_options": {"include_usage": True},
                       **({"logprobs": 20} if slow else {})}).encode()
    return (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: "
            + str(len(body)).encode() + b"\r\n\r\n" + body)


class Stream:
    """kind: whole (reads all), leaver (closes after a few events), slow (reads a little at a time)"""

    def __init__(self, i, kind):
        self.i, self.kind = i, kind
        self.ids = []
        self.done = False
        self.problem = None

    async def run(self, port):
        try:
            connection = socket.socket()
            if self.kind == "slow":  # a small window, so that the server has to queue
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(
                sock=connection, limit=1 << (13 if self.kind == "slow" else 16))
            writer.write(request(self.i, TOKENS[self.kind], self.kind == "slow"))
            await writer.drain()
            await self.read(reader)
            writer.close()
            if self.kind == "leaver":
                writer.transport.abort()
        except (OSError, asyncio.IncompleteReadError, ValueError) as e:
            self.problem = repr(e)

    async def read(self, reader):
        status = await reader.readline()
        if b" 200 " not in status:
            self.problem = status.decode() + (await reader.read(2000)).decode()
            return
        events = 0
        while line := await reader.readline():
            if self.kind == "slow":
                await asyncio.sleep(0.02)
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                self.done = True
                return
            event = json.loads(line[6:])
            if "error" in event:
                self.problem = str(event)
                return
            for choice in event["choices"]:
                self.ids += choice["token_ids"]
            events += 1
            if self.kind == "leaver" and events > self.i % 7:
                return
        self.problem = "the stream ended without [DONE]"


async def sample(server, seen, over):
    """Samples the number of waiting requests and the memory use."""
    while not over.is_set():
        numbers = await asyncio.to_thread(server.metrics)
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting",
                     "vllm:kv_cache_usage_perc"):
            value = sum(v for k, v in numbers.items() if k.startswith(name))
            seen[name] = max(seen.get(name, 0), value)
        seen["resident"] = max(seen.get("resident", 0), server.resident_bytes())
        await asyncio.sleep(0.2)


async def drive(server, streams):
    seen, over = {}, asyncio.Event()
    watcher = asyncio.create_task(sample(server, seen, over))
    await asyncio.gather(*(s.run(server.port) for s in streams))
    over.set()
    await watcher
    return seen


def settle(server):
    """Whether nothing is left soon."""
    counts = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return until(lambda: not any(v for k, v in server.metrics().items() if k.split("{")[0] in counts), pause=0.1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--leavers", type=int, default=50)
    parser.add_argument("--slow", type=int, default=10)
    parser.add_argument("suite", nargs="?")  # ctest names one
    o = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    server = Server("--disable-access-log")
    failures = []

    def check(condition, words):
        if not condition:
            failures.append(words)

    def kinds(n):
        period = max(1, o.streams // max(1, o.leavers))
        slow_period = max(1, o.streams // max(1, o.slow))
        return ["leaver" if i % period == 1 and i // period < o.leavers else
                "slow" if i % slow_period == 2 and i // slow_period < o.slow else "whole"
                for i in range(n)]
    # Warm-up rounds before the measured one, so that pools and caches are filled.
    warm = [Stream(i, k) for i, k in enumerate(kinds(o.streams))]
    asyncio.run(drive(server, warm))
    check(settle(server), "requests or blocks are left after the first round")
    asyncio.run(drive(server, [Stream(i, "leaver" if k == "leaver" else "whole")
                               for i, k in enumerate(kinds(o.streams))]))
    check(settle(server), "requests or blocks are left after the second round")
    files, resident = server.open_files(), server.resident_bytes()

    begin = time.monotonic()
    streams = [Stream(i, k) for i, k in enumerate(kinds(o.streams))]
    seen = asyncio.run(drive(server, streams))
    seconds = time.monotonic() - begin
    check(settle(server), "requests or blocks are left: " + str(
        {k: v for k, v in server.metrics().items() if "num_requests" in k or "kv_cache" in k}))
    time.sleep(0.5)

    problems = [f"{s.kind} {s.i}: {s.problem}" for s in streams if s.problem]
    check(not problems, f"{len(problems)} streams failed, such as {problems[:3]}")
    for kind in ("whole", "slow"):
        some = [s for s in streams if s.kind == kind]
        check(all(s.done and len(s.ids) == TOKENS[kind] for s in some), f"{kind}: not all complete")
    # The tokens of both rounds are equal, independent of the other clients.
    check(all(a.ids == b.ids for a, b in zip(warm, streams) if a.kind != "leaver"),
          "tokens differ between the rounds")
    alone = Stream(0, "whole")
    asyncio.run(alone.run(server.port))
    check(alone.ids == streams[0].ids, "tokens differ from those of a stream alone")
    check(server.open_files() <= files + 2, f"open files: {files} -> {server.open_files()}")
    grown = server.resident_bytes() - resident
    check(SANITIZED or grown < (8 << 20) + o.streams * 4096, f"memory grew by {grown >> 10} KiB")
    errors = {k: v for k, v in server.metrics().items() if k.startswith("vllm:request_success")}
    check(not any('"error"' in k for k in errors), str(errors))
    count = {k: sum(s.kind == k for s in streams) for k in ("whole", "leaver", "slow")}
    print(f"{count} in {seconds:.1f} s; at most {seen}; memory {resident >> 20} MiB, grown by "
          f"{grown >> 10} KiB; {sum(len(s.ids) for s in streams) / seconds:.0f} tokens/s")
    check(server.stop() == 0, "exit code")
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
