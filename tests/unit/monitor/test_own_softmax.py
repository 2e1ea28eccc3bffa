"""Layers that compute their own softmax: every column is that of the scores they computed."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import regard
from regard.interventions import ablate
from regard.monitor import DeadHead, EntropyCollapse, Monitor, NonFinite, ScoreGrowth, qk_clip

# DeBERTa uses torch.jit.script when its file is imported. The category depends on the versions of torch and Python.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*torch.jit.script:{category}")
    for category in ("DeprecationWarning", "FutureWarning")
]

WIDTH, HEADS, N = 32, 4, 19


def weigh(scores: Tensor) -> Tensor:
    return F.softmax(scores, -1)


class Attention(nn.Module):
    """Causal attention as nanoGPT computes it without a fused kernel.

    Args:
        softmax: From scores to weights.
        fill: The score of a masked key.
    """

    def __init__(self, softmax: Callable[[Tensor], Tensor] = weigh, fill: float = -math.inf) -> None:
        super().__init__()
        self.n_head = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.softmax, self.fill = softmax, fill

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        scores = query @ key.mT / math.sqrt(key.shape[-1])
        n = scores.shape[-1]
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), self.fill)
        return self.out((self.softmax(scores) @ value).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, scale: float = 1.0, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Attention(**options) for _ in range(2))
        with torch.no_grad():
            for layer in self.layers:
                layer.qkv.weight[: 2 * WIDTH] *= scale

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def scores_from_projections(model: Model, batches: list[Tensor]) -> list[Tensor]:
    """Compute the scores of each layer in float64 from the output of its projection: (batch, heads, n, n)."""
    found: list[list[Tensor]] = [[] for _ in model.layers]
    hooks = [
        layer.qkv.register_forward_hook(lambda _, args, output, parts=parts: parts.append(output.detach()))
        for layer, parts in zip(model.layers, found, strict=True)
    ]
    for batch in batches:
        model(batch)
    for hook in hooks:
        hook.remove()
    result = []
    for parts in found:
        query, key, _ = torch.cat(parts).double().unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(WIDTH // HEADS)
        result.append(scores.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), -math.inf))
    return result


def expected_columns(scores: Tensor, head: int, rows: Tensor | None = None) -> dict[str, float]:
    """Compute the columns of one head from its scores, (batch, heads, n, n), over the rows that are tokens."""
    rows = torch.ones(scores.shape[0], scores.shape[2], dtype=torch.bool) if rows is None else rows
    first = rows.int().argmax(-1)  # the first token
    scores, weights = scores[:, head], scores[:, head].softmax(-1)
    on_first = weights.gather(-1, first[:, None, None].expand(*weights.shape[:2], 1))[..., 0]
    entropy = torch.special.entr(weights).sum(-1)[rows]
    largest, on_first, most = scores.amax(-1)[rows], on_first[rows], weights.amax(-1)[rows]
    return {
        "max_score": largest.max().item(),
        "max_score_mean": largest.mean().item(),
        "entropy": entropy.mean().item(),
        "entropy_min": entropy.min().item(),
        "first": on_first.mean().item(),
        "first_max": on_first.max().item(),
        "saturated": (most > 0.99).double().mean().item(),
        "rows": int(rows.sum()),
        "nonfinite": 0,
    }


def assert_columns(row: dict[str, Any], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=2e-5, abs=2e-5), (row["module"], row["head"], name)


@pytest.mark.parametrize(
    "scale", [1.0, 20.0]
)  # the scores of 20 are so large that most weights are exactly 0
@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_scores_are_those_of_the_projections(fill: float, scale: float) -> None:
    batches = [torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    plain, model = Model(scale, fill=fill), Model(scale, fill=fill)
    expected = scores_from_projections(model, batches)
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        outputs = [model(batch) for batch in batches]  # gradient accumulation
        monitor.step()
    assert all(torch.equal(output, plain(batch)) for output, batch in zip(outputs, batches, strict=True))
    assert len(monitor.history) == 2 * HEADS
    for row in monitor.history:
        assert_columns(row, expected_columns(expected[row["layer"]], row["head"]))
    assert (max(monitor.history.column("max_score")) > 100) == (scale > 1)


def test_alarms_of_scores_fire_and_qk_clip_clips() -> None:
    model, batch = Model(), torch.randn(2, N, WIDTH)
    with torch.no_grad():
        model.layers[0].qkv.weight[8:16] *= 900  # the query of head 1
    rules = [ScoreGrowth(), EntropyCollapse()]
    with Monitor(model, every=1, alarms=rules, optimizer=None, on_alarm=lambda _: None) as monitor:
        model(batch)
        monitor.step()
    (alarm, *_) = monitor.raised
    assert (alarm.kind, alarm.module, alarm.head) == ("score growth", "layers.0", 1)


class MaskedAttention(nn.Module):
    """Attention whose mask the caller gives; its input is query, key and value."""

    def __init__(self, fill: float, is_added: bool) -> None:
        super().__init__()
        self.fill, self.is_added = fill, is_added

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        scores = x @ x.mT
        if self.is_added:
            scores = scores + torch.zeros(visible.shape, dtype=x.dtype).masked_fill(~visible, self.fill)
        else:
            scores = scores.masked_fill(~visible, self.fill)
        return weigh(scores) @ x


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("kind", ["causal, padding first", "padded queries masked"])
def test_rows_that_are_masked_altogether_are_padding(kind: str, fill: float, is_added: bool) -> None:
    x = torch.randn(2, HEADS, N, 8, generator=torch.Generator().manual_seed(2))
    is_token = torch.arange(N) >= torch.tensor([[0], [7]])
    visible = is_token[:, None, None, :]
    if kind == "causal, padding first":
        visible = visible & torch.ones(N, N, dtype=torch.bool).tril()
    else:
        visible = visible & is_token[:, None, :, None]
    model = MaskedAttention(fill, is_added)
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        model(x, visible)
        monitor.step()
    scores = (x.double() @ x.double().mT).masked_fill(~visible, -math.inf)
    for row in monitor.history:
        # A row of NaN is padding: `expected_columns` leaves it out.
        assert_columns(row, expected_columns(scores, row["head"], is_token))


class GroupedAttention(nn.Module):
    """Grouped heads on two axes, (batch, kv_heads, heads of each, …), as many layers compute them."""

    def __init__(self, num_heads: int, way: str) -> None:
        super().__init__()
        self.num_heads, self.way = num_heads, way

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        if self.way == "einsum":
            weights = weigh(torch.einsum("bkgid,bkjd->bkgij", query, key))
            return torch.einsum("bkgij,bkjd->bkgid", weights, key)
        key = key[:, :, None]
        key = key.expand(-1, -1, query.shape[2], -1, -1) if self.way == "expand" else key
        return weigh(query @ key.mT) @ key


@pytest.mark.parametrize("way", ["einsum", "matmul", "expand"])
@pytest.mark.parametrize(
    "batch, kv_heads, group", [(5, 2, 3), (6, 2, 3), (2, 3, 2), (4, 2, 2), (3, 4, 1), (3, 1, 4)]
)
def test_heads_on_two_axes_have_one_row_each(batch: int, kv_heads: int, group: int, way: str) -> None:
    draw = torch.Generator().manual_seed(1)
    query = 3 * torch.randn(batch, kv_heads, group, N, 8, generator=draw)
    key = torch.randn(batch, kv_heads, N, 8, generator=draw)
    model = GroupedAttention(kv_heads * group, way)
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        model(query, key)
        monitor.step()
    scores = query.double().flatten(1, 2) @ key.double().repeat_interleave(group, 1).mT
    assert monitor.history.column("head") == list(range(kv_heads * group))
    for row in monitor.history:
        assert_columns(row, expected_columns(scores, row["head"]))


@pytest.mark.parametrize("way", ["matmul", "expand"])
def test_an_edit_of_heads_on_two_axes_changes_that_head(way: str) -> None:
    query, key = torch.randn(4, 2, 2, N, 8), torch.randn(4, 2, N, 8)
    model = GroupedAttention(4, way)
    expected = model(query, key)
    expected[:, 1, 0] = 0.0
    with regard.intervene(model, ablate(heads=2)):
        assert torch.equal(model(query, key), expected)


def test_scores_that_are_all_low_are_no_mask() -> None:
    x = 100 * torch.randn(2, HEADS, N, 8, generator=torch.Generator().manual_seed(2)).abs()

    class Repelling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return weigh(-x @ x.mT) @ x

    model = Repelling()
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        model(x)
        monitor.step()
    largest = (-x.double() @ x.double().mT).amax(-1)
    assert largest.max() < -5000
    for row in monitor.history:
        assert row["rows"] == 2 * N
        assert row["max_score_mean"] == pytest.approx(largest[:, row["head"]].mean().item(), rel=1e-5)


class SoftmaxInputs(TorchFunctionMode):
    """Record what `F.softmax` is called with, over the last axis of four."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.softmax and args[0].ndim == 4:
            self.scores.append(args[0].detach().double())
        return func(*args, **(kwargs or {}))


DEBERTA = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
}  # fmt: skip
NEO = {"vocab_size": 99, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
SIZES = {"vocab_size": 99, "n_layer": 2, "n_head": 4}
FAMILIES = {
    "Bloom": {**SIZES, "hidden_size": 32},
    "GPTJ": {**SIZES, "n_embd": 32, "n_positions": 64, "rotary_dim": 8},
    "Mpt": {"vocab_size": 99, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "GPTNeo": {**NEO, "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
    "CodeGen": {**SIZES, "n_embd": 32, "rotary_dim": 4, "n_ctx": 64, "n_positions": 64},
    "DebertaV2": DEBERTA,
}


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family: str, padding: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"(query|key|q_proj|k_proj|qkv).*weight", name):
                parameter.mul_(60)
    tokens = torch.randint(3, 90, (2, 13), generator=torch.Generator().manual_seed(1))
    is_token = torch.ones_like(tokens)
    if padding is not None:
        is_token[1, slice(None, 4) if padding == "left" else slice(9, None)] = 0
    inputs = {"input_ids": tokens, "attention_mask": is_token}
    model.train()  # with dropout
    torch.manual_seed(4)
    with SoftmaxInputs() as mode, torch.no_grad():
        model(**inputs)
    torch.manual_seed(4)
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor, torch.no_grad():
        model(**inputs)
        monitor.step()
    assert len(mode.scores) == 2 and len(monitor.history) == 2 * 4
    for row in monitor.history:
        scores = mode.scores[row["layer"]]
        scores = scores.masked_fill(scores < -1e30, -math.inf)
        assert_columns(row, expected_columns(scores, row["head"], is_token.bool()))
    assert max(monitor.history.column("max_score")) > 100


def exponentiate(scores: Tensor) -> Tensor:
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    return exponentials / exponentials.sum(-1, keepdim=True)


HIDDEN = {
    "exponential": exponentiate,
    "largest of each row subtracted": lambda scores: weigh(scores - scores.amax(-1, keepdim=True)),
    "largest of all subtracted": lambda scores: weigh(scores - scores.amax()),
    "weights multiplied": lambda scores: weigh(scores) * 0.5,
    "weights multiplied in place": lambda scores: weigh(scores).mul_(0.5),
}


@pytest.mark.parametrize("way", HIDDEN)
def test_scores_that_are_not_known_are_nan_with_one_warning(way: str) -> None:
    model, batch = Model(20.0, softmax=HIDDEN[way]), torch.randn(2, N, WIDTH)
    alarms: list[Any] = []
    rules = [ScoreGrowth(), DeadHead(share=0.05), NonFinite()]
    with (
        Monitor(model, every=1, alarms=rules, optimizer=None, on_alarm=alarms.append) as monitor,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            model(batch)
            monitor.step()
    assert len([item for item in caught if "'layers.0' are unknown" in str(item.message)]) == 1
    expected = scores_from_projections(model, [batch])
    for row in monitor.history:
        assert math.isnan(row["max_score"]) and math.isnan(row["max_score_mean"]) and not row["nonfinite"]
        if "multiplied" not in way:
            columns = expected_columns(expected[row["layer"]], row["head"])
            columns = {name: value for name, value in columns.items() if not name.startswith("max_score")}
            assert_columns(row, columns)
    assert {alarm.kind for alarm in alarms} == {"dead head"}
    with pytest.raises(ValueError, match="not known"):
        qk_clip(model, monitor, 30.0)


KNOWN = {
    "float64 inside": lambda scores: scores.double().softmax(-1).to(scores.dtype),
    "nan_to_num": lambda scores: torch.nan_to_num(weigh(scores)),
    "merged heads": lambda scores: weigh(scores.flatten(0, 1)).view(scores.shape),
    "keys first": lambda scores: scores.permute(3, 0, 1, 2).softmax(0).permute(1, 2, 3, 0),
    "sink": lambda scores: weigh(F.pad(scores, (0, 1), value=150.0))[..., :-1],
    "constant": lambda scores: weigh(scores * 0),
}


@pytest.mark.parametrize("way", KNOWN)
def test_scores_are_followed_through_other_layouts(way: str) -> None:
    fill = -1e30 if way == "constant" else -math.inf
    model, batch = Model(20.0, softmax=KNOWN[way], fill=fill), torch.randn(2, N, WIDTH)
    expected = scores_from_projections(model, [batch])
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        model(batch)
        monitor.step()
    for row in monitor.history:
        largest = expected[row["layer"]][:, row["head"]].max().item()
        assert largest > 150  # the score of the sink does not count
        assert row["max_score"] == pytest.approx(0.0 if way == "constant" else largest)


def test_a_recording_of_large_scores_loses_no_rows() -> None:
    model, batch = Model(20.0), torch.randn(2, N, WIDTH)
    (scores, _) = scores_from_projections(model, [batch])
    with regard.watch(model) as recording:
        model(batch)
    assert recording.calls("layers.0")[0].mask == regard.causal()
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1).mean((0, 2))
    found = [row["entropy"] for row in recording.heads() if row["layer"] == 0]
    assert found == pytest.approx(entropy.tolist(), abs=2e-5)
