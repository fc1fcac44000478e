"""Rivals of the engine: what transformers itself offers, ``generate`` and continuous batching.

Both decode one token a pass. ``packed`` gives them the engine's layout of the linear layers, so
that the engine's gain is told apart from that of its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from mars_platform.checkpoint.directory import SpecialTokens
from mars_serve.bench.decode.contenders import (
    ORDERS,
    Contender,
    Decoded,
    NotAvailable,
    static_batches,
)
from mars_serve.bench.decode.workload import BenchRequest

_NO_TOKEN = -1  # continuous batching's end token where there is none
_FLASH = "flash"  # whichever version transformers finds
_OPTIONS = {option.name for option in fields(ContinuousBatchingConfig)}
_POLL_S = 1.0


class HfGenerate(Contender):
    """``generate`` on static batches, padded on the left, with its default cache.

    A batch runs until its longest output is done; of each request only its own tokens count.
    """

    choices: Mapping[str, tuple[Any, ...]] = {"order": ORDERS}

    def __init__(
        self, model: Callable[[], PreTrainedModel], special: SpecialTokens, batch: int
    ) -> None:
        """Decode in batches of ``batch`` with a model that is made when first asked for."""
        self._model, self._special, self._batch = model, special, batch
        self._order = ORDERS[0]

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Take on the order."""
        self._order = settings["order"]

    def run(self, requests: Sequence[BenchRequest]) -> Decoded:
        """One static batch after the other."""
        model = self._model()
        model.set_attn_implementation("sdpa")
        outputs: dict[str, list[int]] = {}
        for part in static_batches(requests, self._batch, self._order):
            outputs |= self._generate(model, part)
        decoded = [outputs[request.id] for request in requests]
        return Decoded(decoded, num_passes=sum(map(len, decoded)))

    def _generate(
        self, model: PreTrainedModel, requests: list[BenchRequest]
    ) -> dict[str, list[int]]:
        width = max(len(request.prompt) for request in requests)
        padding = [width - len(request.prompt) for request in requests]
        # the mask hides the padding, so that any id will do
        ids = [[0] * n + list(r.prompt) for n, r in zip(padding, requests, strict=True)]
        visible = [[0] * n + [1] * (width - n) for n in padding]
        config = _generation_config(
            self._special,
            max_tokens=max(request.max_tokens for request in requests),
            end_tokens=sorted(self._special.eos) or None,
        )
        model.generation_config = config  # else a checkpoint's own fills what is None
        output = model.generate(
            torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(visible, device=model.device),
            generation_config=config,
        )
        rows = output[:, width:].tolist()
        return {
            request.id: _own_tokens(row[: request.max_tokens], self._special)
            for request, row in zip(requests, rows, strict=True)
        }


class HfContinuous(Contender):
    """Transformers' continuous batching on paged keys and values.

    Its manager is started with its settings, which is not timed, and ended after a run. Sharing of
    stored prefixes is off, because rounds repeat the same prompts.
    """

    def __init__(
        self,
        model: Callable[[], PreTrainedModel],
        special: SpecialTokens,
        batch: int,
        requests: Sequence[BenchRequest],
        device: str,
    ) -> None:
        """Run up to ``batch`` of the requests at once, with storage for any ``batch`` of them."""
        flash = (_FLASH,) if device == "cuda" else ()
        self.choices = {
            "attention": ("sdpa", "paged|eager", *flash),
            "page_size": (16, 256),
            "max_batch_tokens": (256, 1024),
        }
        self._model, self._special, self._batch = model, special, batch
        self._longest = max(len(request.prompt) + request.max_tokens for request in requests)
        self._settings = {name: values[0] for name, values in self.choices.items()}
        self._manager: Any = None
        self._attention = ""
        """What the manager has set the model's attention to; contenders share models."""
        self._num_runs = 0

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Take on attention, page size in tokens, and most tokens a step."""
        self.close()
        self._settings = dict(settings)
        self._start()

    def run(self, requests: Sequence[BenchRequest]) -> Decoded:
        """All requests are there from the start; at most the batch size runs at once."""
        assert self._manager is not None, "configured before a run"
        self._model().set_attn_implementation(self._attention)
        self._num_runs += 1
        for request in requests:
            self._manager.add_request(
                list(request.prompt), self._name(request), max_new_tokens=request.max_tokens
            )
        finished: dict[str, list[int]] = {}
        while len(finished) < len(requests):
            result = self._manager.get_result(timeout=_POLL_S)
            self._check(result)
            if result is not None and result.is_finished():
                finished[result.request_id] = list(result.generated_tokens)
        outputs = [
            _own_tokens(finished[self._name(request)], self._special) for request in requests
        ]
        return Decoded(outputs, num_passes=sum(map(len, outputs)))

    def close(self) -> None:
        """End the manager's thread and free its pages."""
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager.destroy()
            self._manager = None

    def _name(self, request: BenchRequest) -> str:
        return f"{self._num_runs}/{request.id}"

    def _start(self) -> None:
        model, page_size = self._model(), self._settings["page_size"]
        model.set_attn_implementation(_attention_to_ask_for(self._settings["attention"]))
        config = ContinuousBatchingConfig(
            num_blocks=self._batch * (-(-self._longest // page_size) + 1),
            max_batch_tokens=max(self._settings["max_batch_tokens"], 2 * self._batch),
            max_requests_per_batch=self._batch,
            allow_block_sharing=False,
            **_versioned_options(page_size, self._settings["attention"]),
        )
        end_tokens = sorted(self._special.eos) or _NO_TOKEN
        try:
            self._manager = model.init_continuous_batching(
                generation_config=_generation_config(
                    self._special, max_tokens=self._longest, end_tokens=end_tokens
                ),
                continuous_batching_config=config,
            )
            self._manager.warmup()
        except (RuntimeError, ValueError, ImportError, MemoryError, OSError) as error:
            self._manager = None
            raise NotAvailable(f"{type(error).__name__}: {error}") from error
        self._attention = model.config._attn_implementation
        self._manager.start()

    def _check(self, result: Any) -> None:
        if result is not None and result.error is not None:
            raise NotAvailable(result.error)
        if not self._manager.is_running():
            raise NotAvailable(f"its thread ended: {self._manager.background_thread_status}")


def _attention_to_ask_for(attention: str) -> str:
    """Name that leads to an attention: flash is found by the manager itself.

    Before transformers had ``auto_switch_to_flash``, the name alone kept it from looking.
    """
    if attention == _FLASH:
        return "sdpa"
    if attention == "sdpa" and "auto_switch_to_flash" not in _OPTIONS:
        return "paged|sdpa"
    return attention


def _versioned_options(page_size: int, attention: str) -> dict[str, Any]:
    """Options whose names depend on the version of transformers."""
    options: dict[str, Any] = {}
    options["page_size" if "page_size" in _OPTIONS else "block_size"] = page_size
    if "auto_switch_to_flash" in _OPTIONS:
        options["auto_switch_to_flash"] = attention == _FLASH
    return options


def _generation_config(
    special: SpecialTokens, *, max_tokens: int, end_tokens: list[int] | int | None
) -> GenerationConfig:
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=end_tokens,
        pad_token_id=0,
        suppress_tokens=sorted(special.never_emitted) or None,
    )


def _own_tokens(tokens: list[int], special: SpecialTokens) -> list[int]:
    """Tokens up to the first end token: what follows it is padding."""
    ends = [index for index, token in enumerate(tokens) if token in special.eos]
    return tokens[: ends[0] + 1] if ends else tokens
