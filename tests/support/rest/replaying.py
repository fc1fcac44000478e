"""A backend whose forward passes are given."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request


class ReplayingBackend:
    """A backend that answers every request by the same passes."""

    def __init__(
        self, passes: Sequence[list[int]], finish_reason: FinishReason = FinishReason.STOP
    ) -> None:
        self.passes = list(passes)
        self.finish_reason = finish_reason
        self.requests = list[Request]()

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        self.requests.append(request)
        for index, tokens in enumerate(self.passes, start=1):
            is_last = index == len(self.passes)
            yield StepOutput(request.id, tokens, self.finish_reason if is_last else None)

    async def complete(self, request: Request) -> list[StepOutput]:
        return [output async for output in self.stream(request)]
