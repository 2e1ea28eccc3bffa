"""The rows of live requests, measured while blocks are chunked, preempted, freed and reused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from regard.vllm.settings import Settings
from regard.vllm.worker import StepReader
from tests.helpers.served_stand_in import DIM, HEADS, StandIn, compute_dense

KINDS: list[dict[str, Any]] = [
    {},
    {"window": 11},
    {"window": 11, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"logits_soft_cap": 2.0},
    {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    {},
]


def check(
    stand_in: StandIn, draws: dict[str, Any], kinds: list[dict[str, Any]], tokens: dict[str, int]
) -> None:
    results = stand_in.run()
    assert results.keys() == draws.keys()
    for name, (record, rows) in results.items():
        assert record["kind"] == "request", record
        prompt, count = record["prompt_tokens"], tokens[name]
        assert record["generated_tokens"] == record["measured_tokens"] == count
        stop = prompt + count - 1
        shares = []
        for layer, kind in enumerate(kinds):
            dense = compute_dense(draws[name][layer], kind, stop).numpy()
            positions = rows[f"positions_{layer}"]
            np.testing.assert_array_equal(positions[positions >= prompt - 1], np.arange(prompt - 1, stop))
            own = dense[:, positions]
            wanted = np.stack(
                [own[..., :2].sum(-1), own[..., 2:prompt].sum(-1), own[..., prompt:].sum(-1)], -1
            )
            np.testing.assert_allclose(rows[f"shares_{layer}"], wanted, atol=2e-6)
            np.testing.assert_allclose(rows[f"numbers_{layer}"][..., 1], own[..., 0], atol=2e-6)
            stored = np.zeros((HEADS, len(positions), stop + 1))
            np.put_along_axis(stored, rows[f"top_keys_{layer}"], rows[f"top_values_{layer}"], -1)
            np.testing.assert_allclose(stored[..., :stop], own, atol=2e-6)
            answer = positions >= prompt - 1
            np.testing.assert_allclose(record["heads"]["shares"][layer], wanted[:, answer].mean(1), atol=2e-6)
            shares.append(wanted[:, answer])
        np.testing.assert_allclose(record["tokens"]["shares"], np.mean(shares, (0, 1)), atol=2e-6)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keeps_batch", [True, False], ids=["V1 runner", "V2 runner"])
def test_every_row_is_measured_once_and_right(seed: int, keeps_batch: bool) -> None:
    ahead = seed % 2 == 1
    stand_in = StandIn(
        Settings(keep=True, topk=200, prompt=seed % 3 == 0),
        KINDS,
        blocks=30,
        keeps_batch=keeps_batch,
        ahead=ahead,
        seed=seed,
    )
    tokens = {}
    for number, (prompt, count) in enumerate([(3, 40), (20, 9), (57, 30), (8, 1), (31, 60), (16, 17)]):
        name = f"request{number}"
        stand_in.add(name, prompt, count, cached=8 if number == 2 else 0, regard={"spans": {"a": [0, 2]}})
        tokens[name] = count
    draws = {name: request.draw for name, request in stand_in.requests.items()}
    check(stand_in, draws, KINDS, tokens)
    assert stand_in.measurements.counts == {"seen": 6, "asked": 6, "measured": 6, "failed": 0}


def test_a_layer_that_skips_rows_fails_the_record() -> None:
    """Otherwise, a row that is read by its place in the batch could be that of another request."""
    stand_in = StandIn(Settings(), [{}])
    stand_in.add("request", 12, 5, regard={})
    stand_in._step()
    step = StepReader(stand_in.measurements, {"request": range(12, 15)}, {"request": 3})
    with pytest.raises(RuntimeError, match="2 rows of 3"):
        step.read(0, torch.zeros(2, HEADS, DIM))


def test_a_request_that_cannot_begin_stops_no_other() -> None:
    stand_in = StandIn(Settings(rate=1.0), [{}])
    for name in ("first", "\ud800", "last"):
        stand_in.add(name, 12, 20)
    describe = stand_in._describe

    def describe_without_blocks(request: Any) -> Any:
        entry = describe(request)
        if request.name == "last":
            entry.block_ids = None
        return entry

    stand_in._describe = describe_without_blocks
    results = stand_in.run()
    assert [results[name][0]["kind"] for name in ("first", "\ud800", "last")] == [
        "request",
        "request",
        "failed",
    ]
    assert stand_in.measurements.counts == {"seen": 3, "asked": 3, "measured": 2, "failed": 1}
