"""Measures how many tokens a pass mode exact could have with ideal masks, by Monte Carlo.

A mask predicts a token without knowing the tokens between, so even a perfect one can only give the
average over all of them. At temperatures above 0 this bounds the tokens a pass, whatever masks
learn. The drafters that are compared, all with the engine's keyed noise and masks for every
outcome:

- ideal masks: the model's own distribution d tokens ahead, averaged over what may stand between;
- the same for masks that learned on outputs at temperature 1;
- ideal masks that know the token in the first mask's place (the bonus token);
- an ideal pair head: the distribution given the context and the token right before;
- the checkpoint's masks, and these with its draft head.

Averages are over rollouts of the model, and exact in the last token of each.

    python -m bench.beds.bounds MODEL --data eval.jsonl [--adapter DIR] [--items 32]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mars_platform.checkpoint.adapted import load_weights, read_model
from mars_platform.checkpoint.adapter.draft_head import draft_head_of
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.cli.progress import progress_display
from mars_platform.method.rules import visibility
from mars_platform.statistics import ratio_of_totals
from mars_serve.engine.sampling.noise import gumbel_noise
from mars_serve.measure.evaluation.decoding import ONE_TOKEN, evaluation_engine, run_setting
from mars_serve.measure.evaluation.items import EvalItem, read_items

IDEAL = "ideal masks"
IDEAL_AT_1 = "ideal masks, learned at temperature 1"
BONUS_KNOWN = "ideal masks that know the bonus token"
PAIR = "ideal pair head"
MASKS = "the checkpoint's masks"
HEAD = "its masks with its draft head"

_PREFIXES = 16
"""Prefixes whose rollouts or masks share a forward pass; more take more memory."""


@dataclass(frozen=True)
class Text:
    """A prompt with the model's own output at a temperature, drawn by the noise of a seed."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    temperature: float
    seed: int

    @property
    def tokens(self) -> Tensor:
        """Prompt and output, int64 [length]."""
        return torch.tensor([*self.prompt, *self.output])

    def following(self, depths: int) -> Tensor:
        """Return the tokens from 0 to ``depths`` places behind each prefix, -1 past the end."""
        ends = torch.tensor([*self.output, *[-1] * depths])
        return ends.unfold(0, depths + 1, 1)

    def chunks(self) -> Iterator[Tensor]:
        """Yield the lengths of the prefixes, each of which the output goes on from, in parts."""
        lengths = torch.arange(len(self.prompt), len(self.prompt) + len(self.output))
        yield from torch.split(lengths, _PREFIXES)


@dataclass(frozen=True)
class Target:
    """The model whose output is to be drafted; any with plain causal attention."""

    model: PreTrainedModel
    never_emitted: frozenset[int]
    eos: frozenset[int]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits behind hidden states, without what is never emitted."""
        logits: Tensor = self.model.get_output_embeddings()(hidden).float()
        return logits.index_fill(-1, torch.tensor(sorted(self.never_emitted)).long(), -torch.inf)

    def probabilities(self, hidden: Tensor, temperature: float) -> Tensor:
        """Return the distributions from which tokens are drawn at a temperature."""
        logits = self.logits(hidden)
        if temperature:
            return (logits / temperature).softmax(-1)
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)


@torch.inference_mode()
def marginals(
    target: Target, text: Text, temperature: float, *, depths: int, rollouts: int
) -> tuple[Tensor, Tensor]:
    """Return what ideal drafters know behind each prefix of an output.

    Continuations that have ended are left out of an average, as masks learn nothing behind the end.

    Returns:
        Distributions of the token d places ahead [prefixes, depths + 1, vocabulary], d from 0; and
        [prefixes, depths, vocabulary], d from 1, of those behind the output's token before.
    """
    base = target.model.base_model(input_ids=text.tokens[None, :-1], use_cache=True)
    generator, parts = torch.Generator().manual_seed(text.seed), []
    for lengths in text.chunks():
        cache = DynamicCache()
        for index, layer in enumerate(base.past_key_values.layers):
            shape = (len(lengths), -1, -1, -1)
            cache.update(layer.keys.expand(shape), layer.values.expand(shape), index)
        rolls = _Rollouts(target, temperature, rollouts, text.tokens, lengths, cache, generator)
        parts.append(rolls.run(base.last_hidden_state[0, lengths - 1], depths))
    ahead, behind_pair = (torch.cat(each) for each in zip(*parts, strict=True))
    return ahead, behind_pair


@dataclass
class _Rollouts:
    """Rollouts of some prefixes of a text, all rollouts of a prefix in one row of slots.

    At each depth a rollout takes two slots: one holds the token that it drew, the other the text's
    token in its place, which nothing later sees.
    """

    target: Target
    temperature: float
    count: int
    tokens: Tensor
    lengths: Tensor
    cache: DynamicCache
    generator: torch.Generator

    def run(self, hidden: Tensor, depths: int) -> tuple[Tensor, Tensor]:
        """Return both results of `marginals` from the prefixes' last hidden states."""
        eos = torch.tensor(sorted(self.target.eos))
        drawn = self.target.probabilities(hidden, self.temperature)[:, None]
        drawn = drawn.expand(-1, self.count, -1)
        alive = torch.ones(drawn.shape[:2])
        ahead, behind_pair = [_mean(drawn, alive)], []
        for depth in range(1, depths + 1):
            places = (self.lengths + depth - 1).clamp(max=len(self.tokens) - 1)
            actual = self.tokens[places][:, None].expand(-1, self.count)
            agree = alive * drawn.gather(-1, actual[..., None])[..., 0]
            flat = torch.multinomial(drawn.flatten(0, 1), 1, generator=self.generator)
            own = flat.view(alive.shape)
            found = self._step(torch.cat([own, actual], dim=1), depth)
            drawn, forced = found[:, : self.count], found[:, self.count :]
            alive = alive * ~torch.isin(own, eos)
            ahead.append(_mean(drawn, alive))
            behind_pair.append(_mean(forced, agree))
        return torch.stack(ahead, dim=1), torch.stack(behind_pair, dim=1)

    def _step(self, ids: Tensor, depth: int) -> Tensor:
        """Return the distributions behind tokens, [prefixes, 2 * rollouts, vocabulary]."""
        num = ids.shape[1]
        clean = torch.arange(len(self.tokens) - 1) < self.lengths[:, None]
        drawn = torch.eye(self.count, dtype=torch.bool).repeat(2, 1)
        earlier = torch.cat([drawn, torch.zeros_like(drawn)], dim=1).repeat(1, depth - 1)
        ours = torch.cat([earlier, torch.eye(num, dtype=torch.bool)], dim=1)
        mask = torch.cat(
            [clean[:, None].expand(-1, num, -1), ours.expand(len(ids), -1, -1)], dim=-1
        )
        positions = (self.lengths + depth - 1)[:, None].expand_as(ids)
        # By place, because releases of transformers name the cache differently.
        hidden = self.target.model.base_model(
            ids, mask[:, None], positions, self.cache, use_cache=True
        ).last_hidden_state
        return self.target.probabilities(hidden, self.temperature)


def _mean(distributions: Tensor, weights: Tensor) -> Tensor:
    """Return weighted means over rollouts [prefixes, rollouts, vocabulary]; zeros without any."""
    total = weights.sum(1).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.einsum("nrv,nr->nv", distributions, weights / total[:, None])


@torch.inference_mode()
def mask_states(target: Target, text: Text, *, mask_token_id: int, depths: int) -> Tensor:
    """Return the last hidden states of masks behind each prefix, [prefixes, depths, width]."""
    found = []
    for lengths in text.chunks():
        places = (lengths[:, None] + torch.arange(depths)).flatten()  # positions of the masks
        clean = torch.arange(int(lengths[-1]))
        ids = torch.cat([text.tokens[clean], torch.full_like(places, mask_token_id)])
        blocks = torch.cat([clean, lengths.repeat_interleave(depths)])
        positions, noisy = torch.cat([clean, places]), torch.arange(len(ids)) >= len(clean)
        mask = visibility(torch.zeros_like(ids)[None], positions[None], blocks[None], noisy[None])
        hidden = target.model.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=mask[:, None],
            use_cache=False,
        ).last_hidden_state[0, len(clean) :]
        found.append(hidden.unflatten(0, (len(lengths), depths)))
    return torch.cat(found)


def choose(logits: Tensor, text: Text) -> Tensor:
    """Choose drafts as the engine does: int64 [prefixes, depths] of logits at temperature 1."""
    if not text.temperature:
        return logits.argmax(-1)
    num, depths, vocabulary = logits.shape
    places = len(text.prompt) + torch.arange(num)[:, None] + torch.arange(1, depths + 1)
    seeds = torch.full_like(places, text.seed).flatten()
    noise = gumbel_noise(seeds, places.flatten(), vocabulary).view(logits.shape)
    return (logits / text.temperature + noise).argmax(-1)


@torch.inference_mode()
def all_drafts(
    target: Target, text: Text, *, depths: int, rollouts: int, mask_token_id: int | None
) -> dict[str, Tensor]:
    """Return what each drafter drafts behind each prefix, int64 [prefixes, depths], by name."""
    needed = rollouts if text.temperature else 1  # greedy ones are all the same
    ahead, pair = marginals(target, text, text.temperature, depths=depths, rollouts=needed)
    power = text.temperature or 1.0  # `choose` divides by it, and these are at the temperature
    behind_bonus = torch.cat([ahead[1:, :-1], ahead[-1:, :-1]])  # the last prefix needs no draft
    found = {
        IDEAL: choose(ahead[:, 1:].log() * power, text),
        BONUS_KNOWN: choose(behind_bonus.log() * power, text),
        PAIR: choose(pair.log() * power, text),
    }
    if text.temperature != 1.0:
        at_1, _ = marginals(target, text, 1.0, depths=depths, rollouts=rollouts)
        found[IDEAL_AT_1] = choose(at_1[:, 1:].log(), text)
    if mask_token_id is None:
        return found
    hidden = mask_states(target, text, mask_token_id=mask_token_id, depths=depths)
    logits = target.logits(hidden)
    found[MASKS] = choose(logits, text)
    if (head := draft_head_of(target.model)) is not None:
        # A chain counts up to its first wrong draft, so that the draft before is the output's.
        previous = text.following(depths)[:, :-1].clamp(min=0)
        added = head(hidden.flatten(0, 1), previous.flatten()).view(logits.shape)
        found[HEAD] = choose(logits + added, text)
    return found


@dataclass
class Tally:
    """Counts the tokens and passes of one drafter, for each of many outputs."""

    tokens: list[int] = field(default_factory=list)
    """Tokens of each output."""
    passes: list[int] = field(default_factory=list)
    """Passes that each output takes."""
    given: list[NDArray[np.int64]] = field(default_factory=list)
    """Tokens of a pass from each prefix of each output."""

    def add(self, drafts: Tensor, text: Text) -> None:
        """Count the drafts of an output."""
        right = drafts == text.following(drafts.shape[1])[:, 1:]
        given = 1 + right.long().cumprod(1).sum(1).numpy()
        cursor, passes = 0, 1  # the first pass reads the prompt and gives one token
        while cursor + 1 < len(given):
            cursor += int(given[cursor])
            passes += 1
        self.tokens.append(len(given))
        self.passes.append(passes)
        self.given.append(given)

    def cells(self, quarters: Sequence[Sequence[NDArray[np.bool_]]]) -> list[str]:
        """Return tokens a pass of whole outputs, then means over prefixes, with 95% intervals.

        ``quarters`` has which of each output's prefixes count. Outputs are the sample.
        """
        found = [ratio_of_totals(self.tokens, self.passes)]
        for quarter in quarters:
            pairs = zip(self.given, quarter, strict=True)
            sums = [float(given[: len(which)][which].sum()) for given, which in pairs]
            found.append(ratio_of_totals(sums, [float(which.sum()) for which in quarter]))
        return [f"{each.value:.2f} ({each.low:.2f}-{each.high:.2f})" for each in found]


@torch.inference_mode()
def entropies(target: Target, text: Text) -> Tensor:
    """Return the entropy of the distribution of each token of an output, in nats, [tokens].

    It is that which the token was drawn from; of greedy output that at temperature 1.
    """
    hidden = target.model.base_model(input_ids=text.tokens[None, :-1]).last_hidden_state[0]
    found = target.probabilities(hidden[len(text.prompt) - 1 :], text.temperature or 1.0)
    entropy: Tensor = torch.special.entr(found).sum(-1)
    return entropy


def quartiles(found: Sequence[Tensor], depths: int) -> list[list[NDArray[np.bool_]]]:
    """Return which prefixes lie in each quartile of the mean entropy of the tokens behind them.

    Only prefixes with tokens for a whole pass behind them are told apart, the first ones of each
    output: the end, which bounds a pass too, is mostly certain.
    """
    means = [
        each.unfold(0, depths + 1, 1).mean(-1).numpy() if len(each) > depths else np.zeros(0)
        for each in found
    ]
    limits = np.quantile(np.concatenate(means), [0.25, 0.5, 0.75])
    places = [np.searchsorted(limits, each, side="left") for each in means]
    return [[place == quarter for place in places] for quarter in range(4)]


def write_texts(
    checkpoint: Checkpoint, items: Sequence[EvalItem], temperature: float, max_tokens: int
) -> list[Text]:
    """Let the engine respond to the items."""
    engine = evaluation_engine(checkpoint, items, max_tokens=max_tokens, max_num_seqs=32)
    setting = ONE_TOKEN.sampled(temperature, 0)
    decoded = run_setting(engine, items, setting, max_tokens=max_tokens)
    return [
        Text(item.prompt, each.tokens, temperature, item.index)
        for item, each in zip(items, decoded, strict=True)
    ]


def main(
    model: Annotated[str, typer.Argument(help="Model directory.")],
    data: Annotated[Path, typer.Option(help="Held-out conversations, JSONL.")],
    adapter: Annotated[Path | None, typer.Option(help="Adapter of the model.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Of the outputs.")] = None,
    items: Annotated[int, typer.Option(min=2, help="Conversations.")] = 32,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts of each prefix.")] = 64,
    block_size: Annotated[int, typer.Option(min=1, help="B of a model without masks.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an output.")] = 160,
) -> None:
    """Print what each drafter gives at each temperature, by quartile of the model's entropy."""
    checkpoint = read_model(model, adapter, with_calibration=False)
    limit = checkpoint.max_length
    found = read_items([data], checkpoint.tokenizer, max_length=limit, max_items=items)
    loaded = load_weights(checkpoint, dtype=torch.float32)
    target = Target(loaded, checkpoint.special.never_emitted, checkpoint.special.eos)
    known = checkpoint.metadata
    mask, depths = (known.mask_token_id, known.block_size) if known else (None, block_size)
    for each in temperature or [0.0, 0.7, 1.0]:
        texts, tallies = (
            write_texts(checkpoint, found, each, max_tokens),
            defaultdict[str, Tally](Tally),
        )
        with progress_display() as display:
            for number, text in enumerate(texts):
                display.update(f"temperature {each:g}", number, len(texts), "outputs")
                drafts = all_drafts(
                    target, text, depths=depths, rollouts=rollouts, mask_token_id=mask
                )
                for name, tokens in drafts.items():
                    tallies[name].add(tokens, text)
        own = [entropies(target, text) for text in texts]
        print(f"\nTemperature {each:g}, B = {depths}, {len(texts)} outputs:", end=" ")
        print(f"{torch.cat(own).mean():.3f} nats a token, {sum(map(len, own))} tokens\n")
        print("| drafter | tokens a pass |", *(f" quartile {n} |" for n in range(1, 5)), sep="")
        print("| --- |" + " ---: |" * 5)
        for name, tally in tallies.items():
            print("|", " | ".join([name, *tally.cells(quartiles(own, depths))]), "|")


if __name__ == "__main__":
    typer.run(main)
