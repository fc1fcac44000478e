"""Sessions with a Ray cluster leave the program's own logging alone."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from mars_platform.cluster.session import quieten_ray


@pytest.fixture
def library() -> Iterator[logging.Logger]:
    """Return the logger of one of Ray's libraries, whose handlers are restored afterwards."""
    logger = logging.getLogger("ray.serve")
    before = list(logger.handlers)
    yield logger
    logger.handlers = before


def test_only_the_consoles_of_rays_libraries_are_quietened(library: logging.Logger) -> None:
    own, all_loggers = logging.StreamHandler(io.StringIO()), logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(all_loggers)
    try:
        library.handlers = [own, all_loggers]  # as test runners do if a logger does not propagate
        quieten_ray()
        assert (own.level, all_loggers.level) == (logging.ERROR, logging.NOTSET)
    finally:
        logging.getLogger().removeHandler(all_loggers)
