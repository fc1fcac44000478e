"""Sizes of an engine."""

from __future__ import annotations

from pydantic import Field

from mars_platform.config import Settings


class EngineSettings(Settings):
    """Sizes of one engine."""

    page_size: int = Field(default=16, ge=1, le=1024)
    """Tokens a page."""
    num_pages: int = Field(default=2048, ge=1)
    """Pages in the pool; all requests' prompts and outputs share them."""
    max_batch: int = Field(default=32, ge=1)
    """Requests that run at once."""
    max_positions: int = Field(default=1024, ge=65)
    """Positions a step may feed: prompt chunks, unstored tokens and masks together."""
    max_requests: int = Field(default=1024, ge=1)
    """Requests that may run and wait at once; further ones are refused."""

    @property
    def capacity(self) -> int:
        """Tokens that the pages hold."""
        return self.num_pages * self.page_size
