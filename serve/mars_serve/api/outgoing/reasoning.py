"""Divides the text of an output into its reasoning and its content.

The tokens that begin and end the thinking decide, not their text: a model may write about
``</think>``. Text comes out later than its tokens where `OutputText` holds it back, so both are
brought together by the place of each token's text. The text of a marker, with what is left of a
character that it cuts short, is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from mars_serve.api.text import OutputPart
from mars_serve.engine.decoding_options import Span

_MARKER = None
"""Marks text that is neither reasoning nor content."""


class ReasoningText:
    """Divides one output, however its tokens are divided into passes."""

    def __init__(self) -> None:
        self._position = 0
        """Number of characters divided."""
        self._span: Span | None = Span.ANSWER
        """Span of the character before, or `_MARKER`."""
        self._starts = deque[tuple[int, Span | None]]()
        """Place of the text of each token that is yet to come out, and its span."""

    def push(self, part: OutputPart, spans: Sequence[Span]) -> tuple[str, str]:
        """Return the reasoning and the content in the text of one pass.

        Args:
            part: what the pass adds to the output.
            spans: the span of each token of the part, and of the next token.
        """
        for offset, (span, following) in zip(part.offsets, pairwise(spans), strict=True):
            is_marker = Span.THINKING in (span, following) and span is not following
            self._starts.append((offset, _MARKER if is_marker else span))
        reasoning, content = "", ""
        for kind, text in self._divided(part.text):
            if kind is Span.THINKING:
                reasoning += text
            elif kind is not _MARKER:
                content += text
        return reasoning, content

    def _divided(self, text: str) -> list[tuple[Span | None, str]]:
        begin, end = self._position, self._position + len(text)
        pieces = []
        while self._starts and self._starts[0][0] < end:
            start, span = self._starts.popleft()
            pieces.append((self._span, text[self._position - begin : start - begin]))
            self._position, self._span = start, span
        pieces.append((self._span, text[self._position - begin :]))
        self._position = end
        return pieces
