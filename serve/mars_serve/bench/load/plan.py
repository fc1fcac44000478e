"""What a load test sends, and when: a trace's requests with prompts for them. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json

from mars_autoscale.traces.files import TraceRequest
from mars_platform.data.conversations import parse_conversation, read_answer
from mars_platform.errors import UserError
from mars_platform.tier import Tier


@dataclass(frozen=True)
class Question:
    """A conversation up to its final turn."""

    source: str
    """``file:line``."""
    messages: list[dict[str, Any]]
    answer: str | None
    """What a correct output ends with; None where the row has no ``answer``."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that will be sent, whatever becomes of the others."""

    index: int
    at_s: float
    """Seconds after the start."""
    tier: Tier
    prompt_tokens: int
    max_tokens: int
    is_capped: bool = False
    """Whether its lengths were more than the model takes, and were cut."""
    question: Question | None = None
    """None for a made-up prompt."""


@dataclass(frozen=True)
class Plan:
    """All requests by time, and what their bodies are made of."""

    model: str
    requests: list[PlannedRequest]
    vocabulary: Sequence[int]
    """Token ids of made-up prompts."""
    seed: int
    """Of made-up prompts, not negative."""

    def content(self, request: PlannedRequest) -> tuple[str, bytes]:
        """Path and body of a request; made when it is due, as all prompts of a trace are large."""
        body: dict[str, Any] = {
            "model": self.model,
            "service_tier": request.tier,
            "max_tokens": request.max_tokens,
            "stream": True,
        }
        if request.question is not None:
            body["messages"] = request.question.messages
            return "/v1/chat/completions", to_json(body)
        draws = np.random.default_rng([self.seed, request.index])
        body["prompt"] = draws.choice(self.vocabulary, request.prompt_tokens).tolist()
        body["min_tokens"] = request.max_tokens
        return "/v1/completions", to_json(body)


def read_questions(path: Path, most: int) -> list[Question]:
    """Read the first ``most`` conversations of a JSONL file, as ``marsray eval`` reads them.

    Raises:
        UserError: the file cannot be read or holds no row, or a row is bad, with its line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            questions = [
                _question(f"{path}:{line}", text)
                for line, text in enumerate(islice(file, most), start=1)
            ]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--data: {path} cannot be read ({reason}); check the file") from error
    if not questions:
        raise UserError(f"--data: {path} holds no row; name a file with conversations")
    return questions


def _question(source: str, text: str) -> Question:
    try:
        row = parse_conversation(text)
        answer = read_answer(row)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    messages = [message.model_dump() for message in row.messages[:-1]]
    return Question(source, messages, answer)


def made_up_requests(
    trace: Sequence[TraceRequest], speedup: float, max_length: int
) -> list[PlannedRequest]:
    """Requests with the trace's lengths, cut to what the model takes.

    An output is cut to what its prompt leaves, or to half of the model's length where that is more;
    the prompt to what is left then.

    Args:
        trace: by arrival.
        speedup: times that the trace is played faster than it was.
        max_length: tokens of prompt and output together, at least 2.
    """
    requests = []
    for index, each in enumerate(trace):
        room = max(max_length - each.prompt_tokens, max_length // 2)
        num_output = min(each.output_tokens, room)
        num_prompt = min(max(each.prompt_tokens, 1), max_length - num_output)
        is_capped = num_prompt < each.prompt_tokens or num_output < each.output_tokens
        at_s = each.arrival_s / speedup
        requests.append(PlannedRequest(index, at_s, each.tier, num_prompt, num_output, is_capped))
    return requests


def question_requests(
    trace: Sequence[TraceRequest],
    speedup: float,
    max_length: int,
    questions: Sequence[tuple[Question, int]],
    max_tokens: int | None,
) -> list[PlannedRequest]:
    """Requests at the trace's times, each with the next question, from the first one on again.

    Args:
        trace: by arrival.
        speedup: times that the trace is played faster than it was.
        max_length: tokens of prompt and output together.
        questions: each with the length of its prompt in tokens.
        max_tokens: most output tokens; None takes the trace's.

    Raises:
        UserError: a question leaves no room for an output, with its file and line.
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
        at_s, tier = each.arrival_s / speedup, each.tier
        requests.append(
            PlannedRequest(
                index, at_s, tier, num_prompt, min(wanted, room), wanted > room, question
            )
        )
    return requests
