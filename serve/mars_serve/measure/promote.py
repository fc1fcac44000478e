"""Puts a trained checkpoint in the place of the one in service, if it is not worse.

The place is a symbolic link: changing it is one step, and so is going back. The two frontiers are
compared, which were measured on the same conversations, and the candidate's files are checked as
servers check them when they start. A server has to be deployed again to serve the new checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from filelock import FileLock, Timeout
from fsspec.implementations.local import LocalFileSystem

from mars_autoscale.model.frontier import Frontier, read_frontier
from mars_autoscale.model.frontier_points import FrontierPoint
from mars_platform.checkpoint.adapter.files import read_adapter
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.files import replacing, write_whole
from mars_platform.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    describe_all,
    refuse_links_out,
    verify,
)
from mars_platform.checkpoint.metadata import ADAPTER_FILE
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import Estimate, paired_difference
from mars_serve.measure.options import Gate

_FALSE_ALARMS = 0.05
"""Most frequent refusal of a candidate that is as good as the checkpoint in service."""
_FORCE = "or promote with --force, which compares nothing"


@dataclass(frozen=True)
class PointPair:
    """The points of both checkpoints in one setting."""

    candidate: FrontierPoint
    current: FrontierPoint
    loss: Estimate
    """Points of quality that the candidate loses, paired by item."""
    allowed_loss: float
    """Points of loss above which the candidate is refused."""

    @property
    def name(self) -> str:
        """Name of the setting."""
        return "mode ar" if self.current.mode is Mode.AR else f"τ {self.current.threshold:g}"

    def problem(self, gate: Gate) -> str | None:
        """Return what the candidate is too much worse in, None if it passes the gate."""
        if self.loss.value > self.allowed_loss:
            return (
                f"{self.name}: quality {self.candidate.quality:.1f} is {self.loss.value:.1f} "
                f"points below {self.current.quality:.1f}, and on these conversations "
                f"{self.allowed_loss:.1f} are allowed"
            )
        current = self.current.tokens_per_forward
        slower = 1 - self.candidate.tokens_per_forward / current
        if slower > gate.max_slower:
            return (
                f"{self.name}: {self.candidate.tokens_per_forward:.2f} tokens a pass are "
                f"{slower:.0%} fewer than {current:.2f}"
            )
        return None


def promote(candidate: Path, service: Path, gate: Gate | None) -> list[PointPair]:
    """Point a link to a checkpoint or adapter with frontier.json, and return the compared points.

    All files of the candidate are read once; it gets a manifest if it has none. A ``service`` that
    does not exist yet is made without a comparison, as is any without a ``gate``, the limits of how
    much worse the candidate may be. Mode ar is the first of the points.

    Raises:
        UserError: the candidate is worse, damaged or incomplete, a frontier cannot be used, the
            frontiers were measured differently, the link leads nowhere or cannot be made, or
            another process changes it. The link then stays as it was.
    """
    if not service.parent.is_dir():
        raise UserError(f"--service: there is no directory {service.parent}; check the path")
    lock = FileLock(service.with_name(f".{service.name}.lock"))
    try:
        held = lock.acquire(timeout=0)  # until the link is changed, the comparison has to hold
    except OSError as error:
        is_held = isinstance(error, Timeout)
        reason = "another marsray promote changes it; wait for it" if is_held else error.strerror
        raise UserError(f"--service: {service}: cannot be changed ({reason})") from error
    with held:
        return _promote(candidate, service, gate)


def _promote(candidate: Path, service: Path, gate: Gate | None) -> list[PointPair]:
    refuse_links_out(candidate)
    frontier = read_frontier(candidate)
    if service.exists() and not service.is_symlink():
        raise UserError(
            f"--service: {service} is no symbolic link, so that it could not be changed at once; "
            "name a path that does not exist yet, or a link"
        )
    if service.exists() and _is_adapter(service) != _is_adapter(candidate):
        one, other = ("an adapter", "a whole model")[:: 1 if _is_adapter(candidate) else -1]
        raise UserError(
            f"{candidate} is {one}, and {service} leads to {other}, which servers load in another "
            "way; name a link of its own"
        )
    compared = list[PointPair]()
    if gate is not None and service.is_symlink():
        if not service.exists():
            raise UserError(
                f"--service: {service} leads to {service.readlink()}, which is not there to be "
                f"compared with; restore it, {_FORCE}"
            )
        try:
            refuse_links_out(service)
            current = read_frontier(service)
        except UserError as error:
            raise UserError(f"{error}, {_FORCE}") from error
        compared = compare(frontier, current, gate)
        problems = [each.problem(gate) for each in compared]
        if any(problems):
            raise UserError(
                f"{candidate} is not promoted: {'; '.join(filter(None, problems))}; train it "
                "longer, or allow more by --max-loss and --max-slower"
            )
    _check(candidate)
    _point(service, candidate.resolve())
    return compared


def compare(candidate: Frontier, current: Frontier, gate: Gate) -> list[PointPair]:
    """Return the settings that both were measured in: mode ar, then mode threshold by falling τ.

    If no conversation has an answer, quality is a likelihood under the model's own mode ar. Two
    such frontiers are not compared: a worse model finds its own outputs as likely as a better one.

    Raises:
        UserError: the two were measured differently, or on conversations without answers.
    """
    if "likelihood" in (candidate.measure, current.measure):
        both = candidate.measure == current.measure
        one = "the candidate" if candidate.measure == "likelihood" else "the one in service"
        raise UserError(
            f"frontier.json: the quality of {'both' if both else one} is likelihood under the "
            "model's own mode ar, which says nothing of another model; run marsray "
            f'calibrate on both with the same --data, whose rows have an "answer" each, {_FORCE}'
        )
    if candidate.items is None or candidate.items != current.items:
        raise UserError(
            "frontier.json: the two checkpoints were not measured on the same conversations; run "
            f"marsray calibrate on the one in service with the candidate's --data, {_FORCE}"
        )
    known = {(point.mode, point.threshold): point for point in current.points}
    shared = [
        (point, known[point.mode, point.threshold])
        for point in candidate.points
        if point.mode is not Mode.EXACT and (point.mode, point.threshold) in known
    ]
    shared.sort(key=lambda pair: -pair[0].threshold)
    return [_pair(ours, theirs, len(shared), gate) for ours, theirs in shared]


def _pair(candidate: FrontierPoint, current: FrontierPoint, num: int, gate: Gate) -> PointPair:
    ours, theirs = _right(candidate), _right(current)
    loss = Estimate(*(100 * end for end in paired_difference(theirs, ours)))
    return PointPair(candidate, current, loss, _allowed_loss(loss, num, gate))


def _right(point: FrontierPoint) -> list[bool]:
    assert point.right is not None, "a frontier of accuracy has what was right"
    return [digit == "1" for digit in point.right]


def _allowed_loss(loss: Estimate, num_settings: int, gate: Gate) -> float:
    """Return the points of measured loss up to which a candidate passes.

    Its pessimistic end, at 95%, must be within the gate. But no more is asked than the items can
    show: with few of them, that end is far above the gate for equally good models, too. Those are
    refused in one of twenty comparisons at most, whatever the number of settings (Bonferroni).
    """
    error = _standard_error(loss)
    shown = gate.max_loss - _quantile(1 - _FALSE_ALARMS) * error
    return max(shown, _quantile(1 - _FALSE_ALARMS / num_settings) * error)


def _standard_error(loss: Estimate) -> float:
    return (loss.high - loss.low) / (2 * _quantile(0.975))


def _quantile(probability: float) -> float:
    return NormalDist().inv_cdf(probability)


def _check(candidate: Path) -> None:
    """Refuse a checkpoint that no server could start from.

    A checkpoint without a manifest gets one of its files as they are. Its config and tokenizer have
    been read by then, and its tensors are those that the frontier was measured on. Demanding a
    manifest would prove no more: it would be made now and describe the same files.
    """
    if _is_adapter(candidate):
        read_adapter(candidate)
    else:
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


def _is_adapter(path: Path) -> bool:
    return (path / ADAPTER_FILE).is_file()


def _point(link: Path, target: Path) -> None:
    """Change a link in one step: readers find either the old target or the new one."""
    try:
        with replacing(link) as new:
            new.symlink_to(target, target_is_directory=True)
    except OSError as error:
        raise UserError(f"--service: {link}: cannot be changed ({error.strerror})") from error
