"""Attacks a server with key a, and measures what key b's small streamed chats see of it.

    python /tmp/attack/attack.py TREE [--size small|100m] [--only NAME,...] [--num 100] [--out FILE]

TREE is the checkout whose server is attacked. Each attack is bounded in number and time. For each,
one line has the p50 and p99 of key b's time to first token beside it, and their ratios to what they
are alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp

SECONDS = 25.0
MODEL = "m"
WORDS = [
    "".join(random.Random(i).choices("abcdefghijklmnopqrstuvwxyz", k=3 + i % 7)) for i in range(5000)
]


SMALL = """
import json, shutil, sys
from pathlib import Path
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
source, target, length = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
target.mkdir(parents=True)
for each in source.iterdir():
    if each.name not in ("model.safetensors", "config.json", "generation_config.json"):
        shutil.copy(each, target)
old = json.loads((source / "config.json").read_text())
torch.manual_seed(0)
config = Qwen2Config(vocab_size=old["vocab_size"], hidden_size=256, intermediate_size=768,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    max_position_embeddings=length, eos_token_id=old["eos_token_id"], pad_token_id=0,
    bos_token_id=None)
Qwen2ForCausalLM(config).save_pretrained(target)
"""


def make_checkpoint(path: Path, tree: Path, max_length: int, size: str) -> None:
    """Write a checkpoint of random weights: 100M, or 12M, with a long context."""
    source = Path("/tmp/m100/mars")
    if not source.is_dir():
        source = path.parent / "made" / "mars"
    if not source.is_dir():
        code = "import sys; from pathlib import Path; from bench.serving import make_checkpoint; make_checkpoint(Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", code, str(source.parent)], env=environment(tree), cwd=tree, check=True)
    if size == "small":
        command = [sys.executable, "-c", SMALL, str(source), str(path), str(max_length)]
        subprocess.run(command, env=environment(tree), check=True)
        return
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = max_length
    (path / "config.json").write_text(json.dumps(config))


def environment(tree: Path) -> dict[str, str]:
    roots = [tree / each for each in ("platform", "train", "serve", "autoscale")] + [tree]
    return {**os.environ, "PYTHONPATH": ":".join(map(str, roots)), "HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def server(tree: Path, checkpoint: Path, directory: Path, extra: dict):
    port = free_port()
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("a", "b")
    ]
    model = {"name": MODEL, "path": str(checkpoint), **extra}
    settings = {"models": [model], "port": port, "keys": {"entries": keys}}
    (directory / "serve.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "mars_platform", "serve", str(directory / "serve.yaml")]
    log = (directory / "server.log").open("wb")
    ray_dir = tempfile.mkdtemp(prefix="atk", dir="/tmp")
    env = {**environment(tree), "RAY_TMPDIR": ray_dir, "RAY_ADDRESS": ""}
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True, cwd=directory
    )
    try:
        deadline = time.time() + 300
        while time.time() < deadline:
            if process.poll() is not None:
                for each in Path(ray_dir).rglob("*.err"):
                    if "Traceback" in each.read_text(errors="replace"):
                        print(each, each.read_text(errors="replace")[-2500:])
                sys.exit(f"the server ended: {(directory / 'server.log').read_text()[-3000:]}")
            with contextlib.suppress(OSError):
                from urllib.request import urlopen

                if urlopen(f"http://127.0.0.1:{port}/ready", timeout=2).status == 200:
                    break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(ray_dir, ignore_errors=True)


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def chat(text: str, **fields) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return json.dumps({**body, **fields}).encode()


def words(num_bytes: int, seed: int = 0) -> str:
    source, parts, size = random.Random(seed), [], 0
    while size < num_bytes:
        parts.append(source.choice(WORDS))
        size += len(parts[-1]) + 1
    return " ".join(parts)[:num_bytes]


class Attack:
    def __init__(self, base: str) -> None:
        self.base = base
        self.begun = asyncio.Event()
        self.statuses: Counter = Counter()
        connector = aiohttp.TCPConnector(limit=0)
        self.session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=120)
        )

    async def post(self, body, path="/v1/chat/completions", hang_s: float | None = None) -> int:
        try:
            async with asyncio.timeout(hang_s):
                async with self.session.post(
                    self.base + path, data=body, headers=headers("a")
                ) as answer:
                    await answer.read()
                    self.statuses[answer.status] += 1
                    return answer.status
        except TimeoutError:
            self.statuses["hung up"] += 1
        except aiohttp.ClientError as error:
            self.statuses[type(error).__name__] += 1
        return 0

    async def together(self, bodies, again: bool = True, path="/v1/chat/completions") -> None:
        """Send all bodies at once, each again and again once answered."""

        async def one(body) -> None:
            while True:
                status = await self.post(body, path)
                if not again:
                    return
                if status in (429, 503):
                    await asyncio.sleep(1)
                elif status == 0:
                    await asyncio.sleep(0.2)

        await asyncio.gather(*(one(body) for body in bodies))


def long_chats() -> list[bytes]:
    return [chat(words(250_000, seed)) for seed in range(60)]


def big_bodies() -> list[bytes]:
    return [chat(words(500_000, seed), metadata=words(540_000, seed)) for seed in range(48)]


def digits() -> list[bytes]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    number = "9" * 399
    text = json.dumps(body)[:-1] + ', "metadata": [' + ",".join([number] * 20_900) + "]}"
    return [text.encode()[: 8 * 2**20]] * 8


def small_digits() -> list[bytes]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    deep = "[" * 101 + "]" * 101  # so that it is measured
    text = json.dumps(body)[:-1] + ', "metadata": [' + ",".join(["9" * 399] * 610) + f', "{deep}"]}}'
    return [text.encode()] * 24


def arguments() -> list[bytes]:
    numbers = "[" + ",".join(["9" * 399] * 5200) + "]"
    values = "[" + ",".join(["1"] * 30_000) + "]"
    bodies = []
    for text in (numbers, values, '{"a": "' + words(400_000) + '"}'):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "y", "tool_call_id": "c"},
        ]
        bodies.append(json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode())
    return bodies * 4


def prompts_of_4096() -> list[bytes]:
    texts = [words(4000, seed) for seed in range(128)]
    return [json.dumps({"model": MODEL, "prompt": texts, "max_tokens": 1, "n": 1}).encode()] * 8


def allowed_ids() -> list[bytes]:
    bodies = []
    for num in (32_000, 1024):
        ids = list(range(4, 4 + num))
        bodies += [chat("count", allowed_token_ids=ids, max_tokens=64)] * 4
        many = ids * (131_072 // num)
        bodies += [chat("count", allowed_token_ids=many, max_tokens=64)] * 4
    return bodies


def logit_bias() -> list[bytes]:
    bias = {str(4 + index): 1.0 + index / 1000 for index in range(1024)}
    return [
        chat("count", logit_bias=bias, max_tokens=64, temperature=1.0, top_p=0.999, min_p=0.0001)
    ] * 8


def slow_grammars(seed: int) -> list[bytes]:
    bodies = []
    for index in range(16):
        properties = {
            f"p{seed}_{index}_{number}": {
                "type": "string", "pattern": "(a|b|c){1,40}[a-z]{3," + str(40 + index) + "}x"
            }
            for number in range(40)
        }  # fmt: skip
        schema = {"type": "object", "properties": properties}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        bodies.append(chat("x", response_format=form, max_tokens=16))
    return bodies


def heavy_states() -> list[bytes]:
    grammar = 'start: item{1,3000}\nitem: /[a-z]{0,50}([a-z0-9]|[a-m])*/ | "(" item ")"'
    regex = "((a|b)*a(a|b){12}|[ab]{0,200})*"
    return [chat("x", guided_grammar=grammar, max_tokens=200)] * 4 + [
        chat("x", guided_regex=regex, max_tokens=200)
    ] * 4


async def run_drips(attack: Attack) -> None:
    """Send bodies a few bytes at a time."""

    async def drip() -> None:
        async def parts():
            yield b'{"model": "m", "padding": "'
            yield b" " * 20_000
            while True:
                await asyncio.sleep(0.05)
                yield b" " * 500

        await attack.post(parts())

    await asyncio.gather(*(drip() for _ in range(300)))


async def run_hang_ups(attack: Attack) -> None:
    body = chat("tell me all", max_tokens=500, ignore_eos=True)

    async def one() -> None:
        while True:
            await attack.post(body, hang_s=0.5)
            await asyncio.sleep(0.05)

    await asyncio.gather(*(one() for _ in range(16)))


async def run_hung_long(attack: Attack) -> None:
    bodies = long_chats()

    async def one(body: bytes) -> None:
        while True:
            await attack.post(body, hang_s=0.3)

    await asyncio.gather(*(one(body) for body in bodies[:30]))


async def run_slow_grammars(attack: Attack) -> None:
    seed = 0
    while True:
        seed += 1
        await attack.together(slow_grammars(seed), again=False)


def repeated(make, path="/v1/chat/completions"):
    async def run(attack: Attack) -> None:
        bodies = await asyncio.to_thread(make)
        await asyncio.sleep(1)
        attack.begun.set()
        await attack.together(bodies, path=path)

    return run


ATTACKS = {
    "60 chats of 250 KB": repeated(long_chats),
    "48 bodies of 1 MiB": repeated(big_bodies),
    "bodies of 8 MiB of 399-digit numbers": repeated(digits),
    "bodies of 240 KiB of 399-digit numbers": repeated(small_digits),
    "2 MiB of tool-call arguments": repeated(arguments),
    "128 prompts of 4 KB": repeated(prompts_of_4096, "/v1/completions"),
    "long allowed_token_ids": repeated(allowed_ids),
    "large logit_bias": repeated(logit_bias),
    "hang-ups on unstreamed answers": run_hang_ups,
    "hang-ups on long chats": run_hung_long,
    "grammars slow to compile": run_slow_grammars,
    "grammars of many states": repeated(heavy_states),
    "bodies that drip": run_drips,
    "8 plain chats, for comparison": repeated(lambda: [chat("count to ten", max_tokens=64)] * 8),
}


async def ttft(session: aiohttp.ClientSession, base: str, number: int) -> float | None:
    body = chat(f"question {number}: {words(40, number)}", stream=True, max_tokens=4)
    begin = time.perf_counter()
    first = None
    async with session.post(
        base + "/v1/chat/completions", data=body, headers=headers("b")
    ) as answer:
        if answer.status != 200:
            print("key b got", answer.status, (await answer.text())[:200], flush=True)
            return None
        async for _ in answer.content.iter_any():
            if first is None:
                first = time.perf_counter() - begin
    return first


async def sample(base: str, num: int, until: float, start: int) -> list[float]:
    found = []
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for number in range(num):
            if time.time() > until:
                break
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                value = await ttft(session, base, start + number)
                if value is not None:
                    found.append(value)
            await asyncio.sleep(0.03)
    return found


def line(name: str, found: list[float], alone: tuple[float, float] | None, more: str = "") -> tuple:
    if len(found) < 2:
        print(f"{name:42s} {len(found)} answers {more}", flush=True)
        return (0.0, 0.0)
    ordered = sorted(found)
    p50, p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    ratio = f" ratio p50 {p50 / alone[0]:5.2f} p99 {p99 / alone[1]:5.2f}" if alone else ""
    print(
        f"{name:42s} n {len(found):4d} p50 {p50 * 1e3:7.1f} ms p99 {p99 * 1e3:7.1f} ms{ratio} {more}",
        flush=True,
    )
    return p50, p99


async def main(base: str, only: list[str] | None, num: int, out: str | None) -> None:
    results = {}
    await sample(base, 20, time.time() + 60, 0)
    alone_values = await sample(base, num, time.time() + 60, 1000)
    alone = line("alone", alone_values, None)
    results["alone"] = alone
    for position, (name, run) in enumerate(ATTACKS.items()):
        if only and not any(each in name for each in only):
            continue
        attack = Attack(base)
        task = asyncio.create_task(run(attack))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1 if run.__name__ != "run" else 60):
                await attack.begun.wait()
        await asyncio.sleep(2)
        found = await sample(base, num, time.time() + SECONDS, 2000 + 1000 * position)
        if task.done() and task.exception():
            print("attack failed:", repr(task.exception()))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
        await attack.session.close()
        results[name] = line(name, found, alone, str(dict(attack.statuses)))
        await asyncio.sleep(1)
        deadline = time.time() + 30
        while time.time() < deadline:  # until what was begun has ended
            quick = await sample(base, 3, time.time() + 30, 90_000)
            if quick and max(quick) < 2 * alone[1]:
                break
            await asyncio.sleep(1)
    again = await sample(base, num, time.time() + 60, 50_000)
    results["alone again"] = line("alone again", again, alone)
    if out:
        Path(out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tree", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--size", choices=["small", "100m"], default="small")
    parser.add_argument("--max-length", type=int, default=32_768)
    parser.add_argument("--only")
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--out")
    parser.add_argument("--model", default="{}", help="further settings of the model, as JSON")
    options = parser.parse_args()
    tree = options.tree.resolve()
    checkpoint = options.checkpoint or Path(f"/tmp/attack/{options.size}-{options.max_length}")
    if not checkpoint.is_dir():
        make_checkpoint(checkpoint, tree, options.max_length, options.size)
    directory = Path(tempfile.mkdtemp(prefix="attack", dir="/tmp/attack"))
    only = options.only.split(",") if options.only else None
    with server(tree, checkpoint, directory, json.loads(options.model)) as base:
        print("server at", base, "log in", directory, flush=True)
        asyncio.run(main(base, only, options.num, options.out))
