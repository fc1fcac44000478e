"""Makes the documentation's table of families, from a tiny random checkpoint of each.

``make families`` runs this module.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from decoding.engines import output_of, run
from decoding.families import family_config
from decoding.watched_engine import Watch, crowd
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.weights import add_mask_token, load_model, save_checkpoint
from mars_platform.errors import UserError, one_line
from mars_platform.mixing.probe import Probe
from mars_serve.cli.doctor.libraries import torch_findings
from mars_serve.engine.engine import Engine
from mars_serve.engine.settings import EngineSettings
from mars_train.method.objective import Objective
from marsray_docs.families import FILE, RIGHT
from plain_paths import expected_losses, losses, packed_rows

_TOLERANCE = 1e-3
"""Largest relative error; families with states are themselves up to 2e-4 off in float32."""
_MOST_WEIGHTS = 20_000_000


def verdicts(family: str, folder: Path) -> dict[str, str]:
    """Return what becomes of a tiny model of a family, whose checkpoint is written to a folder."""
    try:
        model = _tiny(family)
        _write(model, folder)
        model(input_ids=torch.arange(4, 28)[None], use_cache=False)
    except Exception as error:  # transformers' own code may raise anything
        return {"built": f"{type(error).__name__}: {one_line(error)}"}
    found = {each.check: each.found for each in torch_findings(folder)}
    return {
        "built": RIGHT,
        "layers": found.get("layers", ""),
        "served": _verdict(served, model, folder),
        "trained": _verdict(trained, model, folder),
    }


def served(model: PreTrainedModel, folder: Path) -> str:
    """Compare every position that an engine computes, in all modes, with plain passes."""
    settings = EngineSettings(
        page_size=4, num_pages=20, max_num_seqs=4, max_num_batched_tokens=65, num_lookup_drafts=4
    )
    engine = Engine(read_checkpoint(folder), settings)
    watch, requests = Watch(engine, model), crowd(ignore_eos=True)
    run(engine, requests, at_once=6)
    assert all(len(output_of(each)) == each.options.max_tokens for each in requests)
    return RIGHT if watch.worst < _TOLERANCE else f"wrong: logits differ by {watch.worst:.2g}"


def trained(model: PreTrainedModel, folder: Path) -> str:
    """Compare the loss at every slot of packed rows with those of plain passes."""
    checkpoint, own = read_checkpoint(folder), load_model(folder)
    assert checkpoint.metadata is not None
    mask = checkpoint.metadata.mask_token_id
    probe = Probe.of(own, avoided={mask})
    objective = Objective(own, masked=True)
    probe.check("in packed rows", partial(objective.clean_logits, probe.tokens, 4, mask))
    batch = packed_rows(mask)
    expected = expected_losses(model, batch)
    error = float(((losses(objective, batch) - expected).abs() / expected.clamp(min=1)).max())
    return RIGHT if error < _TOLERANCE else f"wrong: losses differ by {error:.2g}"


def _verdict(
    judge: Callable[[PreTrainedModel, Path], str], model: PreTrainedModel, folder: Path
) -> str:
    try:
        return judge(model, folder)
    except UserError as error:
        told = str(error).replace(str(folder), "the checkpoint")
        reason = told.rpartition("; ")[0] or told
        return "refused: " + (reason.partition(", and ")[2] or reason)
    except Exception as error:
        return f"crash: {type(error).__name__}: {one_line(error)}"


def _tiny(family: str) -> PreTrainedModel:
    config = family_config(family, window=8)
    with torch.device("meta"):
        num = AutoModelForCausalLM.from_config(config).num_parameters()
    assert num <= _MOST_WEIGHTS, f"its smallest model has {num:,} weights"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "sink" in name or not weight.any():  # what does nothing would hide what is left out
            torch.nn.init.normal_(weight, std=0.3)
    return model


def _write(model: PreTrainedModel, folder: Path) -> None:
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(60)}, "t1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0")  # noqa: S106
    mask, _ = add_mask_token(model, tokenizer)
    save_checkpoint(folder, model, tokenizer, MarsMetadata(block_size=4, mask_token_id=mask))


def main(*families: str) -> None:
    """Judge the families, or all, and write what is found to the table's file."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    table = json.loads(FILE.read_text(encoding="utf-8")) if families else {"families": {}}
    table |= {
        "date": date.today().isoformat(),
        **{name: version(name) for name in ("transformers", "torch")},
    }
    for family in families or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            table["families"][family] = verdicts(family, Path(folder))
        sys.stderr.write(f"{family}: {table['families'][family]}\n")
        FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
