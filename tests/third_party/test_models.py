"""Every row of other packages in docs/supported-models.json, checked again with the installed versions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from regard.errors import ArgumentError
from regard.interventions import circuits
from scripts.pages.third_party import check_model
from tests.third_party.models import MODELS

ROWS = json.loads((Path(__file__).parents[2] / "docs/supported-models.json").read_text("utf-8"))["models"]


def count_rows(column: Sequence[str]) -> list[str]:
    """Add up the rows that are corrected and computed again: which of the two depends on the processor's rounding."""

    def total(match: re.Match[str]) -> str:
        return f"{sum(int(number.replace(',', '')) for number in match.groups('0'))} rows"

    rows = r"([\d,]+) rows corrected from the kernel's lse(?:, ([\d,]+) computed again)?"
    return [re.sub(rows, total, text) for text in column]


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_the_row_of_a_model_is_what_it_shows(name):
    found, stored = check_model(name), ROWS[name]
    for column in ("package", "compared"):
        assert found[column] == stored[column], column
    for column in ("watch", "intervene"):
        assert count_rows(found[column]) == count_rows(stored[column]), column
    assert found["watch"][0] in ("captured", "rejected")


def test_circuits_with_an_adapter_are_refused_until_it_is_merged():
    torch.manual_seed(0)
    model, inputs = MODELS["peft.PeftModel, LoRA"].build()
    found = circuits(model.eval(), inputs)
    with pytest.raises(ArgumentError, match="its query is not the output of a linear layer"):
        found.qk(0)
    attention = model.base_model.model.model.layers[0].self_attn
    dense = []
    for layer in (attention.q_proj, attention.k_proj):
        lora = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
        dense.append((layer.base_layer.weight + lora).detach().double().unflatten(0, (-1, 8)).mT)
    query, key = dense[0], dense[1].repeat_interleave(4 // len(dense[1]), 0)
    merged = circuits(model.merge_and_unload(), inputs)
    torch.testing.assert_close(merged.qk(0).to_dense().double(), query @ key.mT, rtol=0, atol=1e-5)
