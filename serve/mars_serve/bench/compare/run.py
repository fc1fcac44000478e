"""Runs ``marsray bench compare``: starts servers one after the other, in rounds, and measures them.

A round starts each server alone, measures it with each number of clients and ends it. The next one
does so in another order, so that a drift of the machine's speed affects all alike.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.checkpoint.metadata import locate_model
from mars_platform.checkpoint.number_type import NumberType, stored_dtype
from mars_platform.cli.report import check_output_files
from mars_platform.cluster.processes import CommandFailed, free_port, running_server
from mars_platform.errors import UserError
from mars_platform.tier import Tier
from mars_serve.bench.compare.servers import ENVIRONMENT, Server, servers_of
from mars_serve.bench.decode.workload import requests_in_run
from mars_serve.bench.load.figures import ClientFigures, client_figures
from mars_serve.bench.load.plan import LoadPlan, PlannedRequest, Question, read_questions
from mars_serve.bench.load.report import error_notes
from mars_serve.bench.load.send import Replay, SentRequest
from mars_serve.bench.load.target import allow_connections, open_client
from mars_serve.bench.options import CompareOptions

_ItemT = TypeVar("_ItemT")
_WARM_UP_TOKENS = 16
_TIMEOUT_S = 600.0
_GREEDY = {"temperature": 0, "stream_options": {"include_usage": True}}
_OUTPUT = "vllm:generation_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Level:
    """The requests of all runs with one number of clients."""

    clients: int
    warm_up: list[PlannedRequest]
    requests: list[PlannedRequest]


@dataclass(frozen=True)
class Run:
    """One contender with one number of clients in one round."""

    round: int
    contender: str
    clients: int
    figures: ClientFigures
    tokens_per_pass: float | None
    """Output tokens for each forward pass of a request; None if the server does not tell."""
    problems: list[str]
    """Failures of requests, in words."""
    answers: dict[int, int | None]
    """Hashes of the answers' texts, by number of the request."""


@dataclass
class ServerComparison:
    """All that was measured so far."""

    options: CompareOptions
    dtype: NumberType
    runs: list[Run] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Servers that are not here or did not start, and what to do, in words."""


def compare_servers(
    options: CompareOptions,
    on_progress: Callable[[int, int, str], None],
    on_round: Callable[[ServerComparison], None],
) -> ServerComparison:
    """Measure all servers that are here.

    ``on_progress`` gets the number of runs that have ended, that of all runs and what runs now;
    ``on_round`` gets what was measured up to the end of each round.

    Raises:
        UserError: an option, the model or the prompts are bad, or no server could be measured.
        KeyboardInterrupt: the user stopped it; the running server has ended.
    """
    check_output_files({"--json": options.json_file, "--out": options.out, "--log": options.log})
    model = locate_model(options.model).resolve()
    checkpoint = read_checkpoint(model)
    comparison = ServerComparison(options, options.dtype or stored_dtype(model))
    servers = servers_of(options, model, comparison.dtype, checkpoint.metadata)
    levels = levels_of(options, checkpoint)
    allow_connections()
    for server in [each for each in servers if shutil.which(each.command[0]) is None]:
        comparison.left_out.append(f"{server.name} is not installed here: {server.remedy}")
        servers.remove(server)
    runs = comparison.runs
    for number in range(options.rounds):
        for server in _turned(servers, number):
            total = options.rounds * len(levels) * sum(len(each.contenders) for each in servers)
            on_progress(len(runs), total, f"round {number + 1}: {server.name} starts")
            try:
                for run in _runs(server, levels, options, number):
                    runs.append(run)
                    speed = f"{run.figures.tokens_per_s or 0:,.0f} tokens/s"
                    on_progress(len(runs), total, f"{run.contender}, {run.clients}: {speed}")
            except CommandFailed as error:
                comparison.left_out.append(f"{error}; {server.remedy}")
                servers.remove(server)
        if runs:
            on_round(comparison)
    if not runs:
        raise UserError(f"--contender: no server could be measured: {comparison.left_out[0]}")
    return comparison


def levels_of(options: CompareOptions, checkpoint: Checkpoint) -> list[Level]:
    """Share the prompts out, each to one run as far as they suffice, the same for all servers.

    Raises:
        UserError: the prompts cannot be read, or an option for random ones is bad.
    """
    sizes = [(n, requests_in_run(n, options.num_requests)) for n in options.clients]
    total = sum(n + num_requests for n, num_requests in sizes)
    if options.prompts is None:
        waiting = cycle(_made_up(options, checkpoint, total))
    else:
        waiting = cycle(read_questions(options.prompts, total, "--prompts"))

    def planned(count: int, max_tokens: int) -> list[PlannedRequest]:
        return [
            PlannedRequest(index, 0.0, Tier.DEFAULT, 0, max_tokens, question=question)
            for index, question in enumerate(islice(waiting, count))
        ]

    short = min(_WARM_UP_TOKENS, options.max_tokens)
    return [Level(n, planned(n, short), planned(count, options.max_tokens)) for n, count in sizes]


def _made_up(options: CompareOptions, checkpoint: Checkpoint, count: int) -> list[Question]:
    """Return questions of about as many tokens as the options say, in random words."""
    num_own = options.prompt_tokens - options.shared_tokens
    if num_own < 0:
        raise UserError("--shared-tokens: more than --prompt-tokens; lower it")
    source, tokenizer = random.Random(options.seed), checkpoint.tokenizer
    size = len(tokenizer)

    def draw(number: int) -> list[int]:
        return [source.randrange(size // 2, size) for _ in range(number)]

    shared = draw(options.shared_tokens)
    texts = [
        tokenizer.decode(shared + draw(num_own), skip_special_tokens=True) for _ in range(count)
    ]
    return [Question("", {"messages": [{"role": "user", "content": t}]}, None) for t in texts]


def _turned(items: list[_ItemT], number: int) -> list[_ItemT]:
    turn = number % max(len(items), 1)
    return [*items[turn:], *items[:turn]]


def _runs(
    server: Server, levels: Sequence[Level], options: CompareOptions, number: int
) -> Iterator[Run]:
    """Start a server, yield the runs of its contenders, and end it.

    Raises:
        CommandFailed: the server does not start, or answers none of the first requests.
    """
    port, name = free_port(), f"{server.name} (see {options.log})"
    address, command = f"http://127.0.0.1:{port}", [*server.command, "--port", str(port)]
    ready = f"{address}{server.ready_path}"
    with running_server(command, ready, ENVIRONMENT, name=name, log=options.log):
        for contender in _turned(list(server.contenders), number):
            for level in levels:
                yield asyncio.run(measured(server, contender, address, level, options, number))


async def measured(
    server: Server, contender: str, address: str, level: Level, options: CompareOptions, number: int
) -> Run:
    """Measure a contender of a running server, behind some short requests that warm it up.

    Raises:
        CommandFailed: the server answers none of these.
        KeyboardInterrupt: the user stopped it.
    """

    async def send(requests: list[PlannedRequest], part: str) -> list[SentRequest]:
        salt = {"cache_salt": f"{contender} {level.clients} {part}"} if server.takes_salt else {}
        fields = {**_GREEDY, **server.contenders[contender], **salt}
        plan = LoadPlan(server.model, requests, (), 0, fields)
        limits = level.clients, options.limit_s
        replayed = await Replay(client, plan, _TIMEOUT_S, lambda *_: None, *limits).run()
        if replayed.was_interrupted:
            raise KeyboardInterrupt
        return replayed.sent

    async with open_client(address, None) as client:
        warm = await send(level.warm_up, "first")
        if not any(each.is_served for each in warm):
            reasons = "; ".join(error_notes(warm))
            raise CommandFailed(f"{contender} answers no request: {reasons}")
        before = await _counters(client)
        sent = await send(level.requests, "then")
        after = await _counters(client)
    output, accepted = (after[key] - before[key] for key in (_OUTPUT, _ACCEPTED))
    figures = client_figures(sent, 0.0, max(each.end_s or 0.0 for each in sent))
    return Run(
        round=number,
        contender=contender,
        clients=level.clients,
        figures=figures,
        tokens_per_pass=figures.tokens_per_forward
        or (output / (output - accepted) if output > accepted else None),
        problems=list(error_notes(sent)),
        answers={each.request.index: each.said for each in sent if each.is_served},
    )


async def _counters(client: httpx.AsyncClient) -> dict[str, float]:
    """Return vLLM's counters of tokens, zero for servers without."""
    response, totals = await client.get("/metrics"), defaultdict[str, float](float)
    if response.status_code == httpx.codes.OK:
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                totals[sample.name] += sample.value
    return totals
