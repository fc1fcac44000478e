from __future__ import annotations

import pytest

from mars_platform.method.mode import Mode
from mars_serve.bench.decode.contenders import build_engine, decode_with_engine
from mars_serve.bench.decode.drawing import DrawingEngine
from mars_serve.bench.decode.models import BenchModel
from mars_serve.bench.decode.workload import (
    AcceptanceDistribution,
    BenchRequest,
    Draws,
    agreeing,
)
from mars_serve.engine.decoding_options import DecodingOptions, Sampling
from mars_serve.engine.execution.fault_isolation import Step


def fixed_length(tokens: int) -> AcceptanceDistribution:
    return AcceptanceDistribution(tokens_per_forward={tokens: 1.0})


@pytest.mark.parametrize(
    ("decoding", "passes", "positions"),
    [
        (DecodingOptions(1, Mode.AR), [1] * 13, [1] * 13),
        (  # after the first pass, two tokens and the masks that the rest has room for
            DecodingOptions(1, Mode.THRESHOLD, 0.95, window=4),
            [2] * 6 + [1],
            [1 + 4, 2 + 4, 2 + 4, 2 + 4, 2 + 4, 2 + 2, 2 + 0],
        ),
    ],
)
def test_drawn_lengths_and_positions_follow_the_mode(
    model: BenchModel, decoding: DecodingOptions, passes: list[int], positions: list[int]
) -> None:
    requests = [BenchRequest(str(n), (5 + n, 6, 7), 13) for n in range(6)]
    draws = Draws(fixed_length(2), fixed_length(3), seed=0)
    engine = build_engine(model, requests, 3, draws)
    decoded = decode_with_engine(requests, engine=lambda: engine, options=decoding)
    assert [len(tokens) for tokens in decoded.outputs] == [13] * 6
    assert decoded.num_passes == 6 * len(passes)
    assert decoded.num_positions == 6 * sum(positions)


def test_equal_requests_are_sampled_with_seeds_of_their_own(model: BenchModel) -> None:
    requests = [BenchRequest(str(n), (5, 6, 7), 13) for n in range(4)]
    engine = build_engine(model, requests, 2)
    sampled = DecodingOptions(1, Mode.AR, sampling=Sampling(temperature=1.0))
    first, second = (
        decode_with_engine(requests, engine=lambda: engine, options=sampled) for _ in range(2)
    )
    assert len(set(map(tuple, first.outputs))) == 4
    assert second.outputs == first.outputs


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_drafts_have_the_drawn_probability_as_confidence(model: BenchModel, right: float) -> None:
    seen: list[list[float]] = []

    class Watched(DrawingEngine):
        def begin_step(self) -> Step | None:
            seen.extend(
                [draft.confidence for draft in request.drafts]
                for request in self._requests.values()
            )
            return super().begin_step()

    requests = [BenchRequest("a", (5, 6, 7), 12)]
    draws = Draws(fixed_length(1), agreeing(right, 4), seed=0)
    engine = build_engine(model, requests, 1, draws, exact=True)
    engine.__class__ = Watched
    options = DecodingOptions(1, Mode.EXACT)
    decode_with_engine(requests, engine=lambda: engine, options=options)
    assert {rate for rates in seen for rate in rates} == {right}
