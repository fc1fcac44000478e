"""Draft heads in steps: each draft of the masks in use is chosen behind the token before it."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor

from decoding.adapters import with_random_head
from decoding.engine_requests import PROMPT, make_request, make_row
from decoding.engines import passes_of, run
from decoding.tiny_models import build_model
from mars_platform.checkpoint.adapter.draft_head import NUM_CANDIDATES, DraftHead
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens
from mars_platform.checkpoint.metadata import DraftHeadSettings, MarsMetadata
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes, Sampling
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.draft_walk import DraftWalk
from mars_serve.engine.execution.proposals import build_reads, propose, unpack
from mars_serve.engine.kernels.native import native_for
from mars_serve.engine.request import Draft, LoraReference, Request
from mars_serve.engine.settings import EngineSettings

BANNED = torch.tensor([0, 7])
SPECIAL = SpecialTokens(eos=frozenset({1}), never_emitted=frozenset(BANNED.tolist()))
KINDS = [DraftHeadSettings(rank=5), DraftHeadSettings(rank=5, kind="static")]


def expected_chain(
    head: DraftHead, logits: Tensor, hidden: Tensor, token: int
) -> list[tuple[int, float]]:
    """Return the drafts of a group of masks behind a token, with their probabilities."""
    found = []
    for row, state in zip(logits.float(), hidden.float(), strict=True):
        allowed = row.index_fill(-1, BANNED, -torch.inf)
        shared = head.share_out(allowed[None], state[None], torch.tensor([token]))[0]
        token = int(shared.argmax())
        found.append((token, float(torch.exp(shared[token] - row.logsumexp(-1)))))
    return found


@pytest.mark.parametrize("settings", KINDS, ids=["gated", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [100, 9000])
def test_functions_of_cpp_choose_what_the_head_does(
    settings: DraftHeadSettings, dtype: torch.dtype, vocabulary: int
) -> None:
    torch.manual_seed(vocabulary)
    native = native_for(torch.device("cpu"), dtype)
    assert native is not None
    head = DraftHead(settings, vocabulary, 6).requires_grad_(False)
    for weights in head.parameters():
        weights.normal_()
    exact, lora = make_request(mode=Mode.EXACT), LoraReference("own", "", "", has_masks=True)
    for request in (others := [make_request(mode=Mode.EXACT) for _ in range(2)]):
        request.drafts = [Draft(3, 0.5)]
    others[1].lora = lora
    exact.drafts = [Draft(4, 0.5), Draft(5, 0.5)]
    rows = [
        make_row(exact, 1, (2, 4, 3)),
        make_row(make_request(threshold=0.1), 1, (3,)),
        *(make_row(request, 1, (4, 2)) for request in others),
    ]
    logits = torch.randn(12 + 4 + 8 + 8, vocabulary) * 3
    for row in logits:  # no other token ties with the likeliest ones, in bfloat16 either
        row[torch.randperm(vocabulary - 8)[:NUM_CANDIDATES] + 8] += 30
    logits = logits.to(dtype)
    logits[0, 4] = logits[1, 6] = logits[16, 9] = logits[24, 9] = 100.0  # one draft, then none
    hidden = torch.randn(len(logits), 6).to(dtype)
    reads = build_reads(rows, None)
    plain = propose(logits.clone(), reads, BANNED, native=native)
    table, walk = plain.clone(), DraftWalk(head, native, BANNED)
    assert walk.takes(rows, logits, reads)
    walk.walk(hidden, logits, table, rows)
    found = list(zip(*unpack(table), strict=True))
    chains = {(5, 9): 6, (13, 16): found[12][0], (18, 22): 9}
    for (begin, end), token in chains.items():
        place = slice(begin, end)
        for one, other in zip(
            found[place], expected_chain(head, logits[place], hidden[place], token), strict=True
        ):
            assert one == (other[0], pytest.approx(other[1], rel=1e-4))
    is_chosen = torch.zeros(len(table), dtype=torch.bool)
    for begin, end in chains:
        is_chosen[begin:end] = True
    assert torch.equal(table[~is_chosen], plain[~is_chosen])
    assert (table[is_chosen] != plain[is_chosen]).any(1).all()


SAMPLINGS = [Sampling(), Sampling(0.8, seed=3), Sampling(0.8, top_p=0.8, frequency_penalty=0.4)]


def test_steps_draft_alike_with_functions_of_cpp_or_without_and_leave_outputs_alone() -> None:
    found = []
    for has_head in (True, False):
        model = build_model()
        if has_head:
            with_random_head(model, KINDS[0])
        checkpoint = Checkpoint(
            None, model.config, None, MarsMetadata(block_size=4, mask_token_id=7), SPECIAL
        )
        engine = Engine(checkpoint, EngineSettings(num_pages=60, max_num_seqs=4), model=model)
        for native in (engine._runner._native, None):
            engine._runner._native = native
            found.append(passes_of_kinds(engine))
    native, torch_alone, without_head, _ = found
    assert native == torch_alone != without_head
    tokens = [list(chain(*passes)) for passes in native]
    tokens_of_ar = [list(chain(*passes)) for passes in without_head[2 * len(SAMPLINGS) :]]
    for index in range(len(tokens)):
        mode, sampling = divmod(index, len(SAMPLINGS))
        assert mode == 1 or tokens[index] == tokens_of_ar[sampling]


def passes_of_kinds(engine: Engine) -> list[list[list[int]]]:
    """Return the passes of requests in modes exact, threshold and ar, each with all samplings."""
    exact = DecodingOptions(24, Mode.EXACT, outcomes=Outcomes.ALL, ignore_eos=True)
    modes = exact, replace(exact, mode=Mode.THRESHOLD, threshold=0.3, outcomes=None)
    requests = [
        Request(f"{index} {number}", list(PROMPT), replace(options, sampling=sampling))
        for index, options in enumerate((*modes, replace(exact, mode=Mode.AR, outcomes=None)))
        for number, sampling in enumerate(SAMPLINGS)
    ]
    return list(passes_of(run(engine, requests)).values())
