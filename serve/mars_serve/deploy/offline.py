"""Answers files of requests without a server: a Ray Data pipeline over engines of its own.

Lines go through the application as a server's do. The output is appended to as answers come, so a
run that was stopped goes on with the lines that have none.
"""

import asyncio
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, get_args

import httpx
import pyarrow as pa
import ray.data
from pydantic_core import from_json, to_json

from mars_platform.data.files import absolute_url, find_files, read_rows
from mars_platform.errors import UserError, one_line
from mars_serve.api.keys import Caller
from mars_serve.config.served import ServedModel, read_served, with_dtype
from mars_serve.config.settings import (
    LimitSettings,
    ModelSettings,
    ServeSettings,
    TelemetrySettings,
)
from mars_serve.http.app import create_app
from mars_serve.http.batches.lines import answer_line, unanswered_line
from mars_serve.http.batches.records import Endpoint
from mars_serve.http.in_process import OwnRequests, is_refused, post_until_served
from mars_serve.replica.engine_process import start_engine
from mars_serve.replica.local_backend import LocalBackend

_BLOCK_BYTES = 2**20
"""Bytes of requests that one call of an engine answers at most."""
_BATCH_LINES = 512
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"

Fields = dict[str, Any]


@dataclass
class Tally:
    """Numbers of lines of a run."""

    done: int = 0
    """Lines that have an answer, also from runs before."""
    errors: int = 0
    """New answers that are errors."""
    repeated: int = 0
    """Lines left alone because an earlier one has their id."""


def answer_files(
    sources: Sequence[str],
    output: Path,
    model: ModelSettings,
    fields: Fields,
    num_engines: int,
    tell: Callable[[Tally], None],
) -> Tally:
    """Answer all lines of some files that ``output`` has no answer to.

    Args:
        sources: files, directories, globs or URLs; see `find_files`.
        output: JSONL to append answers to, in the form of a batch's output.
        model: model that answers, whatever the lines name.
        fields: fields of each request whose line does not give them.
        num_engines: number of engines, each in an actor of its own.
        tell: gets the numbers so far from time to time.

    Returns:
        The numbers at the end.

    Raises:
        UserError: a file cannot be read, the output not be written, or the model not be loaded.
    """
    model, files = with_dtype(model), find_files(sources, "data")
    read_served(model)  # or each actor would fail, again and again
    answers = partial(_answers, files, model, fields, num_engines)
    return append_answers(output, answers, tell)


def append_answers(
    output: Path,
    answers: Callable[[frozenset[bytes]], Iterable[pa.Table]],
    tell: Callable[[Tally], None],
) -> Tally:
    """Append answers to a file.

    ``answers`` gets the digests of the ids that have one there, and yields tables with the columns
    ``custom_id``, ``is_right`` and ``line``.

    Raises:
        UserError: the file cannot be written, or holds something else.
    """
    with _appending(output) as (written, done):
        tally = Tally(len(done))
        for table in answers(frozenset(done)):
            for row in table.to_pylist():
                if (digest := digest_of(row["custom_id"])) in done:
                    tally.repeated += 1
                    continue
                done.add(digest)
                written.write(row["line"] + b"\n")
                tally.done += 1
                tally.errors += not row["is_right"]
            written.flush()
            os.fsync(written.fileno())
            tell(tally)
    return tally


@contextmanager
def _appending(output: Path) -> Iterator[tuple[BinaryIO, set[bytes]]]:
    """Open the output, and yield it with the digests of the ids that have an answer in it.

    The beginning of a line at its end, which a run has left that was killed, is cut off.
    """
    with ExitStack() as held:
        try:
            file = held.enter_context(output.open("a+b"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = _answered_in(file)
        except BlockingIOError as error:
            reason = f"another run writes {output}; wait for it to end"
            raise UserError(f"--output: {reason}") from error
        except OSError as error:
            raise UserError(f"--output: {output} cannot be written ({one_line(error)})") from error
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{output} holds something else; name another file"
            raise UserError(f"--output: {reason}") from error
        yield file, done


def _answered_in(file: BinaryIO) -> set[bytes]:
    """Return the digests of a file's ids, and cut off a line that does not end."""
    file.seek(0)
    done, end = set[bytes](), 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        done.add(digest_of(from_json(line)["custom_id"]))
        end += len(line)
    file.truncate(end)
    return done


def digest_of(name: str) -> bytes:
    """Return what stands for an id where there may be millions."""
    return blake2b(name.encode(), digest_size=16).digest()


def _answers(
    files: list[str],
    model: ModelSettings,
    fields: Fields,
    num_engines: int,
    done: frozenset[bytes],
) -> Iterator[pa.Table]:
    """Yield tables of answers in the order that they come."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.target_max_block_size = _BLOCK_BYTES
    context.actor_task_retry_on_errors = True  # an engine that has died is started again
    num_threads = max((os.cpu_count() or 1) // num_engines, 1)
    with ray.data.DataContext.current(context):
        items = ray.data.from_items([{"name": file, "url": absolute_url(file)} for file in files])
        answers = items.flat_map(read_file, fn_kwargs={"done": done, "fields": fields}).map_batches(
            LineAnswerer,
            fn_constructor_args=(partial(start_model, model, num_threads),),
            batch_format="pyarrow",
            batch_size=_BATCH_LINES,
            compute=ray.data.ActorPoolStrategy(size=num_engines, max_tasks_in_flight_per_actor=2),
            num_gpus=model.num_gpus or None,
        )
    yield from answers.iter_batches(batch_size=None, batch_format="pyarrow")


def read_file(
    item: dict[str, str], done: frozenset[bytes], fields: Fields
) -> Iterator[dict[str, Any]]:
    """Yield the requests of a file that have no answer; see `request_of`."""
    for number, content in read_rows(item["url"]):
        request = request_of(f"{item['name']}:{number}", number, content, fields)
        if digest_of(request["custom_id"]) not in done:
            yield request


def request_of(name: str, number: int, content: bytes, fields: Fields) -> dict[str, Any]:
    """Return the request of a row: ``custom_id``, ``url``, ``body`` as JSON, and ``problem``.

    A row is a line of a batch, or has ``messages`` or ``prompt``. One without an id has ``name``.
    ``problem`` says why there is no request, and is empty if there is one.
    """
    request = {"custom_id": name, "url": "", "body": b"", "problem": ""}
    try:
        row = from_json(content) if number else None
    except ValueError:
        row = None
    if not isinstance(row, dict):
        reason = "the row is no JSON object" if number else content.decode("utf-8", "replace")
        return {**request, "problem": reason}
    given = row.get("custom_id")
    if isinstance(given, str) and given:
        request["custom_id"] = given
    body, url = _body_of(row)
    if body is None:
        return {**request, "problem": "the row has no body, messages or prompt"}
    if url not in get_args(Endpoint):
        endpoints = ", ".join(get_args(Endpoint))
        return {**request, "problem": f"url: it names none of {endpoints}; leave it out"}
    return {**request, "url": url, "body": to_json({**fields, **body})}


def _body_of(row: dict[str, Any]) -> tuple[Fields | None, str]:
    if isinstance(body := row.get("body"), dict):
        return body, str(row.get("url", _CHAT))
    if row.get("messages") is not None:
        return {"messages": row["messages"]}, _CHAT
    if row.get("prompt") is not None:
        return {"prompt": row["prompt"]}, _COMPLETIONS
    return None, ""


def start_model(model: ModelSettings, num_threads: int) -> ServedModel:
    """Start an engine in a process beside this one, and return its model."""
    backend = LocalBackend(start_engine(model, num_threads), model.initial_threshold)
    return ServedModel(model, read_served(model), backend, int(time.time()))


class LineAnswerer:
    """Answers tables of requests by way of the application; an actor of Ray Data."""

    def __init__(self, start: Callable[[], ServedModel]) -> None:
        """Start a model, over a `LocalBackend`; this is done again when its engine has died."""
        self._start_model = start
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._start()

    def _start(self) -> None:
        self._model = model = self._start_model()
        settings = ServeSettings(
            models=[model.settings],
            pages=False,
            limits=LimitSettings(queue_wait_s=None),
            telemetry=TelemetrySettings(log_requests=False),
        )
        self._requests = OwnRequests(create_app({model.name: model}, settings))
        self._slots = asyncio.Semaphore(2 * model.settings.engine.max_num_seqs)

    @property
    def _is_alive(self) -> bool:
        assert isinstance(self._model.backend, LocalBackend)
        return bool(self._model.backend.engine.is_alive)

    def __call__(self, requests: pa.Table) -> pa.Table:
        """Answer a table of requests, as `request_of` makes them."""
        if not self._is_alive:
            self._start()
        answered = asyncio.run_coroutine_threadsafe(
            self._answer_all(requests.to_pylist()), self._loop
        )
        return pa.Table.from_pylist(answered.result())

    async def _answer_all(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self._answer, requests))

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request["custom_id"]
        if request["problem"]:
            line = unanswered_line(name, "invalid_row", request["problem"])
            return {"custom_id": name, "is_right": False, "line": line}
        response = await self._response(request)
        request_id = response.headers.get("x-request-id")
        line = answer_line(name, response.status_code, request_id, response.content)
        return {"custom_id": name, "is_right": response.status_code == 200, "line": line}

    async def _response(self, request: dict[str, Any]) -> httpx.Response:
        # the model's name is the command's; what the lines name is a server's elsewhere
        body = to_json({**from_json(request["body"]), "model": self._model.name, "stream": False})

        async def post() -> httpx.Response:
            async with self._slots:
                response = await self._requests.post(request["url"], body, Caller(""))
            if is_refused(response) and not self._is_alive:
                raise RuntimeError("the engine has died")
            return response

        return await post_until_served(post)
