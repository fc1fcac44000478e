"""Plans a load test: which requests of a trace are sent at which time, with which prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json

from mars_autoscale.traces.files import TraceRequest
from mars_platform.data.files import read_checked_rows
from mars_platform.errors import UserError
from mars_platform.tier import Tier


@dataclass(frozen=True)
class Question:
    """A conversation without its final assistant turn."""

    source: str
    """Place of the row, as ``file:line``."""
    request: dict[str, Any]
    """Messages of the conversation and what else the chat endpoint needs of it."""
    answer: str | None
    """Text that a correct output ends with; None if the row has no ``answer``."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that is sent at its time, however the requests before it fare."""

    index: int
    at_s: float
    """Seconds after the start at which it is due."""
    tier: Tier
    prompt_tokens: int
    max_tokens: int
    """Limit of the output tokens; a made-up prompt also gets it as the least number."""
    is_capped: bool = False
    """Whether the lengths of the trace were cut to what the model takes."""
    question: Question | None = None
    """Conversation to send; None for a made-up prompt."""


@dataclass(frozen=True)
class LoadPlan:
    """All requests of a load test, by time, and what their bodies are made of."""

    model: str
    requests: list[PlannedRequest]
    vocabulary: Sequence[int]
    """Token ids that made-up prompts consist of."""
    seed: int
    """Seed of the made-up prompts, not negative."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each body."""

    def content(self, request: PlannedRequest) -> tuple[str, bytes]:
        """Return the path and body of a request.

        The body is made when the request is due: the prompts of a whole trace take much memory.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "service_tier": request.tier,
            "max_tokens": request.max_tokens,
            "stream": True,
            **self.fields,
        }
        if request.question is not None:
            body |= request.question.request
            return "/v1/chat/completions", to_json(body)
        draws = np.random.default_rng([self.seed, request.index])
        body["prompt"] = draws.choice(self.vocabulary, request.prompt_tokens).tolist()
        body["min_tokens"] = request.max_tokens
        return "/v1/completions", to_json(body)


def read_questions(path: Path, most: int, option: str) -> list[Question]:
    """Read the first ``most`` conversations of the file that ``option`` names, as eval does.

    Raises:
        UserError: the file cannot be read or holds no row, or a row is bad; names file and line.
    """
    questions = [
        Question(source, row.request(), answer)
        for source, row, answer in islice(read_checked_rows([path], option), most)
    ]
    if not questions:
        raise UserError(f"{option}: {path} holds no row; name a file with conversations")
    return questions


def made_up_requests(
    trace: Sequence[TraceRequest], speedup: float, max_length: int
) -> list[PlannedRequest]:
    """Plan requests with the trace's lengths, cut to what the model takes.

    The model takes ``max_length`` tokens, at least 2, prompt and output together. An output is cut
    to the room behind its prompt, or to half of the model's length if that is more; the prompt is
    then cut to the rest.
    """
    requests = []
    for index, each in enumerate(trace):
        room = max(max_length - each.prompt_tokens, max_length // 2)
        num_output = min(each.output_tokens, room)
        num_prompt = min(max(each.prompt_tokens, 1), max_length - num_output)
        requests.append(
            PlannedRequest(
                index=index,
                at_s=each.arrival_s / speedup,
                tier=each.tier,
                prompt_tokens=num_prompt,
                max_tokens=num_output,
                is_capped=num_prompt < each.prompt_tokens or num_output < each.output_tokens,
            )
        )
    return requests


def question_requests(
    trace: Sequence[TraceRequest],
    speedup: float,
    max_length: int,
    questions: Sequence[tuple[Question, int]],
    max_tokens: int | None,
) -> list[PlannedRequest]:
    """Plan requests at the trace's times that ask the questions in turn, over and over.

    ``questions`` come with their prompts' numbers of tokens. Without ``max_tokens``, outputs have
    the trace's.

    Raises:
        UserError: a question leaves no room for an output; names file and line.
    """
    requests = []
    for index, each in enumerate(trace):
        question, num_prompt = questions[index % len(questions)]
        room = max_length - num_prompt
        if room < 1:
            raise UserError(
                f"{question.source}: messages: the prompt has {num_prompt} tokens and leaves no "
                f"room in the model's {max_length}; shorten it or leave the row out"
            )
        wanted = max_tokens or each.output_tokens
        requests.append(
            PlannedRequest(
                index=index,
                at_s=each.arrival_s / speedup,
                tier=each.tier,
                prompt_tokens=num_prompt,
                max_tokens=min(wanted, room),
                is_capped=wanted > room,
                question=question,
            )
        )
    return requests
