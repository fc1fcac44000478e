"""Makes the work of a benchmark: prompts, output limits, and drawn lengths of accepted runs.

Everything here depends on its seed and arguments alone.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files
from itertools import accumulate

from pydantic import Field

from mars_platform.config import Settings
from mars_platform.errors import UserError
from mars_serve.measure.evaluation.items import EvalItem

_PAPER_FILE = "paper_gsm8k_0.95.json"


@dataclass(frozen=True)
class BenchRequest:
    """One prompt to decode, the same for every contender."""

    id: str
    prompt: tuple[int, ...]
    """Token ids of the prompt, at least one."""
    max_tokens: int
    """Limit of the output tokens, and their number unless an end token comes earlier."""


@dataclass(frozen=True)
class RaggedShape:
    """The ranges of the lengths of generated requests, drawn uniformly; both ends are included."""

    prompt: tuple[int, int] = (16, 256)
    output: tuple[int, int] = (16, 256)

    def check(self, max_length: int) -> None:
        """Refuse ranges that are empty or longer than the model's context."""
        for option, (least, most) in (
            ("--prompt-tokens", self.prompt),
            ("--output-tokens", self.output),
        ):
            if not 1 <= least <= most:
                raise UserError(
                    f"{option}: {least} {most} is no range of lengths; give the least and the "
                    "most, both at least 1"
                )
        longest = self.prompt[1] + self.output[1]
        if longest > max_length:
            raise UserError(
                f"--prompt-tokens, --output-tokens: up to {longest} tokens do not fit the model's "
                f"context of {max_length}; lower the upper ends"
            )


def generated_requests(
    count: int, shape: RaggedShape, vocabulary: Sequence[int], seed: int
) -> list[BenchRequest]:
    """Make random prompts with output limits; the first requests do not depend on ``count``."""
    source = random.Random(seed)
    requests = []
    for index in range(count):
        num_prompt, max_tokens = source.randint(*shape.prompt), source.randint(*shape.output)
        prompt = tuple(source.choices(vocabulary, k=num_prompt))
        requests.append(BenchRequest(str(index), prompt, max_tokens))
    return requests


def prompted_requests(
    items: Sequence[EvalItem], max_tokens: int, max_length: int
) -> list[BenchRequest]:
    """Make requests for conversations whose prompts and outputs fit ``max_length`` tokens."""
    return [
        BenchRequest(str(index), item.prompt, min(max_tokens, max_length - len(item.prompt)))
        for index, item in enumerate(items)
    ]


def requests_in_run(batch: int, num_requests: int) -> int:
    """Return the number of requests that a run decodes: two to four whole batches.

    The number grows with the batch size up to ``num_requests``, or to two batches if that is more.
    """
    return batch * max(2, min(4, num_requests // batch))


class AcceptanceDistribution(Settings):
    """A distribution of the length of the accepted run, in place of a trained model's own."""

    source: str = ""
    """Origin of the figures, in words."""
    tokens_per_forward: dict[int, float] = Field(min_length=1)
    """Probability of each number of tokens that a pass gives, 1 or more, with enough masks; fewer
    masks cut a longer run off."""

    @property
    def mean(self) -> float:
        """Mean number of tokens that a pass gives, with enough masks."""
        total = sum(self.tokens_per_forward.values())
        return sum(length * share for length, share in self.tokens_per_forward.items()) / total

    def chance(self, depth: int) -> float:
        """Return the probability that the proposal at ``depth`` is right if all before it are."""
        reached, passed = (
            sum(share for length, share in self.tokens_per_forward.items() if length >= least)
            for least in (depth, depth + 1)
        )
        return passed / reached if reached else 0.0

    def draw(self, seed: int, request_id: str, num_output: int, num_proposed: int) -> int:
        """Draw the number of tokens that a pass gives, from 1 to ``num_proposed``.

        A draw depends on the request and its number of output tokens, not on its batch: contenders
        that feed the same masks at the same point of a request get the same number.
        """
        key = f"{seed}/{request_id}/{num_output}".encode()
        uniform = int.from_bytes(blake2b(key, digest_size=8).digest()) / 2**64
        bounds = list(accumulate(self.tokens_per_forward.values()))
        lengths = list(self.tokens_per_forward)
        below = sum(uniform * bounds[-1] >= bound for bound in bounds)
        return min(lengths[below], num_proposed)


@dataclass(frozen=True)
class Draws:
    """The distributions that replace a model's accepted runs."""

    acceptance: AcceptanceDistribution
    """Distribution outside mode exact."""
    exact: AcceptanceDistribution
    """Distribution in mode exact, of the right drafts and the token behind them."""
    seed: int


def agreeing(agreement: float, most: int) -> AcceptanceDistribution:
    """Return the distribution in which each of at most ``most`` drafts is equally likely right.

    ``agreement``, in [0, 1], is the probability that a draft is right if all before it are.
    """
    shares = {right + 1: agreement**right * (1 - agreement) for right in range(most)}
    return AcceptanceDistribution(
        source=f"each draft is right with probability {agreement:g} if all before it are",
        tokens_per_forward={**shares, most + 1: agreement**most},
    )


def paper_acceptance() -> AcceptanceDistribution:
    """Return the paper's distribution, on GSM8K at τ = 0.95."""
    text = (files("mars_serve.bench.decode") / _PAPER_FILE).read_text(encoding="utf-8")
    return AcceptanceDistribution.model_validate_json(text)
