"""Puts a trained checkpoint in the place of the one in service, if it is not worse.

The place is a symbolic link, so that the change is one step, and going back is another. What is
compared are the two frontiers, measured on the same conversations. The candidate itself is checked
as servers check it when they start. Knows no server: one that is to serve the new checkpoint is
deployed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from pydantic import Field

from mars_autoscale.model.frontier import Frontier, FrontierPoint, read_frontier
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.files import write_whole
from mars_platform.checkpoint.manifest import MANIFEST, Damaged, describe_all, verify
from mars_platform.config import Settings
from mars_platform.errors import UserError

_FORCE = "or promote with --force, which compares nothing"


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


def promote(candidate: Path, service: Path, gate: Gate | None) -> list[Compared]:
    """Let a link point to a checkpoint.

    Args:
        candidate: the checkpoint's directory, with frontier.json. All of its files are read once;
            a manifest is written into it if it has none.
        service: the link; one that does not exist yet is made without a comparison.
        gate: what the candidate may be worse by; None compares nothing, and reads nothing of the
            checkpoint in service.

    Returns:
        What was compared, mode ar first; empty where there was nothing to compare with.

    Raises:
        UserError: the candidate is worse, damaged or incomplete, a frontier cannot be used, the two
            were not measured alike, or the link cannot be made. The link stays as it was.
    """
    frontier = read_frontier(candidate)
    if service.exists() and not service.is_symlink():
        raise UserError(
            f"--service: {service} is no symbolic link, so that it could not be changed at once; "
            "name a path that does not exist yet, or a link"
        )
    compared = list[Compared]()
    if gate is not None and service.exists():
        compared = compare(frontier, _frontier_in_service(service))
        problems = [each.problem(gate) for each in compared]
        if any(problems):
            raise UserError(
                f"{candidate} is not promoted: {'; '.join(filter(None, problems))}; train it "
                "longer, or allow more by --max-loss and --max-slower"
            )
    _check(candidate)
    _point(service, candidate.resolve())
    return compared


def compare(candidate: Frontier, current: Frontier) -> list[Compared]:
    """What both were measured at, mode ar first, then mode threshold with falling τ.

    Where no conversation has an answer to check, quality is agreement with the model's own mode ar:
    100 there, whatever the model says. Two of those are not compared either, since a model that
    answers worse agrees with itself as well as a better one.

    Raises:
        UserError: they were not measured alike, or on conversations without answers.
    """
    if "agreement" in (candidate.measure, current.measure):
        raise UserError(
            f"frontier.json: the quality of {_without_answers(candidate, current)} is agreement "
            "with the model's own mode ar, which says nothing of another model; run marsray "
            f'calibrate on both with the same --data, whose rows have an "answer" each, {_FORCE}'
        )
    if candidate.items is None or candidate.items != current.items:
        raise UserError(
            "frontier.json: the two checkpoints were not measured on the same conversations; run "
            f"marsray calibrate on the one in service with the candidate's --data, {_FORCE}"
        )
    known = {(point.mode, point.threshold): point for point in current.points}
    shared = [
        Compared(point, known[point.mode, point.threshold])
        for point in candidate.points
        if point.mode != "exact" and (point.mode, point.threshold) in known
    ]
    return sorted(shared, key=lambda each: (each.current.mode != "ar", -each.current.threshold))


def _without_answers(candidate: Frontier, current: Frontier) -> str:
    if candidate.measure == current.measure:
        return "both"
    return "the candidate" if candidate.measure == "agreement" else "the one in service"


def _frontier_in_service(service: Path) -> Frontier:
    try:
        return read_frontier(service)
    except UserError as error:
        raise UserError(f"{error}, {_FORCE}") from error


def _check(candidate: Path) -> None:
    """Refuse a checkpoint that no server could start from.

    Where there is no manifest to compare it with, its files get one as they are: by then it is
    known that config and tokenizer can be read, and that the tensors are those that the frontier
    was measured on, with none missing or cut off. To demand a manifest would show no more, since
    whoever made it now would describe the same files.
    """
    read_checkpoint(candidate)
    if not (candidate / MANIFEST).exists():
        write_whole(candidate, MANIFEST, describe_all(candidate).text)
        return
    try:
        verify(LocalFileSystem(), str(candidate))
    except Damaged as error:
        raise UserError(
            f"{candidate} is not what its manifest says ({error}); copy it again from where it "
            f"came, or, if the change was meant, delete its {MANIFEST}: promoting it writes one"
        ) from error


def _point(link: Path, target: Path) -> None:
    """Change a link in one step, so that whoever reads it finds the old one or the new one."""
    new = link.with_name(f".{link.name}.new")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(target, target_is_directory=True)
        new.replace(link)
    except OSError as error:
        raise UserError(f"--service: {link}: cannot be changed ({error.strerror})") from error
