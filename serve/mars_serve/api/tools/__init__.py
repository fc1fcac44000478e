"""Tools: what a request offers its model to call, and the calls that the model writes.

A model writes calls as text, each family in its own form. `plan_tools` finds the form, gives the
grammar where calls have to be of a certain kind, and the parser that takes them out of the text.
Knows no HTTP and no engine.
"""

from mars_serve.api.tools.parser import (
    ContentDelta,
    ToolArguments,
    ToolEvent,
    ToolParser,
    ToolStart,
)
from mars_serve.api.tools.plan import ToolPlan, plan_tools

__all__ = [
    "ContentDelta",
    "ToolArguments",
    "ToolEvent",
    "ToolParser",
    "ToolPlan",
    "ToolStart",
    "plan_tools",
]
