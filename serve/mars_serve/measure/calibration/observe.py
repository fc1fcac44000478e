"""Observes which tokens masks propose along an output, and whether they are right.

A proposed token is right if it is the output's token at that index. Each depth is measured by
itself, behind the output's own tokens: where a draft head acts, by which a draft depends on the
proposal before it, only drafts behind a right one are observed. In mode threshold a depth counts
only if all depths before it were accepted, and the tokens accepted earlier may differ from mode
ar's.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from mars_platform.checkpoint.calibration import Observed, log_probability_curves
from mars_platform.errors import UserError
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.measure.evaluation.decoding import steps_of

_MAX_LOGITS = 2**22  # computed at once, because every temperature takes a copy of them
_SEED = 0  # for the choice of cursors


@dataclass(frozen=True)
class Continuation:
    """A conversation's prompt and its output in mode ar."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    """Token ids of the output, at least one."""


@dataclass(frozen=True)
class Cursor:
    """A place in an output at which tokens are proposed."""

    text: Continuation
    index: int
    """Output tokens before it."""

    def next(self, count: int) -> tuple[int, ...]:
        """Return the output's next tokens, at most ``count``."""
        return self.text.output[self.index : self.index + count]


@dataclass(frozen=True)
class Observations:
    """The tokens proposed at one or several cursors."""

    depth: Tensor
    """int64 [tokens], depth of each token."""
    curves: Tensor
    """float32 [tokens, temperatures], see `log_probability_curves`."""
    correct: Tensor
    """bool [tokens], whether each token is right."""

    def at(self, depth: int) -> Observed:
        """Return the observations of one depth."""
        here = self.depth == depth
        return Observed(self.curves[here], self.correct[here])

    @classmethod
    def behind_right(cls, depth: Tensor, curves: Tensor, correct: Tensor) -> Observations:
        """Take those of one cursor's tokens, in order of depth, that stand behind right ones."""
        kept = torch.cat([torch.tensor([True]), correct[:-1]])
        return cls(depth[kept], curves[kept], correct[kept])

    @classmethod
    def joined(cls, parts: Sequence[Observations]) -> Observations:
        """Join at least one part."""
        return cls(
            depth=torch.cat([part.depth for part in parts]),
            curves=torch.cat([part.curves for part in parts]),
            correct=torch.cat([part.correct for part in parts]),
        )


def is_fitted(prompt: tuple[int, ...]) -> bool:
    """Return whether a prompt is in the half to fit on; a hash keeps copies in the same half."""
    return hashlib.sha256(repr(prompt).encode()).digest()[0] % 2 == 0


def choose_cursors(texts: Sequence[Continuation], max_cursors: int) -> list[Cursor]:
    """Choose where to propose tokens, at random but at the same places each time.

    Each half gets at most half of ``max_cursors``, at least 2. The cursors in the half to fit on
    come first, in order, then those in the half to check on.
    """
    chosen = []
    for half in (True, False):
        candidates = [
            (number, index)
            for number, text in enumerate(texts)
            if is_fitted(text.prompt) is half
            for index in range(len(text.output))
        ]
        drawn = random.Random(_SEED).sample(candidates, min(max_cursors // 2, len(candidates)))
        chosen += [Cursor(texts[number], index) for number, index in sorted(drawn)]
    return chosen


def observe(
    engine: Engine, cursors: Sequence[Cursor], on_progress: Callable[[int], None]
) -> list[Observations]:
    """Propose tokens at cursors, in a step of mode threshold behind the text before each.

    Masks that would propose a token past the end of the output are left out. The engine has no
    other requests. ``on_progress`` gets the number of observed cursors whenever it has grown.

    Raises:
        UserError: a step fails behind one of the texts.
    """
    banned = torch.tensor(sorted(engine.checkpoint.special.never_emitted), device=engine.device)
    found: dict[int, Observations] = {}
    assert engine.checkpoint.metadata is not None, "there are masks"
    has_head = engine.checkpoint.metadata.draft_head is not None
    observations = Observations.behind_right if has_head else Observations

    def take(logits: Tensor, rows: Sequence[ScheduledRow]) -> None:
        names, counts = [int(row.request.id) for row in rows], [row.num_reads for row in rows]
        curves, proposed = _propose(logits, banned)
        right = [cursors[name].next(count) for name, count in zip(names, counts, strict=True)]
        correct = proposed == torch.tensor(list(chain.from_iterable(right)))
        depth = torch.cat(list(map(torch.arange, counts)))
        columns = (torch.split(each, counts) for each in (depth, curves, correct))
        found.update(zip(names, map(observations, *columns), strict=True))

    def requests() -> Iterator[Request]:
        for name, cursor in enumerate(cursors):
            text, options = cursor.text, DecodingOptions(len(cursor.next(engine.window + 1)))
            yield Request(str(name), [*text.prompt, *text.output[: cursor.index]], options)

    engine.watch(take)
    for outputs in steps_of(engine, requests()):
        for output in outputs:
            if output.error:
                text = cursors[int(output.request_id)].text
                length = len(text.prompt) + len(text.output)
                raise UserError(
                    f"data: a step fails in a conversation of {length} tokens ({output.error}); "
                    "leave it out, or lower --batch or --max-tokens"
                )
            engine.cancel(output.request_id)  # unless all that it may propose was accepted
        if outputs:
            on_progress(len(found))
    engine.watch(None)
    return [found[name] for name in range(len(cursors))]


def _propose(logits: Tensor, banned: Tensor) -> tuple[Tensor, Tensor]:
    """Return curves [reads, temperatures] and tokens [reads].

    ``logits`` are [reads, vocabulary]; ``banned``, int64 [banned], are never proposed.
    """
    curves, proposed = [], []
    for part in torch.split(logits, max(_MAX_LOGITS // logits.shape[1], 1)):
        tokens = part.index_fill(-1, banned, -torch.inf).argmax(-1)
        curves.append(log_probability_curves(part, tokens).cpu())
        proposed.append(tokens.cpu())
    return torch.cat(curves), torch.cat(proposed)
