"""Runs ``marsray bench load``: replays a request trace against a server and measures at clients.

Each request is sent at its time, however the requests before it fare: a slow server gets no relief.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from mars_autoscale.traces.files import TraceRequest, read_trace
from mars_autoscale.traces.synthetic import TraceChange, changed
from mars_platform.cli.addresses import key_in
from mars_platform.cli.report import check_output_files
from mars_platform.errors import UserError
from mars_serve.bench.load.figures import LoadFigures, figures_of
from mars_serve.bench.load.plan import (
    LoadPlan,
    Question,
    made_up_requests,
    question_requests,
    read_questions,
)
from mars_serve.bench.load.send import Replay, Replayed
from mars_serve.bench.load.target import (
    allow_connections,
    checked_url,
    max_length_of,
    open_client,
    prompt_length_of,
    vocabulary_of,
)
from mars_serve.bench.options import LoadOptions


@dataclass(frozen=True)
class LoadTest:
    """A load test that has ended."""

    options: LoadOptions
    replayed: Replayed
    figures: LoadFigures


def run_load(options: LoadOptions, on_progress: Callable[[int, int, str], None]) -> LoadTest:
    """Run a load test; an interrupt while it sends ends it early, with figures up to then.

    ``on_progress`` is that of `Replay`.

    Raises:
        UserError: an option, the trace or the data is bad, an output file could not be written, or
            the server cannot be used.
    """
    url = checked_url(options.url, allow_remote=options.allow_remote)
    check_output_files({"--json": options.json_file})
    trace = _trace(options)
    if options.data is None and options.max_tokens is not None:
        raise UserError("--max-tokens: made-up prompts have the trace's outputs; give --data, too")
    questions = (
        read_questions(options.data, len(trace), "--data") if options.data is not None else []
    )
    allow_connections()

    async def run() -> Replayed:
        async with open_client(url, key_in(options.key_env)) as client:
            plan = await _plan(options, client, trace, questions)
            replay = Replay(client, plan, options.timeout_s, on_progress)
            return await replay.run()

    replayed = asyncio.run(run())
    return LoadTest(options, replayed, figures_of(replayed, options.objective_ttft_s))


def _trace(options: LoadOptions) -> list[TraceRequest]:
    given = read_trace(options.trace, options.trace_format)
    if options.duration_s is not None:
        change = TraceChange(cut_s=options.duration_s * options.speedup)
        given = changed(given, change, options.seed)
    return given[: options.max_requests]


async def _plan(
    options: LoadOptions,
    client: httpx.AsyncClient,
    trace: Sequence[TraceRequest],
    questions: Sequence[Question],
) -> LoadPlan:
    model, speedup = options.model, options.speedup
    max_length = await max_length_of(client, model)
    if not questions:
        vocabulary = await vocabulary_of(client, model)
        requests = made_up_requests(trace, speedup, max_length)
        return LoadPlan(model, requests, vocabulary, options.seed)
    lengths = [await prompt_length_of(client, model, each.request) for each in questions]
    pairs = list(zip(questions, lengths, strict=True))
    requests = question_requests(trace, speedup, max_length, pairs, options.max_tokens)
    return LoadPlan(model, requests, (), options.seed)
