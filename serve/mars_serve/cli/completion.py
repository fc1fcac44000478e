"""One completion without a server: the engine, run to the end on a single request."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.cli.shading import print_shaded
from mars_platform.data.conversations import render_prompt
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.api.text import OutputText, StopRules, encode
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import (
    DecodingOptions,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Request,
    Sampling,
)
from mars_serve.engine.settings import EngineSettings

_DEFAULT_TOKENS = 256
_GREEDY = Sampling()
_MAX_TEMPERATURE = 2.0  # that of requests, too


@dataclass(frozen=True)
class Generation:
    """A completed output."""

    passes: list[str]
    """Text that each forward pass gave."""
    num_tokens: int
    finish_reason: str
    mode: Mode
    confidence_threshold: float
    temperature: float
    seed: int
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        """Output tokens a forward pass."""
        return self.num_tokens / len(self.passes)


def generate_once(
    model: str,
    prompt: str,
    *,
    mode: Mode,
    threshold: float,
    max_tokens: int | None,
    chat: bool,
    sampling: Sampling = _GREEDY,
    stop: Sequence[str] = (),
    grammar: GrammarSpec | None = None,
) -> Generation:
    """Load a model and complete one prompt; the output ends before the first string of ``stop``.

    Raises:
        UserError: the model or an option is unusable.
    """
    _check_ranges(threshold, sampling, stop)
    checkpoint = read_checkpoint(model)
    tokenizer = checkpoint.tokenizer
    if chat:
        prompt = render_prompt(tokenizer, [{"role": "user", "content": prompt}])
    ids = encode(tokenizer, prompt, add_special_tokens=not chat)
    if max_tokens is None:
        max_tokens = max(min(_DEFAULT_TOKENS, checkpoint.max_length - len(ids)), 1)
    settings = EngineSettings(max_num_seqs=1)
    settings = settings.model_copy(
        update={"num_pages": -(-(len(ids) + max_tokens) // settings.page_size_on("cpu"))}
    )
    options = DecodingOptions(max_tokens, mode, threshold, sampling=sampling, grammar=grammar)
    engine = Engine(checkpoint, settings)
    request = Request("generate", ids, options)
    engine.add(request)
    return _run(engine, request, OutputText(tokenizer, StopRules(tuple(stop))))


def read_json_schema(file: Path) -> GrammarSpec:
    """The grammar of a JSON schema in a file.

    Raises:
        UserError: the file cannot be read, or holds no JSON.
    """
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except OSError as error:
        raise UserError(f"--json-schema: {file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--json-schema: {file} holds no JSON schema ({error})") from error
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text)


def _check_ranges(threshold: float, sampling: Sampling, stop: Sequence[str]) -> None:
    if not 0.0 < threshold <= 1.0:
        raise UserError(f"--threshold: {threshold} is not in (0, 1]; 1 is plain AR decoding")
    if not 0.0 <= sampling.temperature <= _MAX_TEMPERATURE:
        limits = f"[0, {_MAX_TEMPERATURE:g}]"
        raise UserError(f"--temperature: {sampling.temperature} is not in {limits}; 0 is greedy")
    if not 0.0 < sampling.top_p <= 1.0:
        raise UserError(f"--top-p: {sampling.top_p} is not in (0, 1]; 1 is all tokens")
    if "" in stop:
        raise UserError("--stop: an empty string is everywhere; leave it out")


def _run(engine: Engine, request: Request, text: OutputText) -> Generation:
    options = request.options
    started, passes, num_tokens, reason = time.monotonic(), list[str](), 0, None
    while engine.has_work and reason is None:
        for output in engine.step():
            reason = output.finish_reason
            part = text.push(output.tokens, last=reason is not None)
            num_tokens += part.num_tokens
            passes.append(part.text)
            if part.is_stopped:
                reason = FinishReason.STOP
    assert reason is not None
    return Generation(
        passes,
        num_tokens,
        reason,
        mode=options.mode,
        confidence_threshold=request.threshold,
        temperature=options.sampling.temperature,
        seed=options.sampling.seed,
        seconds=time.monotonic() - started,
    )


def print_generation(generation: Generation, console: Console, *, as_json: bool) -> None:
    """Print the output shaded by forward pass and a line of figures, or all of it as JSON."""
    if as_json:
        figures = asdict(generation)
        figures |= {"text": "".join(generation.passes)}
        figures |= {"tokens_per_forward": generation.tokens_per_forward}
        console.print_json(json.dumps(figures))
        return
    print_shaded(console, generation.passes)
    seed = f", seed {generation.seed}" if generation.temperature > 0 else ""
    console.print(
        f"{generation.num_tokens} tokens in {len(generation.passes)} forward passes "
        f"({generation.tokens_per_forward:.2f} a pass), mode {generation.mode}, "
        f"threshold {generation.confidence_threshold:g}{seed}, {generation.seconds:.2f} s",
        style="dim",
        highlight=False,
    )
