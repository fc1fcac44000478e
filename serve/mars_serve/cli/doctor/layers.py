"""Says what a model's layers ask of attention, and what that costs and allows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint.adapter.layers import resolve_targets
from mars_platform.checkpoint.adapter.settings import AdapterSettings
from mars_platform.errors import UserError
from mars_platform.mixing.specs import AttentionSpec, LayerSpecs
from mars_serve.cli.doctor.finding import Finding
from mars_serve.engine.attention.interface import group_layers
from mars_serve.engine.settings import EngineSettings
from mars_serve.engine.states.slots import slot_bytes


@dataclass(frozen=True)
class Kind:
    """Layers of equal sizes whose queries see equally far back."""

    reach: str
    """Words that say how far back a query of these layers sees."""
    layers: list[int]
    sizes: str
    """Heads and their numbers, in words."""
    features: dict[str, int]
    """Number of layers with each further trait, by its name."""
    cache_bytes: int
    """Bytes of a token's keys and values in all of these layers."""

    def __str__(self) -> str:
        features = [
            words if count == len(self.layers) else f"{words} in {count}"
            for words, count in self.features.items()
        ]
        return f"{len(self.layers)} {self.reach}: {', '.join([self.sizes, *features])}"


def kinds(specs: Sequence[AttentionSpec], max_length: int, dtype: torch.dtype) -> list[Kind]:
    """Return the kinds of a model's layers in texts of up to ``max_length`` tokens."""
    specs = [spec.within(max_length) for spec in specs]
    groups, places = group_layers(specs)
    found = list[Kind]()
    for index, group in enumerate(groups):
        own = [spec for spec in specs if places[spec.layer].group == index]
        features = Counter(name for spec in own for name in _features(spec))
        found.append(
            Kind(
                _reach(own[0]),
                [spec.layer for spec in own],
                _sizes(own[0]),
                dict(features),
                group.elements_per_token * dtype.itemsize,
            )
        )
    return found


def findings(
    specs: Sequence[AttentionSpec], max_length: int, dtype: torch.dtype
) -> Iterator[Finding]:
    """Say how the layers attend, and what a token takes in the cache."""
    found = kinds(specs, max_length, dtype)
    facts = {"kinds": [asdict(each) for each in found]}
    yield Finding("layers", "ok", "; ".join(map(str, found)), facts=facts)
    total = sum(each.cache_bytes for each in found)
    parts = ", ".join(f"{each.cache_bytes / 1024:,.1f} {each.reach}" for each in found)
    text = f"{total / 1024:,.1f} KiB a token in {str(dtype).removeprefix('torch.')}"
    yield Finding("cache", "ok", text + (f" ({parts})" if len(found) > 1 else ""))


def states(layers: LayerSpecs, block_size: int, dtype: torch.dtype) -> Iterator[Finding]:
    """Say what the states of recurrent layers take, if there are any."""
    sizes = layers.scans, layers.convolutions
    mib = slot_bytes(*sizes, num_drafts=block_size, dtype=dtype) / 2**20
    if mib:
        engine = EngineSettings()
        num, rows, kept = engine.num_state_slots, engine.max_num_seqs, engine.num_state_snapshots
        text = f"{len(sizes[0])} layers with states and {len(sizes[1])} with convolutions take "
        text += f"{mib:,.2f} MiB a slot, {num * mib / 1024:,.2f} GiB with two slots for each of "
        yield Finding("states", "ok", f"{text}{rows} requests and {kept} snapshots for prefixes")


def works(model: PreTrainedModel, *, has_masks: bool) -> Finding:
    """Say what of marsray works with a model that is served; only a MARS one ``has_masks``."""
    modes = "modes ar, exact and threshold" if has_masks else "mode ar, and in all once trained"
    text = f"served in {modes}, with prefix caching; trained, "
    try:
        names = resolve_targets(model, AdapterSettings())
        text += f"as a whole or by an adapter of {', '.join(names)}"
    except UserError:
        text += "as a whole, since an adapter takes linear layers and it has none"
    return Finding("works", "ok", text)


def _features(spec: AttentionSpec) -> Iterator[str]:
    names = {
        "capped scores": spec.softcap is not None,
        "sinks": spec.has_sinks,
        "queries scaled by their positions": spec.temperature is not None,
        "latents": spec.value_in_key,
        "the keys of others": spec.shares is not None,
    }
    yield from (name for name, is_there in names.items() if is_there)


def _reach(spec: AttentionSpec) -> str:
    if spec.window is not None:
        return f"with a window of {spec.window:,}"
    return "full" if spec.chunk is None else f"within chunks of {spec.chunk:,}"


def _sizes(spec: AttentionSpec) -> str:
    values = "" if spec.key_dim == spec.value_dim else f" and {spec.value_dim}"
    return f"{spec.heads} heads over {spec.kv_heads} of {spec.key_dim}{values} numbers"
