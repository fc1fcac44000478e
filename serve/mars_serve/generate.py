"""One completion without a server: the engine, run to the end on a single request."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from rich.console import Console

from mars_platform.checkpoint import read_checkpoint
from mars_platform.conversations import render_prompt
from mars_platform.errors import UserError
from mars_platform.mode import Mode
from mars_platform.shading import print_shaded
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import DecodingOptions, Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.text import TextStream, encode

_DEFAULT_TOKENS = 256


@dataclass(frozen=True)
class Generation:
    """A completed output."""

    passes: list[str]
    """Text that each forward pass gave."""
    num_tokens: int
    finish_reason: str
    mode: Mode
    confidence_threshold: float
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        """Output tokens a forward pass."""
        return self.num_tokens / len(self.passes)


def generate_once(
    model: str, prompt: str, *, mode: Mode, threshold: float, max_tokens: int | None, chat: bool
) -> Generation:
    """Load a model and complete one prompt.

    Raises:
        UserError: the model or an option is unusable.
    """
    if not 0.0 < threshold <= 1.0:
        raise UserError(f"--threshold: {threshold} is not in (0, 1]; 1 is plain AR decoding")
    checkpoint = read_checkpoint(model)
    tokenizer = checkpoint.tokenizer
    if chat:
        prompt = render_prompt(tokenizer, [{"role": "user", "content": prompt}])
    ids = encode(tokenizer, prompt, add_special_tokens=not chat)
    if max_tokens is None:
        max_tokens = max(min(_DEFAULT_TOKENS, checkpoint.max_length - len(ids)), 1)
    settings = EngineSettings(max_batch=1)
    settings = settings.model_copy(
        update={"num_pages": -(-(len(ids) + max_tokens) // settings.page_size_on("cpu"))}
    )
    options = DecodingOptions(max_tokens, mode, 1.0 if mode is Mode.AR else threshold)
    engine = Engine(checkpoint, settings)
    engine.add(Request("generate", ids, options))
    return _run(engine, TextStream(tokenizer), options)


def _run(engine: Engine, stream: TextStream, options: DecodingOptions) -> Generation:
    started, passes, num_tokens, reason = time.monotonic(), list[str](), 0, None
    while engine.has_work:
        for output in engine.step():
            reason = output.finish_reason
            num_tokens += len(output.tokens)
            passes.append(stream.push(output.tokens, last=reason is not None))
    assert reason is not None
    seconds = time.monotonic() - started
    return Generation(passes, num_tokens, reason, options.mode, options.threshold, seconds)


def print_generation(generation: Generation, console: Console, *, as_json: bool) -> None:
    """Print the output shaded by forward pass and a line of figures, or all of it as JSON."""
    if as_json:
        figures = asdict(generation)
        figures |= {"text": "".join(generation.passes)}
        figures |= {"tokens_per_forward": generation.tokens_per_forward}
        console.print_json(json.dumps(figures))
        return
    print_shaded(console, generation.passes)
    console.print(
        f"{generation.num_tokens} tokens in {len(generation.passes)} forward passes "
        f"({generation.tokens_per_forward:.2f} a pass), mode {generation.mode}, "
        f"threshold {generation.confidence_threshold:g}, {generation.seconds:.2f} s",
        style="dim",
        highlight=False,
    )
