"""Reports to an application's governor, from a thread with an event loop."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from mars_serve.control.governor_actor import UNREACHABLE, GovernorClient

_PERIOD_S = 0.5
"""Seconds between two reports."""
_ANSWER_S = 10.0
"""Longest time in seconds that one report waits for its answer."""
_RETRY_S = 2.0
"""Seconds between two reports while the governor does not answer."""

_log = logging.getLogger(__name__)


async def report_forever(
    client: GovernorClient,
    method: str,
    reports: Callable[[], Iterable[tuple[Any, ...]]],
    take: Callable[[list[Any]], None] = lambda _: None,
) -> None:
    """Report again and again by calling ``method`` of the governor that ``client`` leads to.

    No report waits for anything but the answer to the one before it. One that is lost costs
    nothing, since reports hold totals. ``reports`` returns the arguments of one call or several,
    and ``take`` takes the answers.
    """
    while True:
        try:
            async with asyncio.timeout(_ANSWER_S):
                calls = (client.call(method, *each) for each in reports())
                take(await asyncio.gather(*calls))
            pause_s = _PERIOD_S
        except UNREACHABLE as error:
            _log.warning("the governor does not take reports: %s", error)
            pause_s = _RETRY_S
        except Exception:  # without reports, this process's load would stay unknown for good
            _log.exception("a report failed; trying again")
            pause_s = _RETRY_S
        await asyncio.sleep(pause_s)


def report_in_thread(
    application: str,
    method: str,
    reports: Callable[[], Iterable[tuple[Any, ...]]],
    take: Callable[[list[Any]], None] = lambda _: None,
) -> None:
    """Report from a daemon thread until the process ends; see `report_forever`."""
    run = report_forever(GovernorClient(application), method, reports, take)
    threading.Thread(target=asyncio.run, args=[run], name="reports", daemon=True).start()
