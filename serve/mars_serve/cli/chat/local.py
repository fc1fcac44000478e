"""Runs a checkpoint in this process and asks it for answers. Imports no Ray or HTTP library."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event

import torch

from mars_platform.checkpoint.adapted import read_model
from mars_platform.checkpoint.inspection import check_chat_template
from mars_platform.checkpoint.number_type import stored_dtype
from mars_platform.data.prompt_encoding import PromptEncoder
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode, default_mode
from mars_serve.api.text import OutputText, StopRules
from mars_serve.cli.chat.answer import DecodingChoice, Message, Part
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason, Sampling
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import CPU_PAGES, EngineSettings

_THRESHOLD = 0.95
_MAX_TOKENS = 1024


class LocalModel:
    """A checkpoint that runs in this process."""

    def __init__(self, name: str, adapter: Path | None = None) -> None:
        """Load a checkpoint, a directory or hub id, in the number type that it is stored in."""
        checkpoint = read_model(name, adapter)
        check_chat_template(checkpoint.path)
        self.name = name
        self._tokenizer = checkpoint.tokenizer
        self._prompts = PromptEncoder(checkpoint.tokenizer)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        settings = EngineSettings(max_num_seqs=1)
        page_size = settings.page_size_on(device)
        num_pages = min(-(-checkpoint.max_length // page_size), CPU_PAGES)
        self._max_length = min(checkpoint.max_length, num_pages * page_size)
        self._engine = Engine(
            checkpoint,
            settings.model_copy(update={"num_pages": num_pages}),
            dtype=getattr(torch, stored_dtype(checkpoint.path)),
            device=device,
        )
        self._ids = count()

    def answer(self, messages: Sequence[Message], choice: DecodingChoice) -> Iterator[Part]:
        """Yield the parts of the next answer; see `mars_serve.cli.chat.answer.ChatModel`."""
        ids = self._prompts.chat(list(messages))
        room = self._max_length - len(ids)
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens, and the context {self._max_length}; "
                "begin another with /reset"
            )
        usual = default_mode(
            has_masks=self._engine.window > 0, has_threshold=choice.threshold is not None
        )
        options = DecodingOptions(
            min(choice.max_tokens or _MAX_TOKENS, room),
            Mode(choice.mode or usual),
            choice.threshold or _THRESHOLD,
            sampling=Sampling(temperature=choice.temperature),
        )
        request = Request(f"chat-{next(self._ids)}", ids, options)
        self._engine.add(request)
        try:
            yield from self._parts(request)
        finally:
            self._engine.cancel(request.id)

    def _parts(self, request: Request) -> Iterator[Part]:
        prompt = request.tokens[: request.num_prompt]
        text, reason = OutputText(self._tokenizer, StopRules(), prompt=prompt), None
        with _interrupts_noted() as interrupted:
            while self._engine.has_work and reason is None and not interrupted.is_set():
                for output in self._engine.step():
                    reason = output.finish_reason
                    if reason is FinishReason.ERROR:
                        raise UserError(f"the engine failed: {output.error}")
                    part = text.push(output.tokens, last=reason is not None)
                    yield Part(part.text, part.num_tokens, decoded=_decoded(request, reason))
        if interrupted.is_set():
            raise KeyboardInterrupt


def _decoded(request: Request, reason: FinishReason | None) -> dict[str, str | float]:
    if reason is None:
        return {}
    return {
        "mode": request.options.mode,
        "confidence_threshold": request.plan.threshold,
        "finish_reason": reason,
    }


@contextmanager
def _interrupts_noted() -> Iterator[Event]:
    """Note Ctrl-C instead of raising it within a step, which would leave the engine half way."""
    noted = Event()
    before = signal.signal(signal.SIGINT, lambda *_: noted.set())
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
