"""Puts a trained checkpoint in the place of the one in service, if it is not worse.

The place is a symbolic link, so that the change is one step, and going back is another. What is
compared are the two frontiers, measured on the same conversations. Knows no server: one that is to
serve the new checkpoint is deployed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from mars_autoscale.frontier import Frontier, FrontierPoint, read_frontier
from mars_platform.config import Settings
from mars_platform.errors import UserError


class Gate(Settings):
    """What a candidate may be worse by."""

    max_loss: float = Field(default=1.0, ge=0, le=100)
    """Points of quality, in mode ar and at each τ that both were measured at."""
    max_slower: float = Field(default=0.05, ge=0, lt=1)
    """Share of the tokens a forward pass, at each of those."""


@dataclass(frozen=True)
class Compared:
    """One way to decode, of both checkpoints."""

    candidate: FrontierPoint
    current: FrontierPoint

    def problem(self, gate: Gate) -> str | None:
        """What the candidate is too much worse in; None where it is not."""
        name = "mode ar" if self.current.mode == "ar" else f"τ {self.current.threshold:g}"
        loss = self.current.quality - self.candidate.quality
        if loss > gate.max_loss:
            return (
                f"{name}: quality {self.candidate.quality:.1f} is {loss:.1f} points below "
                f"{self.current.quality:.1f}"
            )
        slower = 1 - self.candidate.tokens_per_forward / self.current.tokens_per_forward
        if slower > gate.max_slower:
            return (
                f"{name}: {self.candidate.tokens_per_forward:.2f} tokens a pass are {slower:.0%} "
                f"fewer than {self.current.tokens_per_forward:.2f}"
            )
        return None


def promote(candidate: Path, service: Path, gate: Gate) -> list[Compared]:
    """Let a link point to a checkpoint.

    Args:
        candidate: the checkpoint's directory, with frontier.json.
        service: the link; one that does not exist yet is made without a comparison.
        gate: what the candidate may be worse by.

    Returns:
        What was compared, mode ar first; empty where there was nothing to compare with.

    Raises:
        UserError: the candidate is worse, a frontier cannot be used, the two were not measured
            alike, or the link cannot be made. The link stays as it was.
    """
    frontier = read_frontier(candidate)
    if service.exists() and not service.is_symlink():
        raise UserError(
            f"--service: {service} is no symbolic link, so that it could not be changed at once; "
            "name a path that does not exist yet, or a link"
        )
    compared = list[Compared]()
    if service.exists():
        compared = compare(frontier, read_frontier(service))
        problems = [each.problem(gate) for each in compared]
        if any(problems):
            raise UserError(
                f"{candidate} is not promoted: {'; '.join(filter(None, problems))}; train it "
                "longer, or allow more by --max-loss and --max-slower"
            )
    _point(service, candidate.resolve())
    return compared


def compare(candidate: Frontier, current: Frontier) -> list[Compared]:
    """What both were measured at, mode ar first, then mode threshold with falling τ.

    Raises:
        UserError: they were not measured alike.
    """
    if "agreement" in (candidate.measure, current.measure):
        raise UserError(
            "frontier.json: its quality is agreement with the model's own mode ar, which says "
            "nothing of another model; calibrate both on conversations with answers"
        )
    if candidate.items is None or candidate.items != current.items:
        raise UserError(
            "frontier.json: the two checkpoints were not measured on the same conversations; run "
            "marsray calibrate on both with the same --data"
        )
    known = {(point.mode, point.threshold): point for point in current.points}
    shared = [
        Compared(point, known[point.mode, point.threshold])
        for point in candidate.points
        if point.mode != "exact" and (point.mode, point.threshold) in known
    ]
    return sorted(shared, key=lambda each: (each.current.mode != "ar", -each.current.threshold))


def _point(link: Path, target: Path) -> None:
    """Change a link in one step, so that whoever reads it finds the old one or the new one."""
    new = link.with_name(f".{link.name}.new")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(target, target_is_directory=True)
        new.replace(link)
    except OSError as error:
        raise UserError(f"--service: {link}: cannot be changed ({error.strerror})") from error
