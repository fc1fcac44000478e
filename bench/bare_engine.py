"""Measures an engine without a server, in a process of its own; `bench.serving` runs it."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench.draws import DrawingEngine

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Level:
    """A number of clients, each of which sends one request at a time, and of all requests."""

    num_clients: int
    num_requests: int

    @classmethod
    def parse(cls, text: str) -> Level:
        """Read ``CLIENTS:REQUESTS``."""
        num_clients, _, num_requests = text.partition(":")
        return cls(int(num_clients), int(num_requests or num_clients))


class Decoding:
    """Requests that an engine decodes, of which so many at a time as there are clients."""

    def __init__(self, engine: Engine, max_tokens: int, num_ids: int) -> None:
        self._engine, self._max_tokens = engine, max_tokens
        self._num_ids, self._names, self._source = num_ids, count(), random.Random(1)

    def run(self, mode: Mode, level: Level) -> dict[str, float]:
        """Decode the requests of a level and return its figures."""
        firsts: list[float] = []
        begun = {self._add(mode): time.perf_counter() for _ in range(level.num_clients)}
        begin, num_left, num_tokens = time.perf_counter(), level.num_requests, 0
        num_left -= level.num_clients
        while self._engine.has_work:
            for output in self._engine.step():
                num_tokens += len(output.tokens)
                if output.request_id in begun:
                    firsts.append(time.perf_counter() - begun.pop(output.request_id))
                if output.finish_reason is not None and num_left > 0:
                    num_left -= 1
                    begun[self._add(mode)] = time.perf_counter()
        return {
            "tokens_per_s": num_tokens / (time.perf_counter() - begin),
            "first_token_ms": 1e3 * sorted(firsts)[len(firsts) // 2],
        }

    def _add(self, mode: Mode) -> str:
        prompt = [self._source.randrange(self._num_ids // 2) for _ in range(_PROMPT_TOKENS)]
        request = Request(
            str(next(self._names)), prompt, DecodingOptions(self._max_tokens, mode, 0.95)
        )
        self._engine.add(request)
        return request.id


def main(
    model: Annotated[Path, typer.Argument(help="MARS checkpoint directory.")],
    level: Annotated[list[Level], typer.Option(parser=Level.parse, help="CLIENTS:REQUESTS.")],
    mode: Annotated[list[Mode], typer.Option(help="Decoding mode; may be repeated.")],
    dtype: Annotated[str, typer.Option(help="Number type of the weights.")] = "bfloat16",
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a request.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    draws: Annotated[bool, typer.Option(help="Draw the accepted lengths.")] = False,
) -> None:
    """Print a line of JSON for each mode and level."""
    torch.set_num_threads(threads)
    checkpoint = read_checkpoint(model)
    sizes = EngineSettings(max_num_seqs=max(each.num_clients for each in level))
    kind = DrawingEngine if draws else Engine
    engine = kind(checkpoint, sizes, dtype=getattr(torch, dtype))
    engine.warm_up()
    decoding = Decoding(engine, max_tokens, checkpoint.config.vocab_size)
    for name in mode:
        for each in level:
            decoding.run(name, Level(each.num_clients, each.num_clients))  # warms up
            figures = decoding.run(name, each)
            print(json.dumps({"name": f"bare {name}", "clients": each.num_clients, **figures}))


if __name__ == "__main__":
    typer.run(main)
