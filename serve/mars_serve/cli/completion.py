"""Completes one prompt with the engine, without a server."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from mars_platform.checkpoint.adapted import read_model
from mars_platform.cli.shading import print_shaded
from mars_platform.data.prompt_encoding import PromptEncoder
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode, default_mode
from mars_serve.api.incoming.options import draw_seed
from mars_serve.api.text import OutputText, StopRules, encode
from mars_serve.cli.options import GenerateOptions
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Sampling,
)
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

_DEFAULT_TOKENS = 256
_THRESHOLD = 0.95


@dataclass(frozen=True)
class LocalCompletion:
    """The output for one prompt, with figures of how it was decoded."""

    passes: list[str]
    """Text that each forward pass added."""
    num_tokens: int
    finish_reason: str
    mode: Mode
    confidence_threshold: float
    temperature: float
    seed: int
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        """Mean number of output tokens per forward pass."""
        return self.num_tokens / len(self.passes)


def generate_once(options: GenerateOptions) -> LocalCompletion:
    """Load a model and complete one prompt; the output ends before the first stop string."""
    sampling = _sampling(options)
    if "" in options.stop:
        raise UserError("--stop: an empty string is everywhere; leave it out")
    grammar = read_json_schema(options.json_schema) if options.json_schema else None
    checkpoint = read_model(options.model, options.adapter)
    tokenizer = checkpoint.tokenizer
    if options.raw:
        ids = encode(tokenizer, options.prompt, add_special_tokens=True)
    else:
        ids = PromptEncoder(tokenizer).chat([{"role": "user", "content": options.prompt}])
    room = max(min(_DEFAULT_TOKENS, checkpoint.max_length - len(ids)), 1)
    max_tokens = options.max_tokens or room
    settings = EngineSettings(max_num_seqs=1)
    settings = settings.model_copy(
        update={"num_pages": -(-(len(ids) + max_tokens) // settings.page_size_on("cpu"))}
    )
    mode = options.mode or default_mode(
        has_masks=checkpoint.metadata is not None, has_threshold=options.threshold is not None
    )
    threshold = options.threshold or _THRESHOLD
    decoding = DecodingOptions(max_tokens, mode, threshold, sampling=sampling, grammar=grammar)
    engine = Engine(checkpoint, settings)
    request = Request("generate", ids, decoding)
    engine.add(request)
    return _run(engine, request, OutputText(tokenizer, StopRules(options.stop), prompt=ids))


def _sampling(options: GenerateOptions) -> Sampling:
    seed = options.seed
    if seed is None:
        seed = draw_seed() if options.temperature else 0
    return Sampling(temperature=options.temperature, top_p=options.top_p, seed=seed)


def read_json_schema(file: Path) -> GrammarSpec:
    """Return the grammar for a JSON schema in a file."""
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except OSError as error:
        raise UserError(f"--json-schema: {file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--json-schema: {file} holds no JSON schema ({error})") from error
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text)


def _run(engine: Engine, request: Request, text: OutputText) -> LocalCompletion:
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
    return LocalCompletion(
        passes=passes,
        num_tokens=num_tokens,
        finish_reason=reason,
        mode=options.mode,
        confidence_threshold=request.plan.threshold,
        temperature=options.sampling.temperature,
        seed=options.sampling.seed,
        seconds=time.monotonic() - started,
    )


def print_completion(completion: LocalCompletion, console: Console, *, as_json: bool) -> None:
    """Print the output, shaded by forward pass, and a line of figures; or both as JSON."""
    if as_json:
        figures = asdict(completion)
        figures |= {"text": "".join(completion.passes)}
        figures |= {"tokens_per_forward": completion.tokens_per_forward}
        console.print_json(json.dumps(figures))
        return
    print_shaded(console, completion.passes)
    seed = f", seed {completion.seed}" if completion.temperature > 0 else ""
    console.print(
        f"{completion.num_tokens} tokens in {len(completion.passes)} forward passes "
        f"({completion.tokens_per_forward:.2f} a pass), mode {completion.mode}, "
        f"threshold {completion.confidence_threshold:g}{seed}, {completion.seconds:.2f} s",
        style="dim",
        highlight=False,
    )
