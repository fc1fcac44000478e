"""Drafts from a request's own text: the tokens that followed an earlier place like its end.

Text that is copied, edited or written by a pattern repeats itself, and then the tokens behind the
longest earlier occurrence of the last tokens are likely to come again. Mode exact checks them like
the drafts of masks, so they change the speed of decoding, but no output.

Where neither masks nor the text give a draft, those stand in that were rejected with the one before
them: they were made for the same places, and one wrong token need not change what follows it.

How often a suggestion comes true is counted by the length of the match. Suggestions are compared
with what was written later whether or not a step checked them, so that learning takes no position
of any step.

Source: prompt lookup decoding (A. Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import NamedTuple

from mars_serve.engine.drafting.match_chances import LONGEST, REJECTED, MatchChances
from mars_serve.engine.drafting.token_index import TokenIndex, num_agreed
from mars_serve.engine.request import Draft, Request

_TRUSTED = 8
"""Length of a match whose place is kept behind tokens that it did not foresee, for as many tokens:
a copy with a change goes on like the original."""
_LEAST_CHANCE = 0.05
"""Probability below which a draft, with those before it, is not worth its place."""
_DEAR = 0.25
"""Gain that a position must have from which on few drafts are worth feeding. Then only every eighth
step searches a text in which four searches in a row found none, which costs the host little."""
_PATIENCE, _STRIDE = 4, 8
_SURE = 0.5
"""Probability that all drafts of masks are right from which on they are not replaced."""


class LookupDrafter:
    """Drafts for the requests of one engine from their own text. Not thread-safe."""

    def __init__(self, num_drafts: int, max_drafts: int) -> None:
        """Start without requests.

        A request has at most ``max_drafts`` drafts in a step, ``num_drafts`` of them from its text.
        """
        self._num_drafts, self._max_drafts = num_drafts, max_drafts
        self._shared = MatchChances()
        self._texts: dict[str, _Text] = {}

    def follow(
        self, request: Request, rejected: Sequence[Draft], least_chance: float = 0.0
    ) -> None:
        """Complete the drafts of a request whose tokens have grown, or replace them.

        Behind the drafts of the request's own masks, or in their place, come those that its text
        suggests, whichever are expected to give more tokens. ``rejected`` are earlier drafts of the
        tokens to come, behind one that was wrong. A draft that is less likely than
        ``least_chance``, with those before it, would not be fed.
        """
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = _Text(request.max_length, MatchChances(self._shared))
        if text.skips(least_chance):
            return
        room = min(self._max_drafts, request.num_left - 1)
        if room > 0:
            text.grow(request.tokens)
            own, most = request.drafts[:room], min(self._num_drafts, room)
            suggestion = text.suggest(
                request.tokens, own, rejected[:most], most, min(most, room - len(own))
            )
            if suggestion is not None:
                request.set_drafts(suggestion.behind, suggestion.drafts)

    def forget(self, request_id: str) -> None:
        """Drop the text of a request that has ended, if there is one."""
        self._texts.pop(request_id, None)


class _Suggestion(NamedTuple):
    behind: Sequence[Draft]
    """Drafts of masks between the text and the suggestion."""
    drafts: list[Draft]
    lengths: list[int]
    """Length of the match for each draft, with the drafts before it, or `REJECTED`."""


class _Text:
    def __init__(self, max_length: int, chances: MatchChances) -> None:
        self._index, self._chances = TokenIndex(max_length), chances
        self.least_chance = _LEAST_CHANCE
        """Probability below which a draft, with those before it, is not suggested."""
        self._length = 0
        self._last: _Suggestion | None = None
        self._kept_place = 0
        """Place of the last long match, moved along with the text."""
        self._kept_until = 0
        """Length of the text up to which that place is kept."""
        self._num_steps, self._num_idle = 0, 0
        """Steps so far, and searches in a row that found no draft worth feeding."""

    def skips(self, least_chance: float) -> bool:
        """Begin a step, and return whether it does without a search; see `LookupDrafter.follow`."""
        self.least_chance = max(least_chance, _LEAST_CHANCE)
        self._num_steps += 1
        is_idle = least_chance >= _DEAR and self._num_idle >= _PATIENCE
        return is_idle and self._num_steps % _STRIDE != 0

    def grow(self, tokens: Sequence[int]) -> None:
        """Index further tokens, and learn from them whether the last suggestion came true."""
        self._index.extend(tokens)
        new = tokens[self._length :]
        if self._last is not None:
            self._learn(self._last, new)
            self._last = None
        self._kept_place += len(new)
        self._length += len(new)

    def suggest(
        self,
        tokens: Sequence[int],
        own: Sequence[Draft],
        rejected: Sequence[Draft],
        most: int,
        most_behind: int,
    ) -> _Suggestion | None:
        """Return what is likely to follow the text, alone or behind the drafts of masks, if any.

        At most ``most`` tokens are returned, or ``most_behind`` behind ``own``, the drafts of
        masks.
        """
        if self._index.num_indexed < len(tokens):
            return None  # a long prompt is indexed in several steps
        found = list[_Suggestion]()
        if own:
            found.append(self._behind(tokens, own, most_behind))
        if _chance_of_all(own) < _SURE or not own:
            found.append(self._alone(tokens, most))
        if rejected and not own:
            chance = self._chances.of[REJECTED]
            tail = [Draft(draft.token, chance) for draft in rejected]
            found.append(_Suggestion((), tail, [REJECTED] * len(tail)))
        best = found[0] if len(found) == 1 else max(found, key=_expected_right)
        self._last = best if best.drafts else None
        chance = _chance_of_all([*best.behind, *best.drafts[:1]]) if best.drafts else 0.0
        if chance < self.least_chance:
            self._num_idle += 1
            return None
        self._num_idle = 0
        return self._last

    def _behind(self, tokens: Sequence[int], own: Sequence[Draft], most: int) -> _Suggestion:
        end = [*tokens[-LONGEST:], *(draft.token for draft in own)][-LONGEST:]
        place, length = self._index.longest_match(tokens, end)
        if length >= _TRUSTED + len(own):
            self._keep(place - len(own))
        return self._suggestion(tokens, own, most, place, length)

    def _alone(self, tokens: Sequence[int], most: int) -> _Suggestion:
        end = tokens[-LONGEST:]
        place, length = self._index.longest_match(tokens, end)
        if length >= _TRUSTED:
            self._keep(place)
        elif self._length <= self._kept_until:
            agreed, chances = num_agreed(tokens, self._kept_place, end), self._chances.of
            if not place or chances[agreed] > chances[length]:
                place, length = self._kept_place, agreed
        return self._suggestion(tokens, (), most, place, length)

    def _keep(self, place: int) -> None:
        self._kept_place, self._kept_until = place, self._length + _TRUSTED

    def _suggestion(
        self, tokens: Sequence[int], own: Sequence[Draft], most: int, place: int, length: int
    ) -> _Suggestion:
        """Return up to ``most`` tokens from a place on; past the end of the text they repeat."""
        drafts, lengths = list[Draft](), list[int]()
        if place:
            ahead = [draft.token for draft in own]
            chance = _chance_of_all(own)
            for source in range(place, place + most):
                each = self._chances.of[length]
                chance *= each
                if drafts and chance < self.least_chance:
                    break
                token = tokens[source] if source < self._length else ahead[source - self._length]
                ahead.append(token)
                drafts.append(Draft(token, each))
                lengths.append(length)
                length += length < LONGEST
        return _Suggestion(own, drafts, lengths)

    def _learn(self, last: _Suggestion, new: Sequence[int]) -> None:
        """Count how often a suggestion came true, up to the first token that did not."""
        skipped = len(last.behind)
        if [draft.token for draft in last.behind] != new[:skipped]:
            return
        for draft, length, token in zip(last.drafts, last.lengths, new[skipped:], strict=False):
            self._chances.observe(length, is_right=draft.token == token)
            if draft.token != token:
                return


def _chance_of_all(drafts: Sequence[Draft]) -> float:
    return prod(draft.confidence for draft in drafts)


def _expected_right(suggestion: _Suggestion) -> float:
    """Return the expected number of leading drafts that are right, those of masks included."""
    drafts = [*suggestion.behind, *suggestion.drafts]
    return sum(accumulate((draft.confidence for draft in drafts), mul), 0.0)
