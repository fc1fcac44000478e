"""A step's integers reach the device unchanged, with padding that reads position 0."""

from __future__ import annotations

import torch

from decoding.engine_requests import make_request, make_row
from mars_platform.method.mode import Confidence
from mars_serve.engine.batch import build_batch
from mars_serve.engine.device.transfer import HostCopy, host_numbers, to_device
from mars_serve.engine.execution.proposals import build_reads
from mars_serve.engine.execution.staging import InputSizes, fill

CPU = torch.device("cpu")
MASK = 3


def test_every_part_is_read_back_with_its_padding() -> None:
    requests = [
        make_request("a", [5, 6, 7], confidence=Confidence.MARGIN, calibrated=True),
        make_request("b", [8, 9], confidence=Confidence.ENTROPY),
    ]
    rows = [make_row(requests[0], 3, (2,)), make_row(requests[1], 2, (0,))]
    batch = build_batch(rows, MASK)
    sizes = InputSizes(len(batch.ids), num_reads=6, num_scored=0, num_attention=2)
    numbers = host_numbers(sizes.total, CPU).fill_(-1)
    parts = sizes.on_host(numbers)
    fill(parts, batch, build_reads(rows, [1.0, 2.0, 0.5]), ())
    parts.attention[:] = 17, 18
    step = sizes.on_device(to_device(numbers, CPU))
    assert step.ids.tolist() == [5, 6, 7, MASK, MASK, 8, 9]
    assert step.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert step.reads.tolist() == [2, 3, 4, 6, 0, 0]
    assert step.measures.tolist() == [1, 1, 1, 2, 0, 0]
    assert step.temperatures.view(torch.float64).tolist() == [1.0, 2.0, 0.5, 1.0, 1.0, 1.0]
    assert step.attention.tolist() == [17, 18]


def test_a_step_without_reads_reads_position_zero() -> None:
    row = make_row(make_request("a", [5, 6, 7]), 2, (0,), reads_logits=False)
    batch = build_batch([row], None)
    sizes = InputSizes(len(batch.ids), 1, 0, 0)
    numbers = host_numbers(sizes.total, CPU)
    fill(sizes.on_host(numbers), batch, None, ())
    assert sizes.on_device(numbers).reads.tolist() == [0]


def test_a_copy_to_the_host_keeps_what_was_there_when_it_began() -> None:
    table = torch.tensor([[1, 2]])
    copy = HostCopy(table)
    table.zero_()
    assert copy.wait().tolist() == [[1, 2]]
