"""Reads LoRA adapters for an engine's model, and keeps those that were read in main memory."""

from __future__ import annotations

import logging
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import torch

from mars_platform.checkpoint.adapted import refuse_other_base
from mars_platform.checkpoint.adapter.layers import adaptable_layers
from mars_platform.checkpoint.adapter.lora import LoraWeights, read_lora
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.checkpoint.metadata import ADAPTER_FILE, ADAPTER_WEIGHTS_FILE, METADATA_FILE
from mars_platform.checkpoint.weights import loader_of
from mars_platform.errors import UserError
from mars_serve.engine.request import LoraReference, Request
from mars_serve.engine.settings import EngineSettings

if TYPE_CHECKING:  # importing it takes seconds
    from transformers import PreTrainedModel

_ROOM = 1 << 24
"""Bytes that an adapter's files may have beside its products: names, settings and a mask's row."""

_log = logging.getLogger(__name__)


def read_weights(
    name: str, path: str | Path, checkpoint: Checkpoint, settings: EngineSettings
) -> tuple[LoraReference, LoraWeights]:
    """Read the weights of a LoRA adapter for a model.

    Raises:
        UserError: a file is missing, damaged, too large or changes meanwhile, or the adapter does
            not fit the model or the slots.
    """
    with torch.device("meta"):
        model = loader_of(checkpoint.config).from_config(checkpoint.config, trust_remote_code=False)
    _refuse_large(Path(path), model, settings.max_lora_rank)
    lora, adapter = LoraReference.to(name, path), read_lora(path)
    if adapter.config.r > settings.max_lora_rank:
        raise UserError(
            f"model: the LoRA adapter {lora.name!r} has rank {adapter.config.r}, more than the "
            f"{settings.max_lora_rank} that slots have room for; raise engine.max_lora_rank"
        )
    ours = checkpoint.metadata
    if (theirs := adapter.metadata) is not None:
        refuse_other_base(checkpoint, theirs.base, adapter.path)
        if ours is not None and ours.mask_token_id != theirs.mask_token_id:
            raise UserError(
                f"model: the mask of the LoRA adapter {lora.name!r} is token "
                f"{theirs.mask_token_id}, and that of the model is {ours.mask_token_id}; train it "
                "on the model that is served"
            )
    weights = adapter.weights(model)
    _refuse_change(lora, LoraReference.to(name, path))
    return lora, weights


def _refuse_large(path: Path, model: PreTrainedModel, rank: int) -> None:
    """Refuse files, before any is read, that are larger than those of a rank in float32."""
    files = (path / each for each in (ADAPTER_FILE, ADAPTER_WEIGHTS_FILE, METADATA_FILE))
    size = sum(file.stat().st_size for file in files if file.is_file())
    layers = adaptable_layers(model).values()
    most = 4 * rank * sum(each.in_features + each.out_features for each in layers) + _ROOM
    if size > most:
        raise UserError(
            f"adapter: the files in {path} have {size:,} bytes, and a LoRA adapter of rank {rank} "
            f"for this model has {most:,} at most; save it without other weights, or raise "
            "engine.max_lora_rank if its rank is higher"
        )


def _refuse_change(known: LoraReference, found: LoraReference) -> None:
    if known != found:
        raise UserError(
            f"model: the files of the LoRA adapter {known.name!r} are others than when it was "
            "loaded; load it again"
        )


class LoraCache:
    """Reads each adapter once for all requests that come with it, in whatever threads."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        """Keep as many adapters as there are slots."""
        self._checkpoint, self._settings = checkpoint, settings
        self._lock = Lock()
        self._known = OrderedDict[str, Future[LoraWeights]]()  # by the sum of their files

    def has(self, request: Request) -> bool:
        """Return whether a request can be prepared at once."""
        known = request.lora and self._known.get(request.lora.sum)
        return request.lora is None or (known is not None and known.done())

    def prepare(self, request: Request) -> None:
        """Give a request the weights of its LoRA adapter, if it names one.

        Clients are not told of paths, so the log alone has the reason why one cannot be used.

        Raises:
            UserError: the engine has no slots, or the adapter is none that it can serve.
        """
        if request.lora is None or request.lora_weights is not None:
            return
        if not self._settings.max_loras:
            raise UserError(
                "model: this engine has no slots for LoRA adapters; set engine.max_loras"
            )
        request.lora_weights = self._weights(request.lora)

    def _weights(self, lora: LoraReference) -> LoraWeights:
        with self._lock:
            known = self._known.get(lora.sum)
            reading = self._known.setdefault(lora.sum, Future())
            self._known.move_to_end(lora.sum)
        if known is not None:
            return known.result()
        try:
            found, weights = read_weights(lora.name, lora.path, self._checkpoint, self._settings)
            _refuse_change(lora, found)
        except Exception as error:
            _log.warning("the LoRA adapter %s cannot be used: %s", lora.name, error)
            refusal = UserError(
                f"model: the files of the LoRA adapter {lora.name!r} cannot be used where the "
                "model runs; its log tells why"
            )
            with self._lock:  # another request may find the files in order
                self._known.pop(lora.sum, None)
            reading.set_exception(refusal)
            raise refusal from error
        reading.set_result(weights)
        with self._lock:
            while len(self._known) > self._settings.max_loras:
                self._known.popitem(last=False)  # requests that have its weights keep them
        return weights
