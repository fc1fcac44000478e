"""Measures what masks know of a model's own outputs, in figures that depend on no clock.

    python -m bench.agreement MODEL --data eval.jsonl [--adapter DIR]

A step of mode exact with a fixed window and masks for every outcome depends on nothing but the
output and the drafts behind each of its prefixes. So these drafts give agreement by depth and the
number of passes that mode exact would take. The share of outputs that end in a loop is told, too:
loops are easy to draft, so that they make tokens a pass look better than they are. Times are
measured by ``marsray bench decode``.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from mars_platform.checkpoint.adapted import read_model
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.cli.report import figure_column, interval, output_console, table_of, write_json
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import ratio_of_totals
from mars_serve.engine.decoding_options import DecodingOptions, Sampling
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.measure.evaluation.decoding import (
    DecodedItem,
    DecodingSetting,
    evaluation_engine,
    run_setting,
    steps_of,
)
from mars_serve.measure.evaluation.items import EvalItem, read_items

TEMPERATURES = (0.0, 0.7, 1.0)
_BATCH = 16
_MAX_PERIOD, _MIN_REPEATS, _MIN_LOOP = 32, 3, 24


def mask_drafts(
    engine: Engine, item: EvalItem, output: Sequence[int], temperature: float = 0.0
) -> NDArray[np.int64]:
    """Return the tokens that masks draft behind each prefix of an output.

    Args:
        engine: an engine without requests.
        item: the prompt; its index is the seed of the noise.
        output: tokens that the model wrote.
        temperature: temperature of the choice.

    Returns:
        int64 [output tokens, B]: entry [i, d - 1] is drafted at depth d behind the prompt and
        ``output[:i]``, for the place of ``output[i + d]``; it is -1 past the end of the output.
    """
    drafts = np.full((len(output), engine.window), -1)

    def requests() -> Iterator[Request]:
        for index in range(len(output)):
            options = DecodingOptions(
                min(engine.window + 1, len(output) - index),
                sampling=Sampling(temperature=temperature, seed=item.index),
                ignore_eos=True,
                reports_rejected=True,
            )
            yield Request(str(index), [*item.prompt, *output[:index]], options)

    for outputs in steps_of(engine, requests()):
        for each in outputs:
            _, *behind = [*each.tokens, *(token for token, _ in each.rejected)]
            drafts[int(each.request_id), : len(behind)] = behind
            engine.cancel(each.request_id)  # unless all that it may draft was accepted
    return drafts


def right_drafts(drafts: NDArray[np.int64], output: Sequence[int]) -> NDArray[np.bool_]:
    """Return which drafts equal the output's tokens, bool [tokens, B]; none past its end does."""
    num, window = drafts.shape
    padded = np.concatenate([np.asarray(output, dtype=np.int64), np.full(window, -1)])
    targets = np.lib.stride_tricks.sliding_window_view(padded[1:], window)[:num]
    right: NDArray[np.bool_] = (drafts == targets) & (targets >= 0)
    return right


def counts_by_depth(right: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return right drafts and all drafts within the output by depth, int64 [2, B]."""
    num, window = right.shape
    totals = np.maximum(num - np.arange(1, window + 1), 0)
    return np.stack([right.sum(0), totals])


def exact_passes(right: NDArray[np.bool_]) -> int:
    """Return the forward passes of mode exact with masks for every outcome.

    The first pass reads the prompt and gives one token; each later one gives the leading run of
    right drafts and one token more.
    """
    runs = right.cumprod(axis=1).sum(axis=1)
    cursor, passes = 0, 1
    while cursor + 1 < len(right):
        cursor += int(runs[cursor]) + 1
        passes += 1
    return passes


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Return whether an output ends with the same tokens over and over.

    A loop is a sequence of at most `_MAX_PERIOD` tokens that comes `_MIN_REPEATS` times or more and
    makes up the last `_MIN_LOOP` tokens or more.
    """
    for period in range(1, min(_MAX_PERIOD, len(tokens) // _MIN_REPEATS) + 1):
        length = max(period * _MIN_REPEATS, _MIN_LOOP)
        end = tokens[-length:]
        if length <= len(tokens) and all(
            one == other for one, other in zip(end, end[period:], strict=False)
        ):
            return True
    return False


def drafting(
    engine: Engine, items: Sequence[EvalItem], outputs: Sequence[DecodedItem], temperature: float
) -> dict[str, Any]:
    """Return what mode exact takes for the outputs, and the agreement of masks with them.

    As many masks are fed as the model knows.

    Returns:
        ``tokens``, ``passes`` and ``loops`` by item; ``right`` and ``drafts`` by depth, summed over
        every position of every output.
    """
    counts, passes = np.zeros((2, engine.window), np.int64), []
    for item, output in zip(items, outputs, strict=True):
        right = right_drafts(mask_drafts(engine, item, output.tokens, temperature), output.tokens)
        counts += counts_by_depth(right)
        passes.append(exact_passes(right))
    return {
        "tokens": [each.num_tokens for each in outputs],
        "passes": passes,
        "loops": [ends_in_loop(each.tokens) for each in outputs],
        "right": counts[0].tolist(),
        "drafts": counts[1].tolist(),
    }


def measure(
    checkpoint: Checkpoint, items: Sequence[EvalItem], max_tokens: int
) -> list[dict[str, Any]]:
    """Return the figures of a checkpoint, or of a model with an adapter, by temperature."""
    engine = evaluation_engine(
        checkpoint, items, max_tokens=max_tokens, max_num_seqs=_BATCH, exact=True
    )
    found = []
    for temperature in TEMPERATURES:
        setting = DecodingSetting(Mode.AR, 1.0, sampling=Sampling(temperature=temperature))
        outputs = run_setting(engine, items, setting, max_tokens=max_tokens)
        figures = drafting(engine, items, outputs, temperature)
        found.append({"temperature": temperature, **figures})
    return found


def print_table(found: list[dict[str, Any]]) -> None:
    """Print agreement by depth and tokens a pass."""
    columns = [
        figure_column("temperature", "temperature", "g"),
        figure_column("tokens a pass", lambda each: _tokens_a_pass(each, with_loops=True)),
        figure_column("without loops", lambda each: _tokens_a_pass(each, with_loops=False)),
        figure_column("loops", lambda each: statistics.mean(each["loops"]), ".1%"),
        *[
            figure_column(f"depth {depth + 1}", _agreed_at(depth), ".1%")
            for depth in range(len(found[0]["right"]))
        ],
    ]
    table = table_of(columns, found, title="mode exact with masks for every outcome")
    output_console(160).print(table)


def _agreed_at(depth: int) -> Callable[[dict[str, Any]], float | None]:
    def share(found: dict[str, Any]) -> float | None:
        drafts = found["drafts"][depth]
        return found["right"][depth] / drafts if drafts else None

    return share


def _tokens_a_pass(found: dict[str, Any], *, with_loops: bool) -> str:
    kept = [index for index, loop in enumerate(found["loops"]) if with_loops or not loop]
    tokens, passes = ([found[key][index] for index in kept] for key in ("tokens", "passes"))
    return interval(ratio_of_totals(tokens, passes), ".3f") if kept else "none"


def main(
    model: Annotated[str, typer.Argument(help="MARS checkpoint, or the model of an adapter.")],
    data: Annotated[list[Path], typer.Option(help="Held-out conversations, JSONL or Parquet.")],
    adapter: Annotated[Path | None, typer.Option(help="Adapter of the model.")] = None,
    items: Annotated[int, typer.Option(min=2, help="Conversations to decode.")] = 200,
    max_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of an output.")] = 160,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> None:
    """Print agreement by depth and tokens a pass at three temperatures."""
    torch.set_num_threads(threads)
    try:
        checkpoint = read_model(model, adapter)
        if checkpoint.metadata is None:
            raise UserError(f"MODEL: {model} is a plain AR checkpoint; name one that knows masks")
        read = read_items(
            data, checkpoint.tokenizer, max_length=checkpoint.max_length, max_items=items
        )
        found = measure(checkpoint, read, max_tokens)
        print_table(found)
        if json_file is not None:
            write_json(json_file, {"agreement": found})
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
