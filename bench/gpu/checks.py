"""Is what runs on this GPU right, and how fast can the GPU be at all?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench.gpu.kernels import TOLERANCES, differences
from bench.gpu.setup import Setup
from torch import Tensor

from mars_platform.method.mode import Mode
from mars_serve.bench.decode.models import BenchModel
from mars_serve.engine.attention.paged import PagedAttention
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

Record = Callable[[str, Any], None]
_GAPS = {torch.bfloat16: 0.2, torch.float32: 2e-3}
"""How far below the best a chosen token's logit may be by the other implementation, in standard
deviations of the logits."""
_each_type = pytest.mark.parametrize(
    "dtype", _GAPS, ids=[str(each).removeprefix("torch.") for each in _GAPS]
)


def test_pages_are_read_in_place(setup: Setup, record_property: Record) -> None:
    engine = _engine(setup.model("0.5b"))
    found = type(engine.attention)
    record_property("attention", found.__name__)
    record_property("gpu", repr(torch.cuda.get_device_properties(0)) if setup.on_cuda else "none")
    assert (found is PagedAttention) is setup.on_cuda


@_each_type
def test_operators_equal_their_twins(
    setup: Setup, dtype: torch.dtype, record_property: Record
) -> None:
    found = differences(setup.device, dtype, is_tiny=setup.is_tiny)
    record_property("differences", found)
    wrong = {name: value for name, value in found.items() if not value <= TOLERANCES[dtype]}
    assert not wrong, f"differ by more than {TOLERANCES[dtype]}"


@_each_type
def test_the_engine_chooses_as_transformers(
    setup: Setup, dtype: torch.dtype, record_property: Record
) -> None:
    """Transformers rates the engine's tokens, since logits of random weights nearly tie."""
    model = setup.model("0.5b", dtype)
    plain, engine = model.create(), _engine(model)
    engine.warm_up()
    lengths = (5, 20, 40) if setup.is_tiny else (5, 37, 256, 700)
    most = 8 if setup.is_tiny else 48
    source = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(4, model.checkpoint.vocabulary_size - 8, (length,), generator=source)
        for length in lengths
    ]
    for mode in (Mode.AR, Mode.EXACT):
        rows = [
            Request(f"{mode}{i}", prompt.tolist(), DecodingOptions(most, mode, num_logprobs=1))
            for i, prompt in enumerate(prompts)
        ]
        reported = _decode(engine, rows)
        outcomes = [_rate(plain, row, reported[row.id]) for row in rows]
        gap = max(each[1] for each in outcomes)
        figures = {
            "tokens": sum(len(row.tokens) - row.num_prompt for row in rows),
            "equal_share": sum(each[0] for each in outcomes) / len(outcomes),
            "largest_gap": gap,
            "largest_logprob_difference": max(each[2] for each in outcomes),
        }
        record_property(str(mode), figures)
        assert gap <= _GAPS[dtype], f"mode {mode}: a token is {gap:.4f} below the best"


def _engine(model: BenchModel) -> Engine:
    settings = EngineSettings(
        max_num_seqs=8, num_pages=96, page_size=None, enable_prefix_caching=False
    )
    return Engine(model.checkpoint, settings, model=model.create(), device=model.device)


def _decode(engine: Engine, rows: list[Request]) -> dict[str, list[float]]:
    """Decode requests and return the log-probabilities of their tokens, by request."""
    reported: dict[str, list[float]] = {row.id: [] for row in rows}
    for row in rows:
        engine.add(row)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            reported[output.request_id] += [entry.logprob for entry in output.logprobs]
    return reported


@torch.inference_mode()
def _rate(
    plain: torch.nn.Module, row: Request, logprobs: list[float]
) -> tuple[float, float, float]:
    """Return the share of best tokens, the largest gap and the largest difference of a request."""
    device = next(plain.parameters()).device
    ids = torch.tensor([row.tokens], device=device)
    logits: Tensor = plain(input_ids=ids, use_cache=False).logits[0, row.num_prompt - 1 : -1]
    logits = logits.float()
    tokens = ids[0, row.num_prompt :, None]
    chosen = logits.gather(1, tokens)[:, 0]
    gaps = (logits.max(1).values - chosen) / logits.std(1)
    theirs = logits.log_softmax(-1).gather(1, tokens)[:, 0].cpu()
    difference = (theirs - torch.tensor(logprobs)).abs().max()
    return float((gaps == 0).float().mean()), float(gaps.max()), float(difference)
