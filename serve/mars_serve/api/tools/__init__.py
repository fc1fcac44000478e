"""Tool calling: the tools that a request offers and the calls that the model writes.

Models write calls as text, in a format that differs by model family. `prepare_tools` detects the
format from the chat template, writes the grammar if calls are constrained, and provides the parser
that takes calls out of the output's text.
"""

from mars_serve.api.tools.parser import (
    ContentDelta,
    ToolArguments,
    ToolEvent,
    ToolParser,
    ToolStart,
)
from mars_serve.api.tools.request_tools import RequestTools, prepare_tools

__all__ = [
    "ContentDelta",
    "RequestTools",
    "ToolArguments",
    "ToolEvent",
    "ToolParser",
    "ToolStart",
    "prepare_tools",
]
