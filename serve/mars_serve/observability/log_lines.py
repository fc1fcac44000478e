"""Writes logs as lines that no text from outside can forge. Imports no Ray or HTTP library."""

import json
import logging
import sys


class PrintableFormatter(logging.Formatter):
    """Escapes control, format and separator characters, and indents all but a record's first line.

    Some of those characters end a line for the programs that read a log, and some steer the
    terminal that shows it.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's text."""
        return "\n  ".join(map(_printable, super().format(record).split("\n")))


def write_to_stderr(
    log: logging.Logger, form: str = "%(levelname)s %(asctime)s %(name)s %(message)s"
) -> None:
    """Write a log of this process, whose owner calls this, to its standard error only."""
    # not sys.stderr: Ray Serve may have replaced it with its own log, which prefixes each line
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(PrintableFormatter(form))
    log.handlers, log.propagate = [handler], False


def json_line(value: object) -> str:
    """Return a value as one line of JSON that is ASCII without control characters."""
    return json.dumps(value).replace("\x7f", "\\u007f")  # the only one that JSON leaves alone


def _printable(text: str) -> str:
    if text.isprintable():  # as nearly all are
        return text
    return "".join(each if each.isprintable() else json_line(each)[1:-1] for each in text)
