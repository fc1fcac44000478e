"""Scores a checkpoint on conversations, through the engine: quality and tokens a forward pass.

Items and outcomes are plain data: a set can be split over processes, each running its share, and
the outcomes put together again in any order. Knows no Ray, no HTTP and no terminal.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.data.answers import is_correct
from mars_platform.data.conversations import (
    Conversation,
    parse_conversation,
    read_answer,
    render_prompt,
    validate_conversation,
)
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import Estimate, paired_difference, proportion, ratio_of_totals
from mars_serve.api.text import decode, encode
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import (
    DecodingOptions,
    FinishReason,
    Outcomes,
    Request,
    Sampling,
    StepOutput,
)
from mars_serve.engine.settings import EngineSettings

_NUM_SEEDS = 2**63


@dataclass(frozen=True)
class EvalItem:
    """One held-out conversation, up to its final assistant turn."""

    source: str
    """``file:line`` of the row, which names the item."""
    prompt: tuple[int, ...]
    """Token ids that ask for the final turn."""
    answer: str | None
    """What a correct output ends with; None where the row has no ``answer``."""
    states_answer: bool
    """Whether the row's own final turn counts as correct. Where it does not, a model that was
    trained on such rows will not either."""
    index: int = 0
    """Its place among all items; what it draws depends on that and not on who runs it."""


@dataclass(frozen=True)
class Setting:
    """One way of decoding."""

    mode: Mode
    threshold: float
    """τ in (0, 1]; without meaning outside mode threshold."""
    outcomes: Outcomes | None = None
    """In mode exact; None leaves the choice to the engine."""
    calibrated: bool = False
    """Compare the confidence that calibration corrected with τ."""
    sampling: Sampling = field(default_factory=Sampling)
    """An item's seed is this one plus the item's index."""


ONE_TOKEN = Setting(Mode.AR, 1.0)


@dataclass(frozen=True)
class Outcome:
    """What one item gave in one setting."""

    source: str
    """Name of the item."""
    tokens: tuple[int, ...]
    """Output tokens, an end token included."""
    num_passes: int
    """Forward passes that gave a token."""
    num_positions: int
    """What those passes fed: committed tokens, drafts and masks; of the prompt, its last token."""
    finish_reason: FinishReason
    correct: bool | None
    """None where the item has no answer to check."""

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return len(self.tokens)


@dataclass(frozen=True)
class Score:
    """What all items gave in one setting; every `Estimate` holds a 95% interval."""

    num_items: int
    num_checkable: int
    accuracy: Estimate | None
    """Share of the checkable items answered correctly; None where none is checkable."""
    difference: Estimate | None
    """Accuracy minus the baseline's, paired by item; None where there is nothing to compare."""
    tokens_per_forward: Estimate
    positions_per_forward: Estimate
    """Fed in a pass that gave tokens, a prompt before its last token left out."""
    identical: float | None
    """Share of outputs that equal the baseline's token for token; None without a baseline."""
    mean_tokens: float
    """Output tokens of an item."""
    cut_off: float
    """Share of outputs that the token limit ended."""


def read_items(
    paths: Iterable[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    max_items: int | None = None,
) -> list[EvalItem]:
    """Read conversations from JSONL and Parquet files: the first ``max_items``, or all.

    Args:
        paths: the files, in order.
        tokenizer: the model's, with its chat template.
        max_length: tokens that the model's context holds, prompt and output together.
        max_items: most rows to read over all files.

    Raises:
        UserError: a file cannot be read or holds no row, or a row is bad; the latter names file
            and line. Bad rows are never skipped: two models must be scored on the same items.
    """
    items = []
    for index, (source, row) in enumerate(islice(_rows(paths), max_items)):
        try:
            item = _item(source, _parse(row), tokenizer, max_length)
            items.append(replace(item, index=index))
        except UserError as error:
            raise UserError(f"{source}: {error}") from error
    if not items:
        raise UserError("data: the files hold no row; name files with conversations")
    return items


def evaluation_engine(
    checkpoint: Checkpoint,
    items: Sequence[EvalItem],
    *,
    max_tokens: int,
    max_num_seqs: int,
    exact: bool = False,
    min_pool_tokens: int = 1,
    model: PreTrainedModel | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Engine:
    """Engine with the pages for any ``max_num_seqs`` of the items to run together.

    Args:
        checkpoint: tokenizer, special tokens and block size; its weights are loaded unless
            ``model`` is given.
        items: all that will be run.
        max_tokens: most output tokens of an item; what the context leaves may be less.
        max_num_seqs: items that run at once.
        exact: whether some setting is of mode exact, whose steps are wider.
        min_pool_tokens: tokens that the pages hold at the least.
        model: a model to take over: the engine moves it, puts it into evaluation mode and changes
            its attention implementation, so that a model in training must be copied first.
        dtype: of the weights to load.
        device: where to run.

    Raises:
        UserError: the weights cannot be loaded.
    """
    defaults = EngineSettings()
    longest = heapq.nlargest(
        max_num_seqs, (min(len(item.prompt) + max_tokens, checkpoint.max_length) for item in items)
    )
    window = checkpoint.metadata.block_size if checkpoint.metadata else 0
    page_size = defaults.page_size_on(torch.device(device).type)
    settings = EngineSettings(
        num_pages=max(
            sum(-(-length // page_size) for length in longest), -(-min_pool_tokens // page_size)
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(
            defaults.max_num_batched_tokens, max_num_seqs * widest_row(window, exact=exact)
        ),
    )
    if model is not None:
        model = model.eval()
    return Engine(checkpoint, settings, model=model, dtype=dtype, device=device)


def widest_row(window: int, *, exact: bool) -> int:
    """Positions that a decoding row feeds at the most: no mask is left out for want of room.

    That is up to window + 1 unstored tokens and the masks or, in mode exact, the pending token, the
    drafts and a window of masks for each of their outcomes.
    """
    return (window + 1) ** 2 if exact else 2 * window + 1


def run_setting(
    engine: Engine,
    items: Sequence[EvalItem],
    setting: Setting,
    *,
    max_tokens: int,
    on_progress: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Decode every item, batched.

    Args:
        engine: without other requests; see `evaluation_engine`.
        items: what to decode; none at all is fine.
        setting: how to decode.
        max_tokens: most output tokens of an item; what the context leaves may be less.
        on_progress: called with the number of finished items whenever some have finished.

    Returns:
        Outcomes in the order of the items.

    Raises:
        UserError: the model cannot decode in this setting.
    """
    assert not engine.has_work, "an evaluation has its engine to itself"
    waiting = iter(enumerate(items))
    running: dict[str, Request] = {}
    passes: list[list[StepOutput]] = [[] for _ in items]
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(items):
        # twice the batch: a freed place is taken at once, and memory does not grow with the set
        for index, item in islice(waiting, 2 * engine.settings.max_num_seqs - len(running)):
            options = _options(item, setting, min(max_tokens, engine.max_length - len(item.prompt)))
            request = Request(str(index), list(item.prompt), options)
            engine.add(request)
            running[request.id] = request
        num_before = len(outcomes)
        for output in engine.step():
            index = int(output.request_id)
            passes[index].append(output)
            if output.finish_reason is not None:
                request = running.pop(output.request_id)
                outcomes[index] = _outcome(engine, items[index], request, passes[index])
        if on_progress is not None and len(outcomes) > num_before:
            on_progress(len(outcomes))
    engine.check_integrity()
    return [outcomes[index] for index in range(len(items))]


def score(outcomes: Sequence[Outcome], baseline: Sequence[Outcome] | None = None) -> Score:
    """Sum up one setting's outcomes.

    Args:
        outcomes: of all items, at least one, in any order.
        baseline: what to compare with, one-token decoding as a rule: outcomes of the same items,
            in any order; None where these outcomes are the baseline.
    """
    num_items = len(outcomes)
    checked = [outcome.correct for outcome in outcomes if outcome.correct is not None]
    difference = identical = None
    if baseline is not None:
        pairs = _pairs(outcomes, baseline)
        difference = _difference(pairs)
        identical = sum(ours.tokens == theirs.tokens for ours, theirs in pairs) / num_items
    return Score(
        num_items=num_items,
        num_checkable=len(checked),
        accuracy=proportion(sum(checked), len(checked)) if checked else None,
        difference=difference,
        tokens_per_forward=ratio_of_totals(
            [outcome.num_tokens for outcome in outcomes],
            [outcome.num_passes for outcome in outcomes],
        ),
        positions_per_forward=ratio_of_totals(
            [outcome.num_positions for outcome in outcomes],
            [outcome.num_passes for outcome in outcomes],
        ),
        identical=identical,
        mean_tokens=sum(outcome.num_tokens for outcome in outcomes) / num_items,
        cut_off=sum(outcome.finish_reason == FinishReason.LENGTH for outcome in outcomes)
        / num_items,
    )


def _rows(paths: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """Name of each row and the row, as bytes of JSON or decoded; lines count from 1."""
    for path in paths:
        read = _parquet_rows if path.suffix == ".parquet" else _jsonl_rows
        try:
            for line, row in enumerate(read(path), start=1):
                yield f"{path}:{line}", row
        except (OSError, pa.ArrowInvalid) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise UserError(f"data: {path} cannot be read ({reason}); check the file") from error


def _jsonl_rows(path: Path) -> Iterator[bytes]:
    with path.open("rb") as handle:
        yield from handle


def _parquet_rows(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def _parse(row: Any) -> Conversation:
    if not isinstance(row, bytes):
        return validate_conversation(row)
    try:
        text = row.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"not valid UTF-8 ({error.reason} at byte {error.start})") from error
    return parse_conversation(text)


def _item(
    source: str, conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> EvalItem:
    *before, final = conversation.messages
    prompt = render_prompt(tokenizer, [message.model_dump() for message in before])
    ids = encode(tokenizer, prompt, add_special_tokens=False)
    if len(ids) >= max_length:
        raise UserError(
            f"messages: the prompt has {len(ids)} tokens and leaves no room for an output in the "
            f"model's context of {max_length}; shorten it or leave the row out"
        )
    answer = read_answer(conversation)
    return EvalItem(
        source, tuple(ids), answer, answer is not None and is_correct(final.content, answer)
    )


def _options(item: EvalItem, setting: Setting, max_tokens: int) -> DecodingOptions:
    seed = (setting.sampling.seed + item.index) % _NUM_SEEDS
    return DecodingOptions(
        max_tokens,
        setting.mode,
        setting.threshold,
        outcomes=setting.outcomes,
        calibrated=setting.calibrated,
        sampling=replace(setting.sampling, seed=seed),
    )


def positions_fed(passes: Sequence[StepOutput]) -> int:
    """Positions of a request's passes, all of them, in order.

    The first one reads the end of the prompt, of which only the last token counts: how much of it
    a pass reads says nothing of decoding.
    """
    first, *others = passes
    return 1 + first.num_masks + sum(output.num_positions for output in others)


def _outcome(
    engine: Engine, item: EvalItem, request: Request, passes: Sequence[StepOutput]
) -> Outcome:
    assert request.finish_reason is not None
    tokens = request.tokens[request.num_prompt :]
    correct = None
    if item.answer is not None:
        # not every tokenizer takes each end token for a special one, which it would hide
        said = tokens[:-1] if request.finish_reason is FinishReason.STOP else tokens
        correct = is_correct(decode(engine.checkpoint.tokenizer, said), item.answer)
    return Outcome(
        item.source,
        tuple(tokens),
        len(passes),
        positions_fed(passes),
        request.finish_reason,
        correct,
    )


def _pairs(
    outcomes: Sequence[Outcome], baseline: Sequence[Outcome]
) -> list[tuple[Outcome, Outcome]]:
    by_source = {outcome.source: outcome for outcome in baseline}
    assert by_source.keys() == {outcome.source for outcome in outcomes}, "both have the same items"
    return [(outcome, by_source[outcome.source]) for outcome in outcomes]


def _difference(pairs: list[tuple[Outcome, Outcome]]) -> Estimate | None:
    checked = [
        (ours.correct, theirs.correct)
        for ours, theirs in pairs
        if ours.correct is not None and theirs.correct is not None
    ]
    if not checked:
        return None
    return paired_difference([ours for ours, _ in checked], [theirs for _, theirs in checked])
