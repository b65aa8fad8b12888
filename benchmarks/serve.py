"""Serving: what HTTP costs, whether anything is lost, how fast the knob acts, and how the server ends.

    python benchmarks/serve.py --data ../shared/data --output docs/results/serve

Prints tables and writes OUTPUT.json and OUTPUT.png. Real HTTP on loopback: `mars serve` in a process of its
own, the client and the engine that it is compared with in this one; both share the machine's cores, and the
client's own share of the time is printed. --parts picks from: overhead (server against engine, side by side),
soak (64 clients, a third of whom leave; texts against lone runs, float32), knob (tau moved under load), burst
(with and without the load controller), ends (SIGTERM and SIGKILL under load).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console

from common import load_prompts, prompt_ids, ratio, table, write
from mars_lm import checkpoint as checkpoints
from mars_lm.decoding import Engine, generate
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings

MODEL = "benched"
ADMIN_KEY = "benchmark"
START_SECONDS = 300


@dataclasses.dataclass
class Reply:
    """What a client got.

    The outcome is whole; left (by the client); refused or error (in OpenAI's shape, before or within the
    stream); closed (before anything came); cut (in the midst of a stream: a SIGKILL's doing); or broken.
    """

    outcome: str
    text: str = ""
    tokens: int = 0
    events: list[tuple[float, int]] = dataclasses.field(default_factory=list)


async def ask(
    port: int, body: dict[str, Any], *, leave_after: int | None = None, into: Reply | None = None
) -> Reply:
    """Stream one chat request over a connection of its own; `leave_after` so many events, close it.

    `into`: what the client has got so far, to be looked at meanwhile.
    """
    reply = into or Reply("broken")
    data = json.dumps({"model": MODEL, "stream": True, **body}).encode()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        reply.outcome = "closed"
        return reply
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
        )
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            reply.outcome = "refused" if json.loads(await reader.read())["error"]["message"] else "broken"
            return reply
        pending, failed = b"", False
        while True:
            size = int(await reader.readline(), 16)
            pending += (await reader.readexactly(size + 2))[:-2]
            *events, pending = pending.split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    reply.outcome = "error" if failed else "whole"
                    return reply
                if not event.startswith(b"data: "):
                    continue
                chunk = json.loads(event[6:])
                if "error" in chunk:
                    failed = True
                elif "mars" in chunk:
                    reply.text += chunk["choices"][0]["delta"]["content"]
                    reply.tokens += chunk["mars"]["tokens"]
                    reply.events.append((time.perf_counter(), chunk["mars"]["tokens"]))
            if leave_after is not None and len(reply.events) >= leave_after:
                reply.outcome = "left"
                return reply
            if size == 0:
                return reply
    except (ConnectionError, asyncio.IncompleteReadError, ValueError):
        reply.outcome = "cut" if reply.events else "closed"
        return reply
    finally:
        writer.close()


class Served:
    """A `mars serve` process."""

    def __init__(
        self, args: Any, *options: object, dtype: str | None = None, port: int | None = None
    ) -> None:
        if port is None:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = int(probe.getsockname()[1])
        self.port = port
        command: list[object] = [sys.executable, "-m", "mars_lm.cli.main", "serve", "--model-name", MODEL]
        command += ["--port", port, "--dtype", dtype or args.dtype, *options]
        for name in ("model", "adapter"):
            if value := getattr(args, name):
                command += [f"--{name}", value]
        start = time.perf_counter()
        self.process = subprocess.Popen(
            list(map(str, command)),
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MARS_ADMIN_KEY": ADMIN_KEY},
        )
        while True:
            with contextlib.suppress(OSError):
                self.get("/ready")
                break
            if self.process.poll() is not None or time.perf_counter() - start > START_SECONDS:
                self.process.kill()
                raise MarsError("The server did not start: try the same command by hand, `mars serve ...`.")
            time.sleep(0.05)
        self.start_seconds = time.perf_counter() - start

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()

    def metric(self, *names: str) -> list[float]:
        text = self.get("/metrics")
        found = [re.search(rf"^{name} (\S+)$", text, re.MULTILINE) for name in names]
        return [float(match[1]) if match else 0.0 for match in found]

    def turn(self, **changes: Any) -> None:
        """PATCH /mars/settings."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/mars/settings",
            json.dumps(changes).encode(),
            {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"},
            method="PATCH",
        )
        urllib.request.urlopen(request, timeout=60).close()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def served(
    args: Any, *options: object, dtype: str | None = None, port: int | None = None
) -> Iterator[Served]:
    server = Served(args, *options, dtype=dtype, port=port)
    try:
        yield server
    finally:
        server.end()


def message(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def overhead(args: Any) -> list[dict[str, Any]]:
    """Tokens per second of the engine alone and through HTTP, in turn, at several numbers of streams."""
    loaded = load(args, args.dtype)
    rows = max(args.streams)
    prompts = load_prompts(args.data, "gsm8k", rows, args.seed)
    ids = prompt_ids(loaded, prompts)
    settings = DecodingSettings(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    engine = Engine(loaded, max_rows=rows, max_length=args.max_length)
    out = []
    with served(args, "--rows", rows, "--max-length", args.max_length) as server:

        async def load_server(count: int) -> int:
            body = {"max_tokens": args.max_new_tokens, "ignore_eos": True}
            replies = await asyncio.gather(
                *(ask(server.port, {**message(p), **body}) for p in prompts[:count])
            )
            check(all(reply.outcome == "whole" for reply in replies), "a stream was not whole")
            return sum(reply.tokens for reply in replies)

        for count in args.streams:
            alone, through, client, process = [], [], [], []
            for turn in range(args.repeats + 1):
                start = time.perf_counter()
                numbers = [engine.add(prompt, settings) for prompt in ids[:count]]
                for _ in engine.stream():
                    pass
                tokens = sum(len(engine.result(number).token_ids) for number in numbers)
                seconds = time.perf_counter() - start
                used = server.metric("process_cpu_seconds_total")[0]
                start, mine = time.perf_counter(), time.process_time()
                http_tokens = asyncio.run(load_server(count))
                http_seconds, mine = time.perf_counter() - start, time.process_time() - mine
                used = server.metric("process_cpu_seconds_total")[0] - used
                if turn:  # the first warms both up
                    alone.append(tokens / seconds)
                    through.append(http_tokens / http_seconds)
                    client.append(mine / http_seconds)
                    process.append(used / http_seconds)
            out.append(
                {
                    "streams": count,
                    "engine tokens/s": statistics.median(alone),
                    "HTTP tokens/s": statistics.median(through),
                    "HTTP / engine": ratio(through, alone),
                    "bar": 0.9,
                    "client cores": statistics.median(client),
                    "server cores": statistics.median(process),
                }
            )
    return out


def soak(args: Any) -> dict[str, Any]:
    """Many clients with random settings, a third of whom leave: nothing lost, doubled or changed."""
    draw = random.Random(args.seed)
    prompts = load_prompts(args.data, "gsm8k", 64, args.seed)
    loaded = load(args, "float32")
    jobs = []
    for number in range(args.requests):
        settings = {
            "max_tokens": draw.randint(4, args.max_new_tokens),
            "temperature": draw.choice([0.0, 0.0, 0.7, 1.0]),
            "top_p": draw.choice([1.0, 0.9]),
            "seed": number,
        }
        mars = (
            {}
            if loaded.mars is None
            else {
                "tau": draw.choice([0.0, 0.5, 0.9, 1.0]),
                "exact": draw.random() < 0.7,
                "block_size": draw.randint(1, loaded.mars.block_size),
            }
        )
        jobs.append((draw.choice(prompts), settings, mars, draw.randint(1, 8) if number % 3 == 2 else None))
    replies: list[Reply | None] = [None] * len(jobs)
    memory: list[tuple[int, float]] = []

    async def run(port: int) -> None:
        queue = iter(range(len(jobs)))

        async def client() -> None:
            for number in queue:
                prompt, settings, mars, leave_after = jobs[number]
                body = {**message(prompt), **settings, "mars": mars}
                check(replies[number] is None, f"request {number} was answered twice")
                replies[number] = await ask(port, body, leave_after=leave_after)
                if number % 16 == 0:
                    bytes_ = await asyncio.to_thread(server.metric, "process_resident_memory_bytes")
                    memory.append((number, bytes_[0] / 2**20))

        await asyncio.gather(*(client() for _ in range(args.clients)))

    options = ("--rows", 16, "--max-length", args.max_length, "--queue", args.clients)
    with served(args, *options, dtype="float32") as server:
        start = time.perf_counter()
        asyncio.run(run(server.port))
        seconds = time.perf_counter() - start
        time.sleep(1.0)
        running, waiting = server.metric("mars_rows_running", "mars_queue_waiting")
    outcomes = [reply.outcome if reply else "lost" for reply in replies]
    ids = {prompt: prompt_ids(loaded, [prompt])[0] for prompt in prompts}
    compared = differing = 0
    for (prompt, settings, mars, _), reply in zip(jobs, replies, strict=True):
        if reply is None or reply.outcome != "whole":
            continue
        named = {**settings, **mars}
        named["max_new_tokens"] = named.pop("max_tokens")
        if not mars:
            named["tau"] = 1.0
        [alone] = generate(loaded, [ids[prompt]], DecodingSettings(**named), max_rows=1)
        compared += 1
        differing += reply.text != alone.text
    early = [m for n, m in memory if 100 <= n < 200] or [m for _, m in memory]
    late = [m for n, m in memory if n >= len(jobs) - 100] or [m for _, m in memory]
    return {
        "requests": len(jobs),
        **{name: outcomes.count(name) for name in sorted(set(outcomes))},
        "texts compared": compared,
        "texts that differ": differing,
        "rows left": running,
        "queue left": waiting,
        "MiB after 100": max(early),
        "MiB at the end": max(late),
        "seconds": seconds,
    }


def knob(args: Any, mode: str) -> dict[str, Any]:
    """Tau from 1.0 to 0.6 in the midst of steady streams, several times over."""
    prompts = load_prompts(args.data, "gsm8k", 4 * args.repeats, args.seed)
    body = {"max_tokens": args.max_new_tokens, "ignore_eos": True}
    failed, first_rise, before, after, near = 0, [], [], [], []
    with served(args, "--rows", 4, "--max-length", args.max_length, "--tau", "1.0", f"--{mode}") as server:

        async def run(prompts: list[str]) -> tuple[list[Reply], float]:
            replies = [Reply("broken") for _ in prompts]
            streams = [
                asyncio.create_task(ask(server.port, {**message(prompt), **body}, into=reply))
                for prompt, reply in zip(prompts, replies, strict=True)
            ]
            while any(len(reply.events) < args.max_new_tokens // 3 for reply in replies):
                check(not any(stream.done() for stream in streams), "a stream ended before tau moved")
                await asyncio.sleep(0.005)
            await asyncio.to_thread(server.turn, tau=0.6)
            moved = time.perf_counter()
            await asyncio.gather(*streams)
            return replies, moved

        for turn in range(args.repeats):
            server.turn(tau=1.0)
            replies, moved = asyncio.run(run(prompts[4 * turn : 4 * turn + 4]))
            failed += sum(reply.outcome != "whole" for reply in replies)
            events = sorted(event for reply in replies for event in reply.events)
            before.append(rate([e for e in events if e[0] <= moved]))
            after.append(rate([e for e in events if e[0] > moved]))
            # All four streams get tokens from every forward, until one has ended.
            later = [[tokens for at, tokens in reply.events if at > moved] for reply in replies]
            forwards = [sum(tokens) for tokens in zip(*later, strict=False)]
            first_rise.append(next((n for n, tokens in enumerate(forwards, 1) if tokens > 4), None))
            earlier = [[tokens for at, tokens in reply.events if at <= moved] for reply in replies]
            shown = min(10, *(len(tokens) for tokens in earlier))
            near.append(
                {
                    "before": [sum(tokens) for tokens in zip(*(t[-shown:] for t in earlier), strict=True)],
                    "after": forwards[:10],
                }
            )
    return {
        "mode": mode,
        "failed": failed,
        "forwards until the four streams got more than four tokens": first_rise,
        "tokens/s before": statistics.median(before),
        "tokens/s after": statistics.median(after),
        "after / before": ratio(after, before),
        "tokens of the forwards around it": near,
    }


def rate(events: list[tuple[float, int]]) -> float:
    """Tokens per second between the first and the last event."""
    if len(events) < 2:
        return 0.0
    return sum(tokens for _, tokens in events[1:]) / max(events[-1][0] - events[0][0], 1e-9)


def burst(args: Any) -> dict[str, Any]:
    """Quiet, then many requests at once, then quiet: tau, queue and tokens per second over time."""
    prompts = load_prompts(args.data, "gsm8k", 64, args.seed)
    results: dict[str, Any] = {}
    controller = ("--tau-range", "0.6:1.0", "--target-queue", 8)
    for name, options in (
        ("exact, without controller", ("--exact",)),
        ("exact, with controller", ("--exact", *controller)),
        ("lossy, without controller", ("--lossy", "--adaptive")),
        ("lossy, with controller", ("--lossy", "--adaptive", *controller)),
    ):
        rows = ("--rows", 4, "--max-length", args.max_length, "--tau", "1.0", "--queue", 256)
        with served(args, *rows, *options) as server:

            async def run() -> tuple[list[Reply], list[tuple[float, ...]]]:
                samples: list[tuple[float, ...]] = []
                start = time.perf_counter()
                over = asyncio.Event()

                async def watch() -> None:
                    names = ("mars_tau", "mars_queue_waiting", "mars_rows_running", "mars_tokens_total")
                    while not over.is_set():
                        values = await asyncio.to_thread(server.metric, *names)
                        samples.append((time.perf_counter() - start, *values))
                        await asyncio.sleep(0.25)

                watcher = asyncio.create_task(watch())
                body = {"max_tokens": args.max_new_tokens, "ignore_eos": True}

                def one(number: int) -> Any:
                    return ask(server.port, {**message(prompts[number % len(prompts)]), **body})

                replies = [await one(0), await one(1)]
                replies += await asyncio.gather(*(one(number) for number in range(args.burst)))
                replies += [await one(2), await one(3)]
                await asyncio.sleep(8.0)
                over.set()
                await watcher
                return replies, samples

            replies, samples = asyncio.run(run())
        busy = [sample for sample in samples if sample[2] > 0]
        results[name] = {
            "failed": sum(reply.outcome != "whole" for reply in replies),
            "seconds with a queue": busy[-1][0] - busy[0][0] if busy else 0.0,
            "lowest tau": min(sample[1] for sample in samples),
            "last tau": samples[-1][1],
            "samples": samples,
        }
    return results


def ends(args: Any) -> dict[str, Any]:
    """SIGTERM and SIGKILL under load."""
    prompts = load_prompts(args.data, "gsm8k", 16, args.seed)
    result: dict[str, Any] = {}

    async def kill_under_load(server: Served, number: int) -> list[Reply]:
        body = {"max_tokens": args.max_new_tokens, "ignore_eos": True}
        clients = [asyncio.create_task(ask(server.port, {**message(p), **body})) for p in prompts]
        while server.metric("mars_tokens_total")[0] < 10:
            await asyncio.sleep(0.02)
        server.process.send_signal(number)
        return await asyncio.gather(*clients)

    options = ("--rows", 4, "--max-length", args.max_length, "--drain-seconds", 3)
    with served(args, *options) as server:
        usual = server.start_seconds
        replies = asyncio.run(kill_under_load(server, signal.SIGTERM))
        result["after SIGTERM"] = count(replies)
        result["exit status"] = server.process.wait(60)
    with served(args, *options) as server:
        result["after SIGKILL"] = count(asyncio.run(kill_under_load(server, signal.SIGKILL)))
        port = server.port
    with served(args, *options, port=port) as server:
        result["usual start, seconds"] = usual
        result["start after SIGKILL, seconds"] = server.start_seconds
        [reply] = [asyncio.run(ask(server.port, {**message(prompts[0]), "max_tokens": 8}))]
        result["serves again"] = reply.outcome == "whole"
    return result


def count(replies: list[Reply]) -> dict[str, int]:
    outcomes = [reply.outcome for reply in replies]
    return {name: outcomes.count(name) for name in sorted(set(outcomes))}


def load(args: Any, dtype: str) -> checkpoints.Checkpoint:
    if args.model:
        return checkpoints.load(args.model, adapter=args.adapter, dtype=dtype, device="cpu")
    return checkpoints.load_default(dtype=dtype, device="cpu")


def check(condition: bool, what: str) -> None:
    if not condition:
        raise MarsError(f"The benchmark failed: {what}.")


def without_series(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.items()
        if name not in ("samples", "tokens of the forwards around it")
    }


def picture(path: Path, result: dict[str, Any]) -> None:
    """A burst over time, with and without the controller; forwards around a turn of the knob."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    burst, knobs = result.get("burst", {}), result.get("knob", ())
    panels = 3 * bool(burst) + bool(knobs)
    if not panels:
        return
    figure, grid = plt.subplots(panels, 1, figsize=(9, 2.75 * panels), squeeze=False)
    axes = list(grid[:, 0])
    for name, row in burst.items():
        colour = "tab:grey" if "without" in name else "tab:orange" if "lossy" in name else "tab:green"
        samples = row["samples"]
        at = [sample[0] for sample in samples]
        style = "--" if "lossy" in name else "-"
        axes[0].plot(at, [sample[1] for sample in samples], style, color=colour, label=name)
        axes[1].plot(at, [sample[2] for sample in samples], style, color=colour)
        rates = [
            (b[4] - a[4]) / (b[0] - a[0]) for a, b in zip(samples, samples[4:], strict=False)
        ]  # over about a second
        axes[2].plot(at[4:], rates, style, color=colour)
    if burst:
        for axis, label in zip(axes, ("default tau", "queue", "tokens per second"), strict=False):
            axis.set_ylabel(label)
            axis.set_xlabel("seconds")
        axes[0].legend()
    for row, colour in zip(knobs, ("tab:blue", "tab:green"), strict=False):
        for number, turn in enumerate(row["tokens of the forwards around it"]):
            tokens = turn["before"] + turn["after"]
            forwards = range(1 - len(turn["before"]), len(turn["after"]) + 1)
            label = None if number else row["mode"]
            axes[-1].plot(forwards, tokens, "o-", markersize=3, color=colour, alpha=0.6, label=label)
    if knobs:
        axes[-1].legend()
        axes[-1].axvline(0.5, color="tab:red", linewidth=0.8)
        axes[-1].set_ylabel("tokens of a forward, 4 streams")
        axes[-1].set_xlabel("forward, from tau's move from 1.0 to 0.6 on")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", help="default: the packaged model")
    parser.add_argument("--adapter")
    parser.add_argument("--dtype", default="auto", help="of every part but soak, which is in float32")
    parser.add_argument("--output", type=Path, required=True, help="path without its ending")
    parser.add_argument("--parts", nargs="+", default=["overhead", "soak", "knob", "burst", "ends"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--burst", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    console = Console(width=150)
    result: dict[str, Any] = {}
    try:
        if "overhead" in args.parts:
            result["overhead"] = overhead(args)
            console.print(table(result["overhead"], "server against engine"))
        if "soak" in args.parts:
            result["soak"] = soak(args)
            console.print(table([result["soak"]], f"{args.clients} clients, float32"))
        if "knob" in args.parts:
            result["knob"] = [knob(args, mode) for mode in ("lossy", "exact")]
            rows = [without_series(row) for row in result["knob"]]
            console.print(table(rows, "tau from 1.0 to 0.6 under load"))
        if "burst" in args.parts:
            result["burst"] = burst(args)
            rows = [{"": name, **without_series(row)} for name, row in result["burst"].items()]
            console.print(table(rows, f"a burst of {args.burst} requests"))
        if "ends" in args.parts:
            result["ends"] = ends(args)
            console.print(table([result["ends"]], "ends under load"))
    except MarsError as error:
        sys.exit(str(error))
    write(args.output.with_suffix(".json"), result, seed=args.seed)
    if "burst" in result or "knob" in result:  # the other parts are tables alone
        picture(args.output.with_suffix(".png"), result)


if __name__ == "__main__":
    main()
