"""Request traces and their files: reads published formats and marsray's own.

A trace is a list of `TraceRequest` in order of arrival.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, TextIO, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from mars_platform.config import describe_validation_error
from mars_platform.errors import UserError
from mars_platform.tier import Tier

PREFIX_BLOCK_TOKENS = 512
"""Tokens in a block of `TraceRequest.prefix`, as in the traces of Mooncake."""


class TraceFormat(StrEnum):
    """Layout of a trace file."""

    AZURE = "azure"
    """CSV of the Azure LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``."""
    MOONCAKE = "mooncake"
    """JSONL with ``timestamp`` in milliseconds, ``input_length``, ``output_length`` and optionally
    ``hash_ids``, the prompt's blocks. See R. Qin et al., Mooncake, FAST 2025."""
    CSV = "csv"
    """CSV with ``arrival_s,prompt_tokens,output_tokens`` and optionally ``class``, the tier."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Arrival, size and tier of one request."""

    arrival_s: float
    """Arrival in seconds since the trace began."""
    prompt_tokens: int
    output_tokens: int
    """Number of output tokens, at least 1."""
    tier: Tier = Tier.DEFAULT
    prefix: Sequence[int] = field(default=(), hash=False)
    """Ids of the prompt's blocks of `PREFIX_BLOCK_TOKENS` tokens, of which the last may be shorter.
    Each names the prompt up to the block's end: prompts with an equal id begin alike. Empty if the
    trace does not say, and then no prompt has anything in common with another."""


def read_trace(path: Path, trace_format: TraceFormat | None = None) -> list[TraceRequest]:
    """Read a trace file, which is decompressed if its name ends in ``.gz``, as requests by arrival.

    An output of 0 tokens becomes 1, because a server always gives at least one. Times are rounded
    to 1 µs, and the first request arrives at 0 s. Timestamps without an offset count as UTC;
    columns and keys that the format does not define are ignored. Without a format it is guessed
    from the first line.

    Raises:
        UserError: the file cannot be read or holds no request, the format cannot be guessed, or a
            row is invalid; the message names its line.
    """
    try:
        # bytes that are not UTF-8 are replaced; the error then names the row that holds them
        with _open(path) as file:
            first = file.readline()
            row_model = _ROW_MODELS[trace_format or _guess_format(path, first)]
            lines = chain([first], file)
            is_json = row_model is _MooncakeRow
            rows = _json_rows(lines) if is_json else _csv_rows(path, lines, row_model)
            requests = [_read_row(path, line, row, row_model) for line, row in rows]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({_reason(error)}); check the file") from error
    if not requests:
        raise _no_request(path)
    begin_s = min(request.arrival_s for request in requests)
    requests.sort(key=lambda request: request.arrival_s)
    return [replace(r, arrival_s=round(r.arrival_s - begin_s, 6)) for r in requests]


def _unix_seconds(text: str) -> float:
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


class _TraceRow(BaseModel):
    """A row of a trace file; each format's class gives its column names as aliases."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int

    def request(self) -> TraceRequest:
        return TraceRequest(self.arrival_s, self.prompt_tokens, max(1, self.output_tokens))


class _AzureRow(_TraceRow):
    arrival_s: Annotated[float, BeforeValidator(_unix_seconds)] = Field(alias="TIMESTAMP")
    prompt_tokens: int = Field(alias="ContextTokens", ge=0)
    output_tokens: int = Field(alias="GeneratedTokens", ge=0)


class _MooncakeRow(_TraceRow):
    arrival_s: Annotated[float, AfterValidator(lambda time_ms: time_ms / 1000)] = Field(
        alias="timestamp", allow_inf_nan=False
    )
    prompt_tokens: int = Field(alias="input_length", ge=0)
    output_tokens: int = Field(alias="output_length", ge=0)
    prefix: list[int] = Field(default=[], alias="hash_ids")

    def request(self) -> TraceRequest:
        request, num_blocks = super().request(), -(-self.prompt_tokens // PREFIX_BLOCK_TOKENS)
        if not self.prefix:
            return request
        # a tuple of numbers would take four times the memory, which is most of a long trace's
        return replace(request, prefix=array("q", self.prefix[:num_blocks]))


class _CsvRow(_TraceRow):
    arrival_s: float = Field(allow_inf_nan=False)
    prompt_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    tier: Tier = Field(default=Tier.DEFAULT, alias="class")

    def request(self) -> TraceRequest:
        return replace(super().request(), tier=self.tier)


_ROW_MODELS: dict[TraceFormat, type[_TraceRow]] = {
    TraceFormat.AZURE: _AzureRow,
    TraceFormat.MOONCAKE: _MooncakeRow,
    TraceFormat.CSV: _CsvRow,
}


def _columns(row_model: type[_TraceRow]) -> list[str]:
    fields = row_model.model_fields.items()
    return [field.alias or name for name, field in fields if field.is_required()]


def _guess_format(path: Path, first: str) -> TraceFormat:
    if not first:
        raise _no_request(path)
    if first.lstrip().startswith("{"):
        return TraceFormat.MOONCAKE
    header = {name.strip(' "\r\n') for name in first.split(",")}
    for trace_format in (TraceFormat.AZURE, TraceFormat.CSV):
        if header.issuperset(_columns(_ROW_MODELS[trace_format])):
            return trace_format
    raise UserError(
        f"{path}:1: the trace's format cannot be guessed from this line; it must be a JSON object "
        "(mooncake), or a header with TIMESTAMP,ContextTokens,GeneratedTokens (azure) or "
        "arrival_s,prompt_tokens,output_tokens (csv)"
    )


def _json_rows(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((number, text.strip()) for number, text in enumerate(lines, start=1) if text.strip())


def _csv_rows(
    path: Path, lines: Iterable[str], row_model: type[_TraceRow]
) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.reader(lines, skipinitialspace=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        _check_header(path, header, row_model)
        for cells in filter(None, reader):
            if len(cells) != len(header):
                raise UserError(
                    f"{path}:{reader.line_num}: the row has {len(cells)} values, but the header "
                    f"names {len(header)}; correct or remove the row"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: {error}; correct or remove the row") from error


def _check_header(path: Path, header: list[str], row_model: type[_TraceRow]) -> None:
    missing = [name for name in _columns(row_model) if name not in header]
    if header and missing:
        raise UserError(
            f"{path}:1: the header lacks {', '.join(missing)}; correct it or name another format"
        )


def _read_row(
    path: Path, line: int, row: str | dict[str, str], row_model: type[_TraceRow]
) -> TraceRequest:
    try:
        if isinstance(row, str):
            return row_model.model_validate_json(row, strict=True).request()
        return row_model.model_validate(row).request()
    except ValidationError as error:
        problem = describe_validation_error(error, row_model)
        raise UserError(f"{path}:{line}: {problem}; correct or remove the row") from error


def _open(path: Path) -> TextIO:
    opener = gzip.open if path.suffix == ".gz" else open
    file = opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="")
    return cast("TextIO", file)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _no_request(path: Path) -> UserError:
    return UserError(f"{path}: it holds no request; name a trace that does")
