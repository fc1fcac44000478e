"""Drafts from a request's own text: the tokens that followed an earlier place like its end.

Text that is copied, edited or written by a pattern repeats itself, and then the tokens behind the
longest earlier occurrence of the last tokens are likely to come again. Mode exact checks them like
the drafts of masks, so they change the speed of decoding, but no output.

How often a suggestion comes true is counted by the length of the match. Suggestions are compared
with what was written later whether or not a step checked them, so that learning takes no position
of any step.

Source: prompt lookup decoding (A. Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from mars_serve.engine.drafting.match_chances import LONGEST, MatchChances
from mars_serve.engine.drafting.token_index import TokenIndex, num_agreed
from mars_serve.engine.request import Draft, Request

_TRUSTED = 8
"""Length of a match whose place is kept behind tokens that it did not foresee, for as many tokens:
a copy with a change goes on like the original."""
_LEAST_CHANCE = 0.05
"""Probability below which a draft, with those before it, is not worth its place."""


class LookupDrafter:
    """Drafts for the requests of one engine from their own text. Not thread-safe."""

    def __init__(self, num_drafts: int) -> None:
        """Start without requests.

        Args:
            num_drafts: most drafts of a request in a step, those of masks included.
        """
        self.num_drafts = num_drafts
        self._shared = MatchChances()
        self._texts: dict[str, _Text] = {}

    def follow(self, request: Request) -> None:
        """Complete the drafts of a request whose tokens have grown, or replace them.

        Behind the drafts of the request's own masks, or in their place, come those that its text
        suggests, whichever are expected to give more tokens.
        """
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = _Text(request.max_length, MatchChances(self._shared))
        text.grow(request.tokens)
        most = min(self.num_drafts, request.num_left - 1)
        suggestion = text.suggest(request.tokens, request.drafts[: max(0, most)], most)
        if suggestion is not None:
            request.set_drafts(suggestion.behind, suggestion.drafts)

    def forget(self, request_id: str) -> None:
        """Drop the text of a request that has ended, if there is one."""
        self._texts.pop(request_id, None)


class _Suggestion(NamedTuple):
    """Tokens that are expected behind a text, because they stand behind a place in it."""

    length: int
    """Number of tokens before the place that agree with the end of the text."""
    drafts: list[Draft]
    behind: Sequence[Draft]
    """Drafts of masks between the text and the suggestion."""


class _Text:
    """One request's text, and what was suggested to follow it."""

    def __init__(self, max_length: int, chances: MatchChances) -> None:
        self._index, self._chances = TokenIndex(max_length), chances
        self._length = 0
        """Number of tokens of the text so far."""
        self._last: _Suggestion | None = None
        self._kept_place = 0
        """Place of the last long match, moved along with the text."""
        self._kept_until = 0
        """Length of the text up to which that place is kept."""

    def grow(self, tokens: Sequence[int]) -> None:
        """Index further tokens, and learn from them whether the last suggestion came true."""
        self._index.extend(tokens)
        new = tokens[self._length :]
        if self._last is not None:
            self._learn(self._last, new)
            self._last = None
        self._kept_place += len(new)
        self._length += len(new)

    def suggest(self, tokens: Sequence[int], own: Sequence[Draft], most: int) -> _Suggestion | None:
        """Return what is likely to follow the text, alone or behind the drafts of masks.

        Args:
            tokens: the text.
            own: drafts of masks.
            most: most drafts, those of masks included.
        """
        if most <= 0 or self._index.num_indexed < len(tokens):
            return None  # the latter while a long prompt is indexed, in several steps
        chosen = self._suggestion(tokens, (), most, *self._place(tokens))
        if own:
            end = [*tokens[-LONGEST:], *(draft.token for draft in own)][-LONGEST:]
            match = self._index.longest_match(tokens, end)
            behind = self._suggestion(tokens, own, most - len(own), *match)
            if _expected_right([*own, *behind.drafts]) >= _expected_right(chosen.drafts):
                chosen = behind
        self._last = chosen if chosen.drafts else None
        return self._last

    def _place(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the place to go on from, and how many tokens before it agree with the end."""
        end = tokens[-LONGEST:]
        place, length = self._index.longest_match(tokens, end)
        if length >= _TRUSTED:
            self._kept_place, self._kept_until = place, len(tokens) + _TRUSTED
        elif len(tokens) <= self._kept_until:
            agreed = num_agreed(tokens, self._kept_place, end)
            if not place or self._chances.of(agreed) > self._chances.of(length):
                return self._kept_place, agreed
        return place, length

    def _suggestion(
        self, tokens: Sequence[int], own: Sequence[Draft], most: int, place: int, length: int
    ) -> _Suggestion:
        """Return up to ``most`` tokens from a place on; past the end of the text they repeat."""
        drafts = list[Draft]()
        ahead = [draft.token for draft in own]
        chance = 1.0
        for depth in range(most if place else 0):
            each = self._chances.of(length + depth)
            chance *= each
            if chance < _LEAST_CHANCE:
                break
            source = place + depth
            token = tokens[source] if source < len(tokens) else ahead[source - len(tokens)]
            ahead.append(token)
            drafts.append(Draft(token, each))
        return _Suggestion(length, drafts, own)

    def _learn(self, last: _Suggestion, new: Sequence[int]) -> None:
        """Count how often a suggestion came true, up to the first token that did not."""
        skipped = len(last.behind)
        if [draft.token for draft in last.behind] != new[:skipped]:
            return
        for depth, (draft, token) in enumerate(zip(last.drafts, new[skipped:], strict=False)):
            self._chances.observe(last.length + depth, is_right=draft.token == token)
            if draft.token != token:
                return


def _expected_right(drafts: Sequence[Draft]) -> float:
    """Return the expected number of leading drafts that are right."""
    return sum(accumulate((draft.confidence for draft in drafts), mul))
