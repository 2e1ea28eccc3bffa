"""`CachePolicy`: sizes, the printed table, the file and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

import regard
from regard.policy import FULL, CachePolicy
from regard.policy.files import MAX_BYTES

ABOUT = {"model": {"name": "toy"}, "num_heads": 4, "head_dim": 16, "value_dim": 8, "bytes_per_number": 2}


@pytest.fixture
def policy() -> CachePolicy:
    windows = np.array([[FULL, 8], [3, FULL]])
    return CachePolicy(windows, np.array([[4, 4], [0, 2]]), ("layers.0", "layers.1"), ABOUT)


@pytest.mark.parametrize("length", [0, 1, 3, 11, 12, 13, 1000])
def test_bytes_are_those_of_the_keys_that_the_masks_allow(policy, length):
    keys = 0
    for window, sinks in zip(policy.windows.ravel(), policy.sinks.ravel(), strict=True):
        mask = regard.causal()
        if window != FULL:
            mask = mask & (regard.masks.first(int(sinks)) | regard.sliding_window(int(window)))
        keys += int(mask.to_dense(length, length)[-1].sum()) if length else 0
    assert policy.keys(length).sum() == keys
    assert policy.num_bytes(length) == keys * (16 + 8) * 2
    assert policy.savings(length) == pytest.approx(1 - keys / (4 * length) if length else 1.0 - 0.0)


def test_a_full_head_has_no_sinks_and_arrays_are_read_only(policy):
    assert policy.sinks.tolist() == [[0, 4], [0, 0]]
    assert not policy.windows.flags.writeable
    assert (policy.num_layers, policy.num_kv_heads, policy.num_heads) == (2, 2, 4)


def test_it_prints_as_a_table(policy):
    text = str(policy)
    assert "2 layers × 2 kv heads: 2 full, 2 with a window" in text
    assert text.splitlines()[2].split()[:4] == ["0", "layers.0", "full", "8"]
    assert "layers.1" in policy._repr_html_() and "3 full" in policy._repr_html_()
    assert "bytes at 64" in policy.table(64).columns


def test_it_draws_layers_by_heads(policy):
    pytest.importorskip("matplotlib")
    ax = policy.plot()
    cells = ax.images[0].get_array()
    assert cells.mask.tolist() == [[True, False], [False, True]]
    assert cells.compressed().tolist() == [8, 3]
    assert "every key" in ax.get_xlabel()


def test_a_saved_policy_is_read_back_equal(policy, tmp_path):
    path = policy.save(tmp_path / "policy.json")
    assert CachePolicy.load(path) == policy
    assert list(tmp_path.iterdir()) == [path]
    changed = CachePolicy(policy.windows, policy.sinks + 1, policy.layers, policy.about)
    assert changed != policy


@pytest.mark.parametrize(
    ("windows", "sinks", "layers", "words"),
    [
        ([[0]], [[0]], ["a"], "a window of 0"),
        ([[-2]], [[0]], ["a"], "a window of -2"),
        ([[1]], [[-1]], ["a"], "-1 sinks"),
        ([[1, 2]], [[1]], ["a"], "sinks of shape"),
        ([[1.5]], [[1]], ["a"], "integers"),
        ([[1], [1]], [[1], [1]], ["a"], "1 layers"),
        ([[1], [1, 2]], [[1], [1]], ["a", "b"], "integers"),
        ([[1]], [[1]], [3], "names of layers"),
    ],
)
def test_invalid_policies_are_refused(windows, sinks, layers, words):
    with pytest.raises(regard.ArgumentError, match=words):
        CachePolicy(windows, sinks, layers)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"num_heads": 3}, "3 query heads for 2 kv heads"),
        ({"num_heads": 0}, "a num_heads that is not a positive integer"),
        ({"head_dim": "64"}, "a head_dim that is not a positive integer"),
        ({"bytes_per_number": 0.5}, "a bytes_per_number that is not"),
    ],
)
def test_sizes_that_a_model_cannot_have_are_refused(about, words, tmp_path):
    with pytest.raises(regard.ArgumentError, match=f"CachePolicy: received about with {words}"):
        CachePolicy([[4, 2]], [[0, 0]], ["a"], about)
    path = CachePolicy([[4, 2]], [[0, 0]], ["a"]).save(tmp_path / "policy.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"about": about}))
    with pytest.raises(regard.ArgumentError, match=words):
        CachePolicy.load(path)


@pytest.mark.parametrize("method", ["keys", "num_bytes", "savings", "table", "summary"])
def test_a_negative_length_is_refused(method, policy):
    with pytest.raises(
        regard.ArgumentError, match=r"^policy: received context_length -1; expected 0 or more"
    ):
        getattr(policy, method)(-1)


def test_bytes_need_the_size_of_a_key():
    policy = CachePolicy([[4]], [[0]], ["a"])
    assert policy.savings(8) == 0.5 and "bytes" not in str(policy)
    with pytest.raises(regard.ArgumentError, match="head_dim"):
        policy.num_bytes(8)


HOSTILE = {
    "nothing": b"",
    "not text": b"\xff\xfe\x00",
    "another document": b"[1, 2]",
    "deep nesting": b"[" * 200_000,
    "too large": b" " * (MAX_BYTES + 1),
}
CHANGES = {
    "another format": {"format": "torch"},
    "another version": {"version": 2},
    "a version that is true": {"version": True},
    "no layers": {"layers": []},
    "layers as a dict": {"layers": {"0": 1}},
    "about as a list": {"about": []},
    "a negative head size": {"about": {"head_dim": -64, "bytes_per_number": 2}},
    "a float head size": {"about": {"head_dim": 1e308, "bytes_per_number": 2}},
    "heads that do not divide": {"about": {"num_heads": 3}},
    "a number that is not finite": {"about": {"x": float("nan")}},
    "a name that is a number": {"layers": [{"name": 1, "windows": [1, 1], "sinks": [1, 1]}]},
    "a window of zero": {"layers": [{"name": "a", "windows": [0, 1], "sinks": [1, 1]}]},
    "a window that is huge": {"layers": [{"name": "a", "windows": [10**30, 1], "sinks": [1, 1]}]},
    "a window that is true": {"layers": [{"name": "a", "windows": [True, 1], "sinks": [1, 1]}]},
    "a sink that is null": {"layers": [{"name": "a", "windows": [1, 1], "sinks": [None, 1]}]},
    "rows of several lengths": {"layers": [{"name": "a", "windows": [1, 1], "sinks": [1]}]},
}


@pytest.mark.parametrize("name", [*HOSTILE, *CHANGES])
def test_hostile_files_are_refused_with_a_hint(policy, tmp_path, name):
    path = policy.save(tmp_path / "policy.json")
    record = json.loads(path.read_text())
    path.write_bytes(HOSTILE[name] if name in HOSTILE else json.dumps(record | CHANGES[name]).encode())
    with pytest.raises(regard.ArgumentError) as caught:
        CachePolicy.load(path)
    assert caught.value.operation == "CachePolicy.load" and caught.value.hint
    assert len(str(caught.value)) < 400
