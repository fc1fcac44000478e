"""Decodes with transformers itself: ``generate`` and continuous batching, as rivals of the engine.

Both decode one token in each pass. With packed linear layers, as the engine has them, they show how
much of the engine's gain is due to its kernels.
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
    DecodedRun,
    NotAvailable,
    static_batches,
)
from mars_serve.bench.decode.workload import BenchRequest

_NO_TOKEN = -1  # the end token for continuous batching if there is none
_FLASH = "flash"  # any version of flash attention that transformers finds
_OPTIONS = {option.name for option in fields(ContinuousBatchingConfig)}
_POLL_S = 1.0


class HfGenerate(Contender):
    """A contender that is ``generate`` on static batches, left-padded, with its default cache.

    A batch runs until its longest output is done; only the tokens that a request asked for count.
    """

    choices: Mapping[str, tuple[Any, ...]] = {"order": ORDERS}

    def __init__(
        self, model: Callable[[], PreTrainedModel], special: SpecialTokens, batch: int
    ) -> None:
        """Decode in batches of ``batch`` with a model that is made at first use."""
        self._model, self._special, self._batch = model, special, batch

    def run(self, requests: Sequence[BenchRequest]) -> DecodedRun:
        """Decode one static batch after the other."""
        model = self._model()
        model.set_attn_implementation("sdpa")
        outputs: dict[str, list[int]] = {}
        for part in static_batches(requests, self._batch, self._settings["order"]):
            outputs |= self._generate(model, part)
        decoded = [outputs[request.id] for request in requests]
        return DecodedRun(decoded, num_passes=sum(map(len, decoded)))

    def _generate(
        self, model: PreTrainedModel, requests: list[BenchRequest]
    ) -> dict[str, list[int]]:
        width = max(len(request.prompt) for request in requests)
        padding = [width - len(request.prompt) for request in requests]
        # any id will do: the attention mask hides the padding
        ids = [[0] * n + list(r.prompt) for n, r in zip(padding, requests, strict=True)]
        visible = [[0] * n + [1] * (width - n) for n in padding]
        config = _generation_config(
            self._special,
            max_tokens=max(request.max_tokens for request in requests),
            end_tokens=sorted(self._special.eos) or None,
        )
        model.generation_config = config  # a checkpoint's own would replace what is None
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
    """A contender that is transformers' continuous batching on paged keys and values.

    Its manager starts when it is configured, which is not timed, and ends when it is closed. Prefix
    caching is off, because rounds repeat the same prompts.
    """

    def __init__(
        self,
        model: Callable[[], PreTrainedModel],
        special: SpecialTokens,
        batch: int,
        requests: Sequence[BenchRequest],
        device: str,
    ) -> None:
        """Run up to ``batch`` of the requests at once, with pages for any ``batch`` of them."""
        flash = (_FLASH,) if device == "cuda" else ()
        self.choices = {
            "attention": ("sdpa", "paged|eager", *flash),
            "page_size": (16, 256),
            "max_batch_tokens": (256, 1024),
        }
        self._model, self._special, self._batch = model, special, batch
        self._longest = max(len(request.prompt) + request.max_tokens for request in requests)
        self._manager: Any = None
        self._attention = ""
        """Attention that the manager gave the model; set before each run, as models are shared."""
        self._num_runs = 0

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Set the attention, the page size in tokens and the most tokens of a step."""
        self.close()
        super().configure(settings)
        self._start()

    def run(self, requests: Sequence[BenchRequest]) -> DecodedRun:
        """Add all requests at once; at most the batch size of them run together."""
        assert self._manager is not None, "configure comes before run"
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
        return DecodedRun(outputs, num_passes=sum(map(len, outputs)))

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
    """Return the name to request an attention by; the manager itself looks for flash attention.

    Before transformers had ``auto_switch_to_flash``, only a name kept it from looking.
    """
    if attention == _FLASH:
        return "sdpa"
    if attention == "sdpa" and "auto_switch_to_flash" not in _OPTIONS:
        return "paged|sdpa"
    return attention


def _versioned_options(page_size: int, attention: str) -> dict[str, Any]:
    """Return the options whose names depend on the version of transformers."""
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
    """Return the tokens up to the first end token; the rest is padding."""
    ends = [index for index, token in enumerate(tokens) if token in special.eos]
    return tokens[: ends[0] + 1] if ends else tokens
