"""Compares all that an engine computes with plain forward passes of its model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.engine_requests import make_request
from decoding.engines import poison_windows
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import Outcomes
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow


class Watch:
    """Compares every position of every step with a plain forward pass over what it may see."""

    def __init__(self, engine: Engine, model: PreTrainedModel) -> None:
        self.engine, self.model, self.worst, self.num_positions = engine, model, 0.0, 0
        self.rows: Sequence[ScheduledRow] = ()
        engine.on_launch = self._note
        function = engine._runner._forward._function  # type: ignore[attr-defined]
        self._hidden, self._logits = function.hidden, function.logits
        function.hidden = self

    def _note(self, rows: Sequence[ScheduledRow]) -> None:
        self.rows = rows
        poison_windows(self.engine)

    @torch.inference_mode()
    def __call__(self, ids: Tensor, *rest: Any, **options: Any) -> Tensor:
        hidden: Tensor = self._hidden(ids, *rest, **options)
        paths, found, position = list[list[int]](), list[Tensor](), 0
        logits, fed = self._logits(hidden), ids.tolist()
        for row in self.rows:
            before = row.request.tokens[: row.request.num_cached]
            num_tokens = row.num_tokens + row.num_drafts
            tokens = fed[position : position + num_tokens]
            paths.append([*before, *tokens])
            found.append(logits[position : position + num_tokens])
            position += num_tokens
            for outcome, count in enumerate(row.masks):
                seen = tokens[: row.num_tokens + outcome]
                paths.append([*before, *seen, *fed[position : position + count]])
                found.append(logits[position : position + count])
                position += count
        longest = max(map(len, paths))
        padded = [path + [0] * (longest - len(path)) for path in paths]
        expected = self.model(torch.tensor(padded), use_cache=False).logits
        for path, own, plain in zip(paths, found, expected, strict=True):
            if len(own):
                own_plain = plain[len(path) - len(own) : len(path)]
                error = (own - own_plain).abs().max() / own_plain.abs().max()
                self.worst = max(self.worst, float(error))
        self.num_positions += position
        return hidden


def crowd(**options: Any) -> list[Request]:
    """Requests in all modes that share prefixes, and of which some are preempted."""
    source = random.Random(0)
    stem = [source.randrange(4, 60) for _ in range(40)]
    ways: list[dict[str, Any]] = [
        {"mode": Mode.EXACT, "outcomes": Outcomes.ALL},
        {"threshold": 0.05, "window": 4},
        {"mode": Mode.AR, "num_prompt_logprobs": 0},
    ]
    return [
        make_request(
            str(index),
            [*stem[: source.randint(1, 40)], *(source.randrange(4, 60) for _ in range(3))],
            16,
            **ways[index % 3],
            **options,
        )
        for index in range(9)
    ]
