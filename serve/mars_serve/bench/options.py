"""Defines the options of the commands ``marsray bench``.

Imports no Ray, torch or HTTP library.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field

from mars_autoscale.traces.files import TraceFormat
from mars_platform.checkpoint.number_type import NumberType
from mars_platform.config import Settings
from mars_platform.method.mode import Mode
from mars_serve.measure.options import Adapter


class DecodeOptions(Settings):
    """Options of ``marsray bench decode``."""

    model: Annotated[str | None, typer.Argument()] = None
    """Checkpoint directory or hub id; leave it out with --untrained."""
    adapter: Adapter = None
    untrained: str | None = None
    """Use random weights of this size: a config.json, qwen2-100m, qwen2.5-0.5b or qwen2.5-7b.
    Numbers of accepted tokens are drawn, with the frequencies of the MARS paper on GSM8K."""
    prompts: Path | None = None
    """File of conversations; by default random prompts."""
    contenders: Annotated[tuple[Mode, ...], typer.Option("--contender")] = tuple(Mode)
    """Mode to measure. May be repeated."""
    batches: Annotated[tuple[int, ...], typer.Option("--batch", min=1)] = (1, 4, 8, 16, 32)
    """Batch size. May be repeated."""
    rounds: int = Field(default=5, ge=1)
    """Number of times that each contender is timed."""
    num_requests: int = Field(default=48, ge=1)
    """Requests per run, but at least two batches."""
    prompt_tokens: tuple[int, int] = (16, 256)
    """Shortest and longest generated prompt, in tokens."""
    output_tokens: tuple[int, int] = (16, 256)
    """Shortest and longest output of a generated prompt."""
    max_tokens: int = Field(default=256, ge=1)
    """Largest number of output tokens for a conversation."""
    threshold: float = Field(default=0.95, gt=0, le=1)
    """Confidence threshold in (0, 1]."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature in [0, 2]; 0 is greedy."""
    seed: int = 0
    """Seed of prompts, lengths, draws and weights."""
    threads: int | None = Field(default=None, ge=1)
    """Number of CPU threads; by default torch's choice."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to run on."""
    dtype: NumberType | None = None
    """Type of the weights; by default the one that the model is stored in, and for untrained
    weights float32 on the CPU, bfloat16 on CUDA."""


class ComparedName(StrEnum):
    """A server to compare, or a mode of marsray's."""

    AR = "ar"
    EXACT = "exact"
    THRESHOLD = "threshold"
    VLLM = "vllm"
    VLLM_SPECULATIVE = "vllm-speculative"
    TRANSFORMERS = "transformers"


class CompareOptions(Settings):
    """Options of ``marsray bench compare``."""

    model: Annotated[str, typer.Argument()]
    """Checkpoint directory or hub id."""
    contenders: Annotated[tuple[ComparedName, ...], typer.Option("--contender")] = tuple(
        ComparedName
    )
    """Server, or mode of this one, to measure; those that are not installed are left out. May be
    repeated."""
    vllm: str = "vllm"
    """Program of vLLM, such as ENV/bin/vllm."""
    speculation: str = (
        '{"method": "ngram", "num_speculative_tokens": 4, '
        '"prompt_lookup_min": 2, "prompt_lookup_max": 4}'
    )
    """Configuration of vllm-speculative, as for vLLM's --speculative-config."""
    others: Annotated[tuple[str, ...], typer.Option("--other")] = ()
    """NAME=COMMAND of another server with /health and chat completions that tell their usage;
    {model} is the checkpoint, and --port is added. May be repeated."""
    clients: Annotated[tuple[int, ...], typer.Option("--clients", min=1)] = (1, 4, 8, 16, 32, 64)
    """Number of clients, each of which waits for its answer before it asks again. May be
    repeated."""
    rounds: int = Field(default=5, ge=1)
    """Number of times that each server is started and measured."""
    num_requests: int = Field(default=48, ge=1)
    """Requests of a run: two to four for each client, up to this number if it is more."""
    limit_s: Annotated[float, typer.Option("--limit")] = Field(default=30.0, gt=0)
    """Seconds after which a run sends no more requests."""
    prompts: Path | None = None
    """File of conversations; answers are checked where rows have one. By default random prompts."""
    prompt_tokens: int = Field(default=64, ge=1)
    """Length of a random prompt, about."""
    shared_tokens: int = Field(default=0, ge=0)
    """Number of its tokens with which all random prompts begin alike."""
    max_tokens: int = Field(default=64, ge=1)
    """Largest number of output tokens."""
    threshold: float = Field(default=0.95, gt=0, le=1)
    """Confidence threshold in (0, 1] of contender threshold."""
    dtype: NumberType | None = None
    """Type of the weights in all servers; by default the one that the model is stored in."""
    seed: int = Field(default=0, ge=0)
    """Seed of random prompts."""
    json_file: Annotated[Path | None, typer.Option("--json")] = None
    """File to write the figures to after each round; - prints them instead."""
    out: Path | None = None
    """File to write the table to in Markdown."""
    log: Path = Path("compare.log")
    """File for what the servers print."""


class LoadOptions(Settings):
    """Options of ``marsray bench load``."""

    trace: Path
    """File of requests to replay; may end in .gz."""
    model: str
    """Name of the served model."""
    url: str = "http://127.0.0.1:8000"
    """Address of the server."""
    speedup: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor by which the trace is replayed faster."""
    trace_format: TraceFormat | None = None
    """Format of the trace; by default guessed from the file."""
    data: Path | None = None
    """Conversations in JSONL; each request sends the next one. By default, random prompts of the
    trace's lengths are sent."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of output tokens for a conversation; by default as in the trace."""
    objective_ttft_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Objective for the time to first token, in seconds."""
    duration_s: Annotated[float | None, typer.Option("--duration")] = Field(
        default=None, gt=0, allow_inf_nan=False
    )
    """Seconds after which no more requests are sent; by default never."""
    max_requests: int = Field(default=100_000, ge=1)
    """Largest number of requests; the first ones are sent."""
    timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds after which a request is given up."""
    seed: int = Field(default=0, ge=0)
    """Seed of random prompts. A server caches the prompts that it has seen, so use another
    seed for a second test."""
    key_env: str | None = None
    """Environment variable that holds the server's key."""
    allow_remote: Annotated[bool, typer.Option("--allow-remote")] = False
    """Allow a server on another machine."""
    json_file: Annotated[Path | None, typer.Option("--json")] = None
    """File to write the figures to; - prints them instead."""
