"""Chooses tokens from logits: penalties, biases, masks, filters and keyed Gumbel noise.

A choice is a function of the logits, the request's parameters and the tokens before it. The noise
is a function of seed, absolute position and token id alone, so the same logits at a position give
the same token in any batch.

The order is: repetition penalty, presence and frequency penalties, ``logit_bias``, ``min_tokens``,
allowed tokens, bad words and grammar, temperature, ``top_k``, ``top_p``, ``min_p``. In
transformers' ``generate`` it is the same, except that the bias comes before the penalties. Ties are
treated as there, too: ``top_k`` and ``min_p`` keep all tokens that tie with the last one, ``top_p``
only as many as it needs. Here these are the lowest ids, there any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mars_serve.engine.decoding_options import Sampling
from mars_serve.engine.device.transfer import to_device
from mars_serve.engine.sampling.noise import gumbel_noise, noise_keys, noise_of

# Number of likeliest tokens among which a CPU looks first, in a third of the time.
_NUM_CANDIDATES = 512
# Logits handled at once. A CPU's cache should hold the temporaries; on other devices only memory
# counts.
_MAX_PART_CPU, _MAX_PART = 2**17, 2**24
_ROOM = 64
"""Distinct tokens for which a history has room at first."""


@dataclass(eq=False)
class TokenHistory:
    """Tokens of a request that penalties count; it grows in place as tokens are committed."""

    prompt: Tensor
    """int64 [distinct tokens of the prompt], on the host."""
    places: dict[int, int]
    """Place of each token of the output in the arrays, which are longer, so that they can grow."""
    tokens: NDArray[np.int64]
    times: NDArray[np.float32]
    """Number of times that each of the tokens stands in the output."""

    @classmethod
    def of(cls, tokens: Sequence[int], num_prompt: int) -> TokenHistory:
        """Count the tokens of a prompt and the output behind it."""
        prompt = torch.from_numpy(np.unique(np.array(tokens[:num_prompt], np.int64)))
        made = cls(prompt, {}, np.zeros(_ROOM, np.int64), np.zeros(_ROOM, np.float32))
        made.extend(tokens[num_prompt:])
        return made

    def extend(self, tokens: Iterable[int]) -> None:
        """Count further output tokens."""
        for token in tokens:
            place = self.places.setdefault(token, len(self.places))
            if place == len(self.tokens):
                self.tokens = np.pad(self.tokens, (0, place))
                self.times = np.pad(self.times, (0, place))
            self.tokens[place] = token
            self.times[place] += 1

    def copy(self) -> TokenHistory:
        """Return a copy that grows on its own."""
        return TokenHistory(self.prompt, dict(self.places), self.tokens.copy(), self.times.copy())

    def output(self) -> tuple[Tensor, Tensor]:
        """Return the tokens of the output, int64 [n], and the times of each, float32 [n]."""
        count = len(self.places)
        return torch.from_numpy(self.tokens[:count]), torch.from_numpy(self.times[:count])


Bias = tuple[Tensor, Tensor]
"""int64 [n] tokens, and float32 [n], what is added to their logits, on the host."""


def bias_of(sampling: Sampling) -> Bias:
    """Return the bias of a sampling that has one, which takes half a millisecond for 1 000."""
    tokens, values = zip(*sampling.logit_bias, strict=True)
    return torch.tensor(tokens), torch.tensor(values, dtype=torch.float32)


class Behind(NamedTuple):
    """Drafts that are checked in the same choice."""

    checked: SampledRow
    """Row that checks them."""
    drafts: list[int]
    outcome: int
    """Number of leading drafts that are right."""

    def chosen(self, tokens: list[int]) -> list[int] | None:
        """Return the tokens up to behind the right drafts, or None if others are right.

        ``tokens`` are those that the row chooses which checks them.
        """
        right = [token == draft for token, draft in zip(tokens, self.drafts, strict=False)]
        is_outcome = [*right, False].index(False) == self.outcome
        return tokens[: self.outcome + 1] if is_outcome else None


@dataclass(frozen=True)
class SampledRow:
    """A row of a step, or one of its groups of masks, whose choice is not simply greedy."""

    sampling: Sampling
    reads: list[int]
    """Indices into the step's logits, at least one, depth 0 first; depth d proposes the token at
    ``position + d``."""
    position: int
    """Absolute position of the token that depth 0 proposes."""
    num_output: int
    """Output tokens before depth 0."""
    end_tokens: Tensor | None = None
    """int64 [n], on the host: tokens that are not chosen before ``min_tokens``."""
    history: TokenHistory | None = None
    """History of the committed tokens, if the sampling needs it; not modified."""
    bias: Bias | None = None
    allow: Callable[[list[int]], Tensor | None] | None = None
    """Function from the tokens chosen at earlier depths to the tokens that are allowed behind
    them, bool [vocabulary], or None if the grammar does not match them; then all are allowed."""
    allow_follows: bool = True
    """Whether ``allow`` depends on those tokens."""
    has_grammar: bool = False
    """Whether ``allow`` knows a grammar; if that allows nothing but end tokens, they are chosen
    before ``min_tokens``, too."""
    charge: Callable[[float], object] = float
    """Called with CPU seconds that a choice took, what ``allow`` takes left out."""
    behind: Behind | None = None
    """Drafts that the row stands behind. If its outcome comes about, the tokens chosen there count
    before the row's own; if not, the row is of no use, and no tokens are chosen."""
    previous: Sequence[int] = ()
    """For each read, the one whose token stands before its own, by which a draft head acts, or -1
    where none acts; empty if it acts at none."""

    @property
    def follows(self) -> bool:
        """Whether rules that the host applies depend on the choices at earlier depths."""
        follows = self.allow is not None and self.allow_follows
        return len(self.reads) > 1 and (self.sampling.needs_history or follows)

    @property
    def is_chain(self) -> bool:
        """Whether the choice at a depth depends on the choices at earlier depths."""
        return self.follows or (len(self.reads) > 1 and bool(self.previous))


ActHead = Callable[[Tensor, Tensor, Tensor], object]
"""Function that lets a draft head act on logits [reads, vocabulary], in place, at int64 [n] reads
behind int64 [n] tokens."""


def choose_tokens(
    logits: Tensor, tokens: Tensor, rows: Sequence[SampledRow], act_head: ActHead | None = None
) -> None:
    """Choose a token at every read of every row, unless the row is of no use.

    At temperature 0 it is the likeliest token, the lowest id among equals; otherwise it is the one
    with the highest sum of scaled logit and noise. Penalties and grammars at a depth count the
    tokens chosen at earlier depths of the row, and a draft head acts by them, so such rows take one
    pass for each depth; all other rows share one pass. If rules, a grammar or an early end leave no
    token, the likeliest is chosen regardless, and the caller has to notice. A row with a NaN gets
    some valid token.

    Args:
        logits: float [reads, vocabulary], any float type; tokens that are never emitted are -inf.
            Modified by the draft head alone.
        tokens: int64 [reads], the likeliest tokens, which are overwritten.
        rows: rows of any kinds, with no read in common and token ids below the vocabulary.
        act_head: acts for the rows that name previous reads.
    """
    walks = [_Walk(row) for row in rows if row.behind is None]
    groups = [row for row in rows if row.behind is not None]
    while walks:
        wave = sorted((pick for walk in walks for pick in walk.picks()), key=_Pick.kind)
        if act_head is not None:
            _act(logits, tokens, wave, act_head)
        for reads, chosen in _choose(logits, wave):
            tokens.index_copy_(0, reads, chosen)
        ended = {id(walk.row) for walk in walks if walk.is_last} if groups else set()
        walks = [walk for walk in walks if not walk.is_last]
        if ended or any(walk.row.follows for walk in walks):  # the host has to know the tokens
            token_of = tokens.tolist()
        else:
            token_of = [0] * len(tokens)
        for walk in walks:
            walk.extend(token_of[walk.read])
        for row in groups:
            if row.behind is not None and id(row.behind.checked) in ended:
                before = row.behind.chosen([token_of[read] for read in row.behind.checked.reads])
                walks += [] if before is None else [_Walk(row, before=before)]


def _act(logits: Tensor, tokens: Tensor, picks: Sequence[_Pick], act_head: ActHead) -> None:
    """Let a draft head act at picks, given ``tokens``, int64 [reads], chosen before."""
    places = [
        (pick.read, pick.row.previous[pick.depth])
        for pick in picks
        if pick.row.previous and pick.row.previous[pick.depth] >= 0
    ]
    if places:
        reads, previous = to_device(torch.tensor(places).T.contiguous(), logits.device)
        act_head(logits, reads, tokens[previous])


def log_probs_of(
    log_probabilities: Tensor, tokens: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of chosen tokens, float32 [reads], and of the likeliest ones.

    The latter are int64 [reads, num_top] tokens, likeliest first and the lowest id first among
    equals, and their float32 log-probabilities. ``log_probabilities`` are float32 [reads,
    vocabulary], ``tokens`` int64 [reads].
    """
    own = log_probabilities.gather(-1, tokens[:, None])[:, 0]
    # One integer orders by number, then by id, because topk promises no order among equals.
    bits = (log_probabilities + 0.0).view(torch.int32).long()  # +0.0 makes -0.0 the same number
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32  # as the floats are ordered
    ids = torch.arange(bits.shape[-1], device=bits.device)
    top = (ordered - ids).topk(num_top, dim=-1).indices
    return own, top, log_probabilities.gather(-1, top)


class _Kind(IntEnum):
    """Kinds of choices, by the work that they take."""

    GREEDY = 0
    SAMPLED = 1
    FILTERED = 2
    """Sampling from a part of the tokens."""


class _Pick(NamedTuple):
    """One read of a row, with everything on which its choice depends."""

    row: SampledRow
    depth: int
    history: TokenHistory | None
    allowed: Tensor | None

    @property
    def read(self) -> int:
        return self.row.reads[self.depth]

    @property
    def sampling(self) -> Sampling:
        return self.row.sampling

    @property
    def early_ends(self) -> Tensor | None:
        if self.row.num_output + self.depth >= self.sampling.min_tokens:
            return None
        ends = self.row.end_tokens
        if self.row.has_grammar and ends is not None and self.allowed is not None:
            return ends if int(self.allowed[ends].sum()) < int(self.allowed.sum()) else None
        return ends

    def kind(self) -> _Kind:
        sampling = self.sampling
        if sampling.limits.temperature == 0.0:
            return _Kind.GREEDY
        filtered = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        return _Kind.FILTERED if filtered else _Kind.SAMPLED


@dataclass(eq=False)
class _Walk:
    """A row whose tokens are being chosen; only a chain takes more than one wave."""

    row: SampledRow
    chosen: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    """Tokens chosen before the row's own, behind the committed ones."""
    history: TokenHistory | None = field(init=False)

    def __post_init__(self) -> None:
        self.history = self.row.history
        if self.history is not None and (self.before or self.row.is_chain):
            self.history = self.history.copy()
            self.history.extend(self.before)

    @property
    def rest(self) -> list[int]:
        first = len(self.chosen)
        return self.row.reads[first : first + 1 if self.row.is_chain else None]

    @property
    def read(self) -> int:
        return self.row.reads[len(self.chosen)]

    @property
    def is_last(self) -> bool:
        return not self.row.is_chain or len(self.chosen) == len(self.row.reads) - 1

    def extend(self, token: int) -> None:
        self.chosen.append(token)
        if self.history is not None:
            self.history.extend([token])

    def picks(self) -> list[_Pick]:
        # The function gets a copy, because it may keep the list.
        allowed = None
        if self.row.allow is not None:
            allowed = self.row.allow([*self.before, *self.chosen])
        first = len(self.chosen)
        depths = range(first, first + len(self.rest))
        return [_Pick(self.row, depth, self.history, allowed) for depth in depths]


def _choose(logits: Tensor, picks: Sequence[_Pick]) -> Iterator[Tensor]:
    """Choose the tokens of picks, sorted by kind, in parts: int64 [2, part], reads and tokens."""
    most = _MAX_PART_CPU if logits.device.type == "cpu" else _MAX_PART
    size = max(1, most // logits.shape[1])
    for kind, group in groupby(picks, key=_Pick.kind):
        same = list(group)
        for start in range(0, len(same), size):
            part, begun_s = same[start : start + size], time.thread_time()
            yield _choose_part(logits, part, kind)
            each_s = (time.thread_time() - begun_s) / len(part)
            for pick in part:
                pick.row.charge(each_s)


class _Columns(NamedTuple):
    """Numbers of picks, one for each."""

    reads: Tensor
    """int64 [part]."""
    seeds: Tensor
    """int64 [part]."""
    positions: Tensor
    """int64 [part], absolute positions of the tokens to choose."""
    top_k: Tensor
    """int64 [part]; the size of the vocabulary keeps all tokens."""
    temperature: Tensor
    """float32 [part]."""
    top_p: Tensor
    """float32 [part]; a value above 1 keeps all tokens."""
    least: Tensor
    """float32 [part], the least scores."""

    @classmethod
    def of(cls, picks: Sequence[_Pick], vocabulary: int, device: torch.device) -> _Columns:
        """Copy the numbers of picks to a device in one transfer."""
        wholes, shares = [], []
        for pick in picks:
            top_k, *others = pick.sampling.limits
            position = pick.row.position + pick.depth
            wholes.append((pick.read, pick.sampling.seed, position, min(top_k, vocabulary)))
            shares.append(others)
        bits = torch.tensor(shares, dtype=torch.float64).view(torch.long)
        table = to_device(torch.cat([torch.tensor(wholes), bits], dim=1).T.contiguous(), device)
        return cls(*table[:4], *table[4:].view(torch.float64).float())


def _choose_part(logits: Tensor, picks: Sequence[_Pick], kind: _Kind) -> Tensor:
    """Choose the tokens of picks of one kind: int64 [2, part], reads and tokens."""
    columns = _Columns.of(picks, logits.shape[1], logits.device)
    reads = columns.reads
    scores = logits[reads].float()  # a copy: [part, vocabulary]
    _add_biases(scores, picks)
    is_masked = _mask(scores, picks)
    peak, tokens = scores.max(-1)  # faster than argmax; a NaN is the highest
    if kind is not _Kind.GREEDY:
        # With the peak at 0, no temperature makes a score overflow. If all are -inf, they stay so.
        scores -= peak.clamp_min(torch.finfo(torch.float32).min)[:, None]
        # A NaN would spread to forbidden tokens; here only tokens that may be chosen have one.
        tokens = torch.where(peak.isnan(), tokens, _sample(scores, columns, kind))
    if is_masked:
        likeliest = logits[reads].max(-1).indices
        tokens = torch.where(peak == -torch.inf, likeliest, tokens)
    return torch.stack([reads, tokens])


class _Entries:
    """Entries of a sparse matrix [part, vocabulary], collected on the host."""

    def __init__(self) -> None:
        self._indices: list[Tensor] = []
        self._values: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._indices)

    def add(self, row: int, tokens: Tensor, values: Tensor) -> None:
        """Add entries to a row: int64 [n] tokens and float32 [n] values."""
        self._indices.append(torch.stack([torch.full_like(tokens, row), tokens]))
        self._values.append(values)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return int64 [entries] rows, int64 [entries] tokens and float32 [entries] values."""
        rows, tokens = to_device(torch.cat(self._indices, dim=1), device)
        return rows, tokens, to_device(torch.cat(self._values), device)


def _add_biases(scores: Tensor, picks: Sequence[_Pick]) -> None:
    """Apply penalties and biases to logits in place; tokens at -inf stay there."""
    repeated, added = _Entries(), _Entries()
    for row, pick in enumerate(picks):
        if pick.sampling.needs_history:
            _add_penalties(row, pick, repeated, added)
        if pick.row.bias is not None:
            added.add(row, *pick.row.bias)
    if repeated:
        rows, tokens, factors = repeated.on(scores.device)
        before = scores[rows, tokens]
        # A token of both prompt and output stands here twice, with the same result.
        after = torch.where(before < 0, before * factors, before / factors)
        scores[rows, tokens] = torch.where(before == -torch.inf, before, after)
    if added:
        rows, tokens, values = added.on(scores.device)
        values = values.masked_fill(scores[rows, tokens] == -torch.inf, 0.0)
        scores.index_put_((rows, tokens), values, accumulate=True)


def _add_penalties(row: int, pick: _Pick, repeated: _Entries, added: _Entries) -> None:
    sampling, history = pick.sampling, pick.history
    assert history is not None
    output, times = history.output()
    if sampling.repetition_penalty != 1.0:
        tokens = torch.cat([history.prompt, output])
        factor = min(sampling.repetition_penalty, torch.finfo(torch.float32).max)
        repeated.add(row, tokens, torch.full(tokens.shape, factor))
    if sampling.presence_penalty or sampling.frequency_penalty:
        penalties = sampling.presence_penalty + sampling.frequency_penalty * times
        added.add(row, output, -penalties)


def _mask(scores: Tensor, picks: Sequence[_Pick]) -> bool:
    """Set early end tokens and all that are not allowed to -inf, in place.

    Returns:
        Whether none may be left.
    """
    early = [
        torch.stack([torch.full_like(ends, row), ends])
        for row, pick in enumerate(picks)
        if (ends := pick.early_ends) is not None
    ]
    if early:
        of_ends, tokens = to_device(torch.cat(early, dim=1), scores.device)
        scores[of_ends, tokens] = -torch.inf
    allowed = {row: pick.allowed for row, pick in enumerate(picks) if pick.allowed is not None}
    if allowed:
        forbidden = ~to_device(torch.stack(list(allowed.values())), scores.device)
        rows = to_device(torch.tensor(list(allowed)), scores.device)
        scores[rows] = scores[rows].masked_fill_(forbidden, -torch.inf)
    return bool(allowed) or bool(early)


def _sample(scores: Tensor, columns: _Columns, kind: _Kind) -> Tensor:
    """Sample the tokens of picks: int64 [part]. Overwrites the scores.

    Filters keep the first tokens in the order of value and id, but nothing is sorted: the token
    with the highest sum of score and noise is tried. If it is not kept, neither are those behind
    it, and the best of those before it is tried. On average, that halves the probability left.

    ``top_p`` keeps the tokens before which less than its share lies. This is transformers' rule,
    but summed from the likeliest token on, where sums are more precise. The sums are the same in
    any order, and so in any batch, since their terms are multiples of 2**-52. They are compared as
    float32 numbers. So the last bits of float64, which differ between devices and in functions of
    C++, decide only where a sum lies halfway between two of those; either choice is lawful there.
    """
    scores /= columns.temperature[:, None]
    if kind is _Kind.SAMPLED:
        noise = gumbel_noise(columns.seeds, columns.positions, scores.shape[1])
        return noise.add_(scores).max(-1).indices
    return (_best_kept_on_cpu if scores.device.type == "cpu" else _best_kept)(scores, columns)


def _best_kept(scores: Tensor, columns: _Columns) -> Tensor:
    """Sample from the tokens that filters keep: int64 [part]. Overwrites ``scores``, float32 [part,
    vocabulary], scaled logits that peak at 0.
    """
    top_k, top_p, least = (each[:, None] for each in (columns.top_k, columns.top_p, columns.least))
    ids = torch.arange(scores.shape[1], device=scores.device)
    most = int(torch.where(top_k < len(ids), top_k, 1).max())
    cut = scores.topk(most).values.gather(-1, (top_k - 1).clamp_max(most - 1))
    scores.masked_fill_((scores < cut) & (top_k < len(ids)), -torch.inf)
    noisy = gumbel_noise(columns.seeds, columns.positions, len(ids)).add_(scores)
    shares = scores.double().softmax(-1) + 1.0 - 1.0
    chosen = rest = torch.arange(len(scores), device=scores.device)
    while len(rest):
        best = noisy.max(-1, keepdim=True).indices
        chosen = chosen.index_copy(0, rest, best[:, 0])
        value = scores.gather(-1, best)
        is_before = (scores > value) | ((scores == value) & (ids < best))
        before = (shares * is_before).sum(-1, keepdim=True).float()
        is_kept = (before < top_p) & (value >= least) | ~(before > 0)  # with NaN, too
        left = (~is_kept[:, 0]).nonzero()[:, 0]
        noisy = noisy[left].masked_fill_(~is_before[left], -torch.inf)
        scores, shares, rest = scores[left], shares[left], rest[left]
        top_p, least = top_p[left], least[left]
    return chosen


def _best_kept_on_cpu(scores: Tensor, columns: _Columns) -> Tensor:
    """Return what `_best_kept` does, in a fraction of the time."""
    keys = noise_keys(columns.seeds, columns.positions)
    limits = zip(columns.top_k.tolist(), columns.top_p.numpy(), columns.least.numpy(), strict=True)
    rows = zip(scores.numpy(), keys, limits, strict=True)
    return torch.tensor([_best_kept_of(row, key, *each) for row, key, each in rows])


def _best_kept_of(
    scores: NDArray[np.float32],
    key: Tensor,
    top_k: int,
    top_p: NDArray[np.float32],
    least: NDArray[np.float32],
) -> int:
    """Sample a row's token, among its likeliest tokens alone if the filters surely keep no others.

    ``scores``, float32 [vocabulary], are scaled logits that peak at 0; ``key``, int64 [], is that
    of the noise.
    """
    first = max(len(scores) - _NUM_CANDIDATES, 0)
    ids = np.sort(np.argpartition(scores, first)[first:])
    if top_k < len(scores):
        likely = scores[ids] if top_k <= len(ids) else scores
        cut = np.partition(likely, -top_k)[-top_k]
        scores = np.where(scores < cut, np.float32(-np.inf), scores)
    shares = torch.from_numpy(scores).double().softmax(-1).numpy() + 1.0 - 1.0
    last = scores[ids].min()
    above = shares[ids][scores[ids] > last].sum()
    if last == -np.inf or last < least or 0 < top_p <= np.float32(above):
        scores, shares = scores[ids], shares[ids]
    else:
        ids = np.arange(len(scores))
    noisy = scores + noise_of(key, torch.from_numpy(ids)).numpy()
    while True:
        best = int(noisy.argmax())
        is_before = scores > scores[best]
        is_before[:best] |= scores[:best] == scores[best]
        before = np.float32((shares * is_before).sum())
        if not before > 0 or (before < top_p and scores[best] >= least):
            return int(ids[best])
        noisy[~is_before] = -np.inf
