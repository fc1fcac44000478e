"""The reference of model families says what happens to a model of each."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from decoding.family_table import verdicts
from marsray_docs.families import FILE, RIGHT, page

FOUND = json.loads(FILE.read_text(encoding="utf-8"))
FAMILIES = FOUND["families"]
QUICK = ("gemma4_text", "gpt2", "lfm2", "longcat_flash")
"""Families that every run tries; the full run tries all."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[] if each in QUICK else pytest.mark.full) for each in FAMILIES],
)
@pytest.mark.filterwarnings("ignore")  # transformers warns of many a family
def test_the_table_says_what_happens_to_a_family(family: str, tmp_path: Path) -> None:
    assert verdicts(family, tmp_path) == FAMILIES[family]


def test_no_family_is_served_or_trained_wrongly() -> None:
    ends = {
        each[way].partition(":")[0]
        for each in FAMILIES.values()
        if each["built"] == RIGHT
        for way in ("served", "trained")
    }
    assert ends == {RIGHT, "refused"}


@pytest.mark.skipif(FOUND["transformers"] != version("transformers"), reason="another transformers")
def test_every_causal_family_of_transformers_is_in_the_table() -> None:
    assert FAMILIES.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    text = page()
    assert all(f"`{family}`" in text for family in FAMILIES)
