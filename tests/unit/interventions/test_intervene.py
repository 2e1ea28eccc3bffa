"""`regard.intervene`: what edits select, what they leave alone, how they combine, and what is restored."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import regard  # noqa: E402
from regard.capture.patching import list_patches  # noqa: E402
from regard.capture.record import CaptureOptions  # noqa: E402
from regard.capture.watchers import watched  # noqa: E402
from regard.engines import torch_kernels as kernels  # noqa: E402
from regard.interventions import ablate, edited_rows, knockout, patch, rescore, restrict  # noqa: E402

TOKENS = ["The", " cat", " sat", " on", " the", " mat", "."]


class Attention(nn.Module):
    """Grouped causal attention through SDPA."""

    def __init__(self, heads=4, kv_heads=2, width=32):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, kv_heads * self.dim), nn.Linear(width, kv_heads * self.dim)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (heads, self.dim)).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(attended.transpose(1, 2).flatten(2))


class OwnSoftmax(Attention):
    """The same attention, with a softmax of its own."""

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (heads, self.dim)).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.mT * self.dim**-0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention(), Attention()).eval()


@pytest.fixture
def x():
    return torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))


def run(model, x, *edits, **options):
    with torch.no_grad(), regard.intervene(model, edits, **options) as intervention:
        return model(x), intervention


def attend(model, x, index, edit_weights):
    """Run a model with one layer computed by hand: weights (batch, heads, q_len, kv_len) are edited."""
    for i, layer in enumerate(model):
        if i != index:
            x = layer(x)
            continue
        q, k, v = (
            part(x).unflatten(-1, (heads, layer.dim)).transpose(1, 2)
            for part, heads in ((layer.q, 4), (layer.k, 2), (layer.v, 2))
        )
        scores = q @ k.repeat_interleave(2, 1).mT * layer.dim**-0.5
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -torch.inf)
        weights = edit_weights(scores).nan_to_num(0.0)
        x = x + layer.o((weights @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2))
    return x


def remove(queries, keys, heads, batch=(0, 1)):
    def edit(scores):
        scores = scores.clone()
        for b in batch:
            for h in heads:
                rows = scores[b, h]
                rows[np.ix_(queries, keys)] = -torch.inf
        return scores.softmax(-1)

    return edit


# -- What an edit selects ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers",
    [
        1,
        [1],
        "1",
        ["1"],
        "*1*",
        np.int64(1),
        np.array(1),
        np.array([1]),
        torch.tensor([1]),
        iter([1]),
        range(1, 2),
    ],
)
def test_layers_are_numbers_names_or_patterns(model, x, layers):
    edited, intervention = run(model, x, knockout(layers, heads=2, queries=5, keys=[1, 2]))
    torch.testing.assert_close(edited, attend(model, x, 1, remove([5], [1, 2], [2])), atol=1e-6, rtol=1e-5)
    assert intervention.applied.column("module") == ["1"]


@pytest.mark.parametrize(
    "queries, keys",
    [
        (5, [1, 2]),
        (-2, [-6, -5]),
        (slice(5, 6), slice(1, 3)),
        (np.array([5]), torch.tensor([1, 2])),
        (" mat", ["cat", 2]),
        ([" mat"], [" cat", " sat"]),
    ],
)
def test_positions_are_integers_slices_lists_or_texts(model, x, queries, keys):
    edited, _ = run(model, x, knockout(1, heads=[0, 3], queries=queries, keys=keys), tokens=TOKENS)
    torch.testing.assert_close(edited, attend(model, x, 1, remove([5], [1, 2], [0, 3])), atol=1e-6, rtol=1e-5)


def test_texts_are_looked_up_in_each_batch_entry(model, x):
    tokens = [TOKENS, [TOKENS[i] for i in (0, 5, 2, 3, 4, 1, 6)]]
    edited, _ = run(model, x, knockout(1, heads=1, queries=6, keys=" cat"), tokens=tokens)
    first = attend(model, x, 1, remove([6], [1], [1]))
    second = attend(model, x, 1, remove([6], [5], [1]))
    torch.testing.assert_close(edited, torch.stack([first[0], second[1]]), atol=1e-6, rtol=1e-5)


def test_batch_selects_entries(model, x):
    edited, _ = run(model, x, knockout(1, heads=1, queries=6, keys=[0, 3], batch=1))
    torch.testing.assert_close(
        edited, attend(model, x, 1, remove([6], [0, 3], [1], [1])), atol=1e-6, rtol=1e-5
    )
    assert torch.equal(edited[0], model(x)[0])


def test_a_head_is_edited_without_the_others_of_its_group(model, x):
    with torch.no_grad(), regard.watch(model, values=True) as plain:
        model(x)
    _, intervention = run(model, x, knockout(0, heads=1, queries=6, keys=0), record=True, values=True)
    before, after = plain.calls("0")[0].output, intervention.recording.calls("0")[0].output
    others = [0, 2, 3]
    assert torch.equal(before[:, others], after[:, others])
    assert torch.equal(before[:, 1, :6], after[:, 1, :6])
    assert not torch.equal(before[:, 1, 6], after[:, 1, 6])


# -- Edits that touch nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit",
    [
        knockout(0, queries=2, keys=[4, 5]),  # masked by the model
        knockout(0, heads=[], keys=0),
        knockout(0, queries=slice(0, 3), keys=slice(3, None)),
        restrict(0, mask=regard.causal()),
        restrict(0, mask=regard.sliding_window(7)),
        rescore(0, heads=[], score_mod=regard.softcap(1.0)),
        ablate(0, heads=[]),
    ],
)
def test_edits_that_touch_nothing_leave_outputs_bit_equal(model, x, edit):
    edited, intervention = run(model, x, edit)
    assert torch.equal(edited, model(x))
    assert len(intervention.applied) == 1


@pytest.mark.parametrize("edit", [knockout(0, queries=40, keys=0), ablate(0, queries=20)])
def test_positions_that_no_token_has_leave_outputs_bit_equal(model, x, edit):
    with pytest.warns(UserWarning, match="outside the sequence"):
        edited, intervention = run(model, x, edit)
    assert torch.equal(edited, model(x))
    assert len(intervention.applied) == 1


# -- How edits are computed --------------------------------------------------------------------------------


def test_the_recording_says_which_way_ran():
    torch.manual_seed(0)
    model = nn.Sequential(Attention()).eval()
    x = torch.randn(1, 256, 32) * 0.1
    paths = {}
    for name, edit in {
        "few": knockout(queries=slice(200, 210), keys=[3, 4]),
        "dominant": knockout(queries=slice(1, 3), keys=[0, 1]),
        "many": knockout(queries=slice(100, None), keys=slice(0, 128)),
        "scores": rescore(score_mod=regard.softcap(1.0)),
    }.items():
        _, intervention = run(model, x, edit, record=True)
        (call,) = intervention.recording.calls("0")
        paths[name] = intervention.applied[0]["path"]
        assert call.kernel == f"torch: flash on CPU; {paths[name]}"
    assert paths == {
        "few": "40 rows corrected from the kernel's lse",
        "dominant": "0 rows corrected from the kernel's lse, 8 computed again",
        "many": "624 rows computed again",
        "scores": "through the edited scores",
    }


def test_dominating_keys_are_removed_without_cancellation():
    """Nearly all weight is on the removed key: the difference of two large numbers would be noise."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 300, 16).unbind()
    k[:, :, 7] = 30 * q[:, :, 200] / q[:, :, 200].norm(dim=-1, keepdim=True)

    class Layer(nn.Module):
        def forward(self, value):
            return F.scaled_dot_product_attention(q, k, value, is_causal=True)

    layer = Layer()
    edited, intervention = run(layer, v, knockout(keys=7))
    scores = (q.double() @ k.double().mT / 4).masked_fill(torch.ones(300, 300).triu(1).bool(), -torch.inf)
    assert float(scores.softmax(-1)[:, :, 200, 7].min()) > 0.999
    scores[..., 7] = -torch.inf
    exact = scores.softmax(-1) @ v.double()
    naive = scores.float().softmax(-1) @ v
    assert (edited - exact).abs().max() <= 2 * (naive - exact).abs().max()
    assert "computed again" in intervention.applied[0]["path"] or "mask" in intervention.applied[0]["path"]


def test_a_row_without_keys_becomes_zeros(model, x):
    _, intervention = run(
        model, x, knockout(0, heads=0, queries=3, keys=slice(0, 4)), record=True, values=True
    )
    (call,) = intervention.recording.calls("0")
    assert not call.output[:, 0, 3].any() and not call.matrix[:, 0, 3].any()


# -- Combinations ------------------------------------------------------------------------------------------


def test_edits_of_one_layer_combine(model, x):
    edits = (
        knockout(1, heads=[0, 1], queries=6, keys=[0, 1]),
        knockout(1, heads=1, queries=[5, 6], keys=[1, 2]),
    )
    edited, _ = run(model, x, *edits)

    def by_hand(scores):
        scores = scores.clone()
        scores[:, :2, 6, :2] = -torch.inf
        scores[:, 1, 5:7, 1:3] = -torch.inf
        return scores.softmax(-1)

    torch.testing.assert_close(edited, attend(model, x, 1, by_hand), atol=1e-6, rtol=1e-5)


def test_nested_interventions_and_watches_see_all_edits(model, x):
    inner, outer = (
        knockout(1, heads=1, queries=[5, 6], keys=[1, 2]),
        knockout(1, heads=[0, 1], queries=6, keys=0),
    )
    together, _ = run(model, x, outer, inner)
    with torch.no_grad(), regard.watch(model) as first, regard.intervene(model, outer):
        with regard.watch(model) as second, regard.intervene(model, inner):
            nested = model(x)
        alone = model(x)
    torch.testing.assert_close(nested, together, atol=1e-6, rtol=1e-6)
    assert torch.equal(alone, run(model, x, outer)[0])
    assert second["1"][0, 1, 6, 2] == 0 == second["1"][0, 1, 6, 0]
    assert [float(call.matrix[0, 1, 6, 2]) > 0 for call in first.calls("1")] == [False, True]


def test_a_pattern_replaces_other_changes_of_its_head(model, x):
    with torch.no_grad(), regard.watch(model) as source:
        model(x.flip(1))
    source_weights = source["1"].to_dense()
    edits = patch(1, heads=1, source=source), knockout(1, heads=[1, 2], queries=6, keys=[0, 1])
    edited, intervention = run(model, x, *edits, record=True)

    def by_hand(scores):
        weights = remove([6], [0, 1], [2])(scores)
        weights[:, 1] = source_weights[:, 1]
        return weights

    torch.testing.assert_close(edited, attend(model, x, 1, by_hand), atol=1e-6, rtol=1e-5)
    recorded = intervention.recording["1"].to_dense()
    torch.testing.assert_close(recorded[:, 1], source_weights[:, 1], atol=1e-6, rtol=1e-5)
    assert not recorded[:, 2, 6, :2].any() and recorded[:, 1, 6, :2].all()


def test_other_edits_apply_in_rows_that_the_source_of_a_pattern_lacks(model, x):
    with torch.no_grad(), regard.watch(model) as source:
        model(x.flip(1)[:, :4])
    weights = source["1"].to_dense()
    edits = patch(1, heads=1, source=source), knockout(1, heads=1, queries=[2, 6], keys=[0, 1])
    edited, intervention = run(model, x, *edits, record=True)

    def by_hand(scores):
        own = remove([6], [0, 1], [1])(scores)
        own[:, 1, :4] = F.pad(weights[:, 1], (0, 3))
        return own

    torch.testing.assert_close(edited, attend(model, x, 1, by_hand), atol=1e-6, rtol=1e-5)
    recorded = intervention.recording["1"].to_dense()
    assert recorded[:, 1, 2, :2].all() and not recorded[:, 1, 6, :2].any()


@pytest.mark.parametrize("layer", [Attention, OwnSoftmax])
def test_pattern_and_value_of_a_run_give_its_output(layer, x):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), layer()).eval()
    with torch.no_grad(), regard.watch(model, values=True) as source:
        model(x.flip(1))
    where = {"heads": [1, 3], "source": source}
    both = patch(1, what="pattern", **where), patch(1, what="value", **where)
    output, _ = run(model, x, patch(1, what="output", **where))
    torch.testing.assert_close(run(model, x, *both)[0], output, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(run(model, x, *both[::-1])[0], output, atol=1e-6, rtol=1e-5)


def test_rows_of_a_pattern(model, x):
    with torch.no_grad(), regard.watch(model) as source:
        model(x.flip(1))
    weights = source["0"].to_dense()
    edited, intervention = run(model, x, patch(0, heads=1, source=source, queries=[3, 6]), record=True)

    def by_hand(scores):
        own = scores.softmax(-1)
        own[:, 1, [3, 6]] = weights[:, 1, [3, 6]]
        return own

    torch.testing.assert_close(edited, attend(model, x, 0, by_hand), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(intervention.recording["0"][:, 1, 3], weights[:, 1, 3], atol=1e-6, rtol=1e-5)


def test_rows_of_a_pattern_by_the_text_of_each_batch_entry(model, x):
    tokens = [TOKENS, [TOKENS[i] for i in (0, 5, 2, 3, 4, 1, 6)]]
    with torch.no_grad(), regard.watch(model) as source:
        model(x.flip(1))
    weights = source["0"].to_dense()
    edit = patch(0, heads=1, source=source, queries=[" cat", 3])
    edited, intervention = run(model, x, edit, tokens=tokens, record=True)

    def by_hand(scores):
        own = scores.softmax(-1)
        for entry, rows in enumerate(([1, 3], [5, 3])):
            own[entry, 1, rows] = weights[entry, 1, rows]
        return own

    torch.testing.assert_close(edited, attend(model, x, 0, by_hand), atol=1e-6, rtol=1e-5)
    recorded = intervention.recording["0"].to_dense()
    torch.testing.assert_close(recorded[1, 1, 5], weights[1, 1, 5], atol=1e-6, rtol=1e-5)
    plain = attend(model, x, 0, lambda scores: scores.softmax(-1))
    assert (edited[1, 1:3] - plain[1, 1:3]).abs().max() < 1e-6  # the rows of the other entry's text


@pytest.mark.parametrize("factor", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)])
def test_outputs_are_scaled_by_numbers_of_numpy_and_torch(model, x, factor):
    edited, _ = run(model, x, ablate(np.int32(1), heads=np.array(2), baseline=factor, queries=np.array(3)))
    expected, _ = run(model, x, ablate(1, heads=2, baseline=0.5, queries=3))
    assert torch.equal(edited, expected) and not torch.equal(edited, model(x))
    whole, _ = run(model, x, ablate(1, baseline=np.int64(1)))
    assert torch.equal(whole, run(model, x)[0])


def test_the_mean_of_a_recording(model, x):
    with torch.no_grad(), regard.watch(model, values=True) as source:
        model(x.flip(1))
    _, intervention = run(model, x, ablate(1, heads=2, baseline=source), record=True, values=True)
    expected = source.calls("1")[0].output[:, 2].mean((0, 1))
    torch.testing.assert_close(intervention.recording.calls("1")[0].output[:, 2], expected.expand(2, 7, 8))


# -- Gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_class", [Attention, OwnSoftmax])
def test_gradients_flow_through_edits(layer_class, x):
    torch.manual_seed(0)
    model = nn.Sequential(layer_class(), layer_class())
    model.eval()
    edits = [knockout(0, heads=[1, 2], queries=[4, 6], keys=[0, 2]), ablate(1, heads=3, baseline=0.5)]
    with regard.intervene(model, edits):
        model(x).square().sum().backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    middle = attend(model[:1], x, 0, remove([4, 6], [0, 2], [1, 2]))

    def halve(scores):
        weights = scores.softmax(-1)
        return weights * torch.tensor([1.0, 1.0, 1.0, 0.5])[:, None, None]

    attend(model[1:], middle, 0, halve).square().sum().backward()
    for own, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad, atol=1e-4, rtol=1e-4)


# -- Layers with a softmax of their own, layers of torch and of regard -------------------------------------


def test_layers_with_their_own_softmax(x):
    torch.manual_seed(0)
    own = nn.Sequential(OwnSoftmax(), OwnSoftmax()).eval()
    fused = nn.Sequential(Attention(), Attention()).eval()
    fused.load_state_dict(own.state_dict())
    with torch.no_grad(), regard.watch(own, values=True) as source:
        own(x.flip(1))
    with torch.no_grad(), regard.watch(fused, values=True) as fused_source:
        fused(x.flip(1))
    for edits in (
        [knockout(0, heads=1, queries=[3, 6], keys=[0, 1, 2])],
        [restrict(1, heads=[0, 2], mask=regard.sliding_window(2))],
        [rescore(1, heads=2, score_mod=regard.alibi())],
        [
            rescore(
                1, heads=2, score_mod=regard.score_mods.bias(torch.linspace(-2, 2, 49).sin().reshape(7, 7))
            )
        ],
        [rescore(0, score_mod=regard.score_mods.bias(np.linspace(-2, 2, 49).reshape(7, 7)))],
        [ablate(0, heads=1), ablate(1, heads=2, baseline="mean")],
    ):
        ours, theirs = run(own, x, *edits)[0], run(fused, x, *edits)[0]
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        assert not torch.equal(ours, own(x))
    for what in ("pattern", "output", "value"):
        ours = run(own, x, patch(0, heads=[1, 2], source=source, what=what))[0]
        theirs = run(fused, x, patch(0, heads=[1, 2], source=fused_source, what=what))[0]
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    _, intervention = run(own, x, knockout(0, heads=1, queries=6, keys=0), record=True)
    assert intervention.recording["0"][0, 1, 6, 0] == 0 < intervention.recording["0"][0, 0, 6, 0]
    with pytest.raises(regard.ArgumentError, match="computes its own softmax"):
        run(own, x, rescore(0, score_mod=regard.softcap(1.0)))


class OwnSink(OwnSoftmax):
    """A softmax of its own with a sink of score 1; it can leave out a key of all but the first rows."""

    removed: int | None = None

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (heads, self.dim)).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.mT * self.dim**-0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if self.removed is not None:
            mask[self.removed + 1 :, self.removed] = True
        scores = scores.masked_fill(mask, -torch.inf)
        weights = torch.cat([scores, torch.ones_like(scores[..., :1])], -1).softmax(-1)[..., :-1]
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("gain", [1.0, 6.0])
def test_gradients_flow_through_the_sink_of_a_layer_with_its_own_softmax(gain, x):
    """With large weights, some rows give the sink less than others, and a knockout leaves them little else."""
    torch.manual_seed(0)
    layer = OwnSink().double().eval()
    with torch.no_grad():
        layer.q.weight.mul_(gain)
    model, x = nn.Sequential(layer), x.double()
    results = []
    for removed, edits in ((None, [knockout(0, queries=slice(2, None), keys=1)]), (1, [])):
        layer.removed = removed
        model.zero_grad()
        with regard.intervene(model, edits):
            output = model(x)
        output.square().sum().backward()
        results.append((output.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    (ours, our_gradients), (theirs, their_gradients) = results
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(our_gradients, their_gradients, atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_of_encoder_layers(norm_first, x):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, norm_first=norm_first).eval()
    edit = knockout(heads=[1, 2], queries=[3, 6], keys=[0, 1])
    fast = run(layer, x, edit)[0]
    with regard.intervene(layer, edit):
        slow = layer(x)  # with gradients, torch takes the slow path
    torch.testing.assert_close(fast, slow.detach(), atol=1e-6, rtol=1e-5)
    assert not torch.equal(fast, layer(x))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("grad", [False, True])  # without gradients it is one fused operator
@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_of_torch(need_weights, grad, average, x):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    model = nn.ModuleDict({"attn": layer})
    with (
        torch.set_grad_enabled(grad),
        regard.intervene(model, knockout(heads=1, queries=3, keys=[0, 1])) as intervention,
    ):
        edited, weights = layer(x, x, x, need_weights=need_weights, average_attn_weights=average)
    mask = torch.zeros(8, 7, 7, dtype=torch.bool)
    mask[1::4, 3, :2] = True
    expected, expected_weights = layer(x, x, x, attn_mask=mask, average_attn_weights=average)
    torch.testing.assert_close(edited, expected, atol=1e-6, rtol=1e-5)
    if need_weights:
        torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    assert len(intervention.applied) == 1


def test_layers_of_regard(x):
    from regard.nn import KVCache, MultiheadAttention

    torch.manual_seed(0)
    layer = MultiheadAttention(32, 4, num_kv_heads=2).eval()
    model = nn.ModuleDict({"attn": layer})
    with torch.no_grad(), regard.intervene(model, knockout(heads=1, queries=[3, 6], keys=[0, 1])):
        edited, matrix = layer(x, mask=regard.causal(), need_matrix=True)
        cache = KVCache()
        steps = [layer(part, mask=regard.causal(), cache=cache) for part in x.split([4, 1, 2], 1)]
    flags = np.ones((1, 4, 7, 7), bool)
    flags[:, 1, [3, 6], :2] = False
    with torch.no_grad():
        expected = layer(x, mask=regard.causal() & regard.masks.dense(flags))
    torch.testing.assert_close(edited, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=1e-6, rtol=1e-5)
    assert not matrix[:, 1, 6, :2].any()


def test_layers_with_their_own_softmax_are_edited_in_any_number_of_calls(monkeypatch, x):
    """Edits record nothing, so the limit of recorded weights (1 GiB, here two calls) does not stop them."""
    torch.manual_seed(0)
    layer, limit = OwnSoftmax().eval(), 2 * 2 * 4 * 7 * 7 * 4
    monkeypatch.setattr(
        "regard.interventions.intervene.CaptureOptions", partial(CaptureOptions, max_dense_bytes=limit)
    )
    with torch.no_grad(), regard.intervene(layer, ablate(heads=[0, 1, 2, 3])):
        for _ in range(5):
            torch.testing.assert_close(layer(x), x + layer.o.bias)
    with (
        pytest.raises(regard.NotCapturedError, match="of at most 3,136"),
        torch.no_grad(),
        regard.intervene(layer, ablate(heads=0), record=True),
    ):
        assert all(layer(x).shape == x.shape for _ in range(3))


# -- Refusals ----------------------------------------------------------------------------------------------


def test_layers_that_cannot_be_edited_are_refused_with_the_reason(x):
    class FeatureAttention(nn.Linear):
        def forward(self, x):
            features = super().forward(x).relu()
            return features @ (features.mT @ x)

    model = nn.Sequential(FeatureAttention(32, 32))
    with pytest.raises(
        regard.NotCapturedError, match="'0', which cannot be changed: FeatureAttention computes"
    ):
        run(model, x, ablate(0))


def test_parts_of_an_edited_layer_that_are_named_attention(x):
    class AttentionProjection(nn.Linear):
        """Runs inside a layer whose attention is captured."""

    layer = Attention()
    layer.q = AttentionProjection(32, 32)
    model = nn.Sequential(layer).eval()
    assert not torch.equal(run(model, x, ablate("0", heads=1))[0], model(x))


@pytest.mark.parametrize(
    "edits, message",
    [
        ([ablate(99)], r"1 of 1 edits .*ablate\(layers=99.*layer 99 did not run; 3 ran: 0 '0', 1 '1', 2 '2'"),
        ([ablate([0, 99, 3])], r"layers 99, 3 did not run; 3 ran"),
        ([ablate(0), ablate("2.q")], r"1 of 2 edits .*layer '2.q' did not run; 3 ran"),
        ([knockout(1, queries=99, keys=0)], r"queries 99 are outside the sequence of 7 tokens"),
        ([knockout(1, queries=-8, keys=0)], r"queries -8 are outside the sequence of 7 tokens"),
        (
            [knockout(1, queries=[3, 7], keys=[-9, 2])],
            r"queries 7 .*keys -9 are outside the sequence of 7 tokens",
        ),
        ([ablate(1, heads=slice(9, 12))], r"heads slice\(9, 12, None\) not found in the layers that ran"),
        ([ablate(1, batch=slice(5, 9))], r"batch slice\(5, 9, None\) not found in the layers that ran"),
        (
            [ablate(1, queries=slice(7, 9))],
            r"queries slice\(7, 9, None\) are outside the sequence of 7 tokens",
        ),
    ],
)
def test_edits_that_never_apply_are_reported_when_the_block_ends(model, x, edits, message):
    with pytest.warns(UserWarning, match=message):
        run(model, x, *edits)


def test_positions_that_a_later_call_has_are_not_reported(model, x):
    edits = knockout(1, queries=8, keys=[2, 7]), ablate(0, queries=slice(7, None)), ablate(2)
    with torch.no_grad(), regard.intervene(model, edits):
        model(x)
        model(torch.cat([x, x], 1))
    with torch.no_grad(), regard.intervene(model, []):
        pass


def test_a_block_in_which_the_model_does_not_run_is_reported(model, x):
    intervention = regard.intervene(model, ablate(1))
    with torch.no_grad(), intervention:
        model(x)
    with pytest.warns(UserWarning, match="no attention layer of the model ran"), intervention:
        pass
    with pytest.raises(ZeroDivisionError), intervention:  # the block's own error comes first
        1 / 0  # noqa: B018


@pytest.mark.parametrize("layers", [-1, [0, -2], np.int64(-1)])
def test_negative_layers_are_refused_with_a_hint(layers):
    with pytest.raises(
        regard.ArgumentError, match=r"layers with -\d; expected numbers from 0.*list\(recording\)"
    ):
        ablate(layers)


def test_heads_and_batch_entries_out_of_range(model, x):
    with pytest.raises(regard.IndexOutOfRangeError, match="one of 4 heads"):
        run(model, x, ablate(0, heads=4))
    with pytest.raises(regard.IndexOutOfRangeError, match="one of 2 batch entries"):
        run(model, x, ablate(0, batch=[0, 2]))


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: knockout(1.5), regard.ArgumentTypeError, "numbers of layers"),
        (lambda: knockout(heads="1"), regard.ArgumentTypeError, "an integer, a list of integers"),
        (lambda: knockout(keys=1.5), regard.ArgumentTypeError, "positions: an integer"),
        (lambda: restrict(mask=torch.ones(2, 2)), regard.ArgumentTypeError, "a mask such as"),
        (lambda: rescore(score_mod=2.0), regard.ArgumentTypeError, "a score modification"),
        (lambda: ablate(baseline="nothing"), regard.ArgumentError, '"zero", "mean", a recording'),
        (lambda: patch(source=None), regard.ArgumentTypeError, "a recording of another run"),
        (lambda: regard.intervene(nn.Linear(2, 2), "all"), regard.ArgumentTypeError, "an edit, or a list"),
        (lambda: regard.intervene(nn.Linear(2, 2), ablate("h.*")), regard.ArgumentError, "module names"),
        (lambda: regard.intervene(3, ablate()), regard.ArgumentTypeError, "a torch.nn.Module"),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_texts_without_tokens_and_sources_without_values(model, x):
    with pytest.raises(regard.ArgumentError, match="tokens, to look up the text"):
        run(model, x, knockout(keys="cat"))
    with pytest.raises(regard.ArgumentError, match="one of the tokens"):
        run(model, x, knockout(keys="dog"), tokens=TOKENS)
    with torch.no_grad(), regard.watch(model) as source:
        model(x)
    for what in ("output", "value"):
        with pytest.raises(regard.ArgumentError, match="values=True"):
            run(model, x, patch(source=source, what=what))
    with pytest.raises(regard.ArgumentError, match="record=True"):
        _ = run(model, x, ablate())[1].recording


def test_dropout_in_training_is_refused(x):
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True, dropout=0.5).train()
    with (
        pytest.raises(regard.ArgumentError, match=r"weights without dropout"),
        regard.intervene(layer, knockout()),
    ):
        layer(x)


# -- What is restored --------------------------------------------------------------------------------------


def test_nothing_stays_patched_after_exceptions_nesting_and_threads(model, x):
    functions = F.scaled_dot_product_attention, F.softmax, torch.Tensor.softmax
    plain = model(x)
    with pytest.raises(ZeroDivisionError), regard.intervene(model, ablate()):
        model(x).foo = 1 / 0
    with pytest.raises(regard.IndexOutOfRangeError), regard.intervene(model, ablate(heads=9)):
        model(x)
    first, second = regard.intervene(model, ablate(0)), regard.intervene(model, ablate(1))
    first.__enter__()
    second.__enter__()
    with pytest.warns(UserWarning, match="no attention layer of the model ran"):
        first.__exit__(None, None, None)
    torch.testing.assert_close(model(x), run(model, x, ablate(1))[0])
    second.__exit__(None, None, None)
    threads = [threading.Thread(target=run, args=(model, x, ablate(i % 3))) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (F.scaled_dot_product_attention, F.softmax, torch.Tensor.softmax) == functions
    assert not list_patches() and not watched
    assert torch.equal(model(x), plain)


# -- Threads and backward passes ---------------------------------------------------------------------------


@pytest.mark.parametrize("layer_class", [Attention, OwnSoftmax])
def test_edits_of_several_threads_do_not_mix(layer_class, x):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer_class() for _ in range(3))).eval()
    with torch.no_grad():
        plain = model(x)
    expected = [run(model, x, ablate(1, heads=head))[0] for head in range(4)]
    faults = []

    def work(head):
        try:
            for _ in range(12):
                found = run(model, x, ablate(1, heads=head))[0]
                with torch.no_grad():
                    unedited = model(x)
                faults.extend(
                    [head] * (not torch.equal(found, expected[head]) or not torch.equal(unedited, plain))
                )
        except BaseException as error:
            faults.append(error)
            raise

    threads = [threading.Thread(target=work, args=(head,)) for head in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and not watched and not list_patches()


def test_other_threads_run_the_model_without_the_edits(model, x):
    found = {}

    def work(name):
        with torch.no_grad():
            found[name] = model(x)

    def start(target, *args):
        thread = threading.Thread(target=target, args=args)
        thread.start()
        thread.join()

    with torch.no_grad():
        plain = model(x)
        with (
            regard.watch(model) as recording,
            regard.intervene(model, ablate(1, heads=2), record=True) as intervention,
        ):
            edited = model(x)
            start(work, "thread")
            start(contextvars.copy_context().run, work, "copy of the context")
    assert torch.equal(found["thread"], plain) and torch.equal(found["copy of the context"], edited)
    assert len(recording.calls("1")) == 3 and len(intervention.recording.calls("1")) == 2
    around = nn.Sequential(model)
    warned = pytest.warns(UserWarning, match="ran in this thread; edits do not apply to other threads")
    with warned, regard.intervene(around, ablate(1)):
        start(around, x)


def test_edits_of_asyncio_tasks_do_not_mix(model, x):
    async def work(head):
        with regard.intervene(model, ablate(0, heads=head)):
            await asyncio.sleep(0.01)
            output = model(x).detach()
            await asyncio.sleep(0.01)
            return output

    async def work_together():
        return await asyncio.gather(*(work(head) for head in range(4)))

    for head, output in enumerate(asyncio.run(work_together())):
        assert torch.equal(output, run(model, x, ablate(0, heads=head))[0])


class Checkpointed(nn.Sequential):
    """Runs each layer again in the backward pass."""

    reentrant = True

    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("layer_class", [Attention, OwnSoftmax])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "after", "in another thread"])
def test_checkpointed_layers_run_again_with_their_edits(layer_class, reentrant, where, x):
    torch.manual_seed(0)
    layers = [layer_class() for _ in range(3)]
    plain, model = nn.Sequential(*layers), Checkpointed(*layers)
    model.reentrant = reentrant
    edits = [
        ablate(1, heads=0),
        knockout("2", heads=1, queries=5, keys=[1, 2]),
        ablate(0, heads=3, baseline="mean"),
    ]

    def differentiate(model, where):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        with regard.intervene(model, edits, record=True) as run:
            loss = model(leaf).square().sum()
            if where == "inside":
                loss.backward()
        if where == "after":
            loss.backward()
        elif where == "in another thread":
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert where == "inside" or len(run.recording.calls("1")) == 1
        return [leaf.grad, *(parameter.grad for parameter in model.parameters())]

    expected = [gradient.clone() for gradient in differentiate(plain, "inside")]
    for ours, theirs in zip(differentiate(model, where), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    unedited = x.clone().requires_grad_()
    plain(unedited).square().sum().backward()
    assert (unedited.grad - expected[0]).abs().max() > 1e-2
    assert not watched and not list_patches()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:intervene. 1 of 1 edits did not fully apply")
def test_a_thousand_interventions_leak_nothing():
    layer = nn.Sequential(Attention(heads=2, kv_heads=1, width=8)).eval()
    x, edit = torch.ones(1, 3, 8), knockout(queries=2, keys=0)
    with torch.no_grad():
        for i in range(1000):
            if i == 10:
                gc.collect()
                before = len(gc.get_objects())
            with regard.intervene(layer, edit):
                if i % 10 == 0:
                    layer(x)
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    assert not list_patches() and not watched


@pytest.mark.parametrize("heads", [None, [0, 1], [1, 2]])
def test_masked_heads_are_computed_once(model, x, heads, monkeypatch):
    """The kernel does not run over the heads that a mask changes: the masked run would cost both."""
    computed = []

    def count_rows(problem, pairs, rows, value):
        computed.extend(pairs)
        return compute_rows(problem, pairs, rows, value)

    compute_rows = edited_rows.compute_rows
    monkeypatch.setattr(edited_rows, "compute_rows", count_rows)
    monkeypatch.setattr(kernels, "run_flash_with_lse", lambda *args: pytest.fail("the kernel ran"))
    edit = restrict(heads=heads, mask=regard.sliding_window(2) | regard.masks.first(1))
    output, intervention = run(model, x, edit)
    assert {row["path"] for row in intervention.applied} == {"through the edited mask"}
    chosen = range(4) if heads is None else heads
    assert sorted(computed) == sorted(3 * [4 * i + head for i in range(2) for head in chosen])  # 3 layers

    monkeypatch.undo()
    recorded, _ = run(model, x, edit, record=True)  # a recording needs the kernel's output
    assert torch.equal(output, recorded)


def test_a_mask_that_removes_nothing_leaves_the_output(model, x):
    output, intervention = run(model, x, restrict(mask=regard.sliding_window(7)))
    assert {row["path"] for row in intervention.applied} == {"nothing to change"}
    with torch.no_grad():
        assert torch.equal(output, model(x))


@pytest.mark.parametrize("shape", [(7, 7), (4, 7, 7), (2, 4, 7, 7), (2, 1, 7, 7)])
def test_unmasked_heads_keep_every_bit_under_any_mask_of_the_model(x, shape):
    class Masked(nn.Module):
        def forward(self, x):
            q = x.unflatten(-1, (4, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=allowed)

    generator = torch.Generator().manual_seed(0)
    allowed = torch.rand(shape, generator=generator) < 0.7
    allowed[..., 0] = True
    model = Masked()
    output, _ = run(model, x, restrict(heads=[0, 3], mask=regard.sliding_window(2)))
    with torch.no_grad():
        plain = model(x)
    assert torch.equal(output[:, 1:3], plain[:, 1:3]) and not torch.equal(output[:, [0, 3]], plain[:, [0, 3]])


# With one row in each head, the factor of a head is not told from a sink.
@pytest.mark.parametrize(
    "q_len, factor", [(1, 0.5), (6, 0.5), (6, torch.tensor([0.2, 0.9, 1.0, 0.5]).view(4, 1, 1))]
)
def test_a_knockout_in_a_layer_that_multiplies_its_softmax_keeps_the_factor(q_len, factor):
    class Layer(nn.Module):
        def forward(self, query, key, value):
            return (torch.softmax(query @ key.mT / 8**0.5, -1) * factor) @ value

    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    query, layer = query[..., :q_len, :], Layer()
    with regard.intervene(nn.Sequential(layer), [knockout(keys=2)]):
        output = layer(query, key, value)
    scores = query @ key.mT / 8**0.5
    scores[..., 2] = -torch.inf
    torch.testing.assert_close(output, factor * torch.softmax(scores, -1) @ value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("removes", ["a key", "a window"])
def test_edits_of_padded_layers_warn_of_nothing(removes, request):
    request.addfinalizer(partial(torch.set_warn_always, torch.is_warn_always_enabled()))
    torch.set_warn_always(True)  # torch warns once in each process
    layer, x, position = regard.nn.MultiheadAttention(32, 4).eval(), torch.randn(2, 7, 32), torch.arange(7)
    padding = position < torch.tensor([7, 5])[:, None]
    edits = {
        "a key": knockout(heads=0, keys=2),
        "a window": restrict(mask=regard.sliding_window([2, 3, 4, 5])),
    }
    with torch.no_grad(), regard.watch(layer) as plain:
        layer(x, padding=padding)
    with torch.no_grad(), regard.intervene(layer, [edits[removes]], record=True) as edited:
        layer(x, padding=padding)
    (call,) = plain.calls("")
    scores = (call.query @ call.key.mT * call.scale).masked_fill(~padding[:, None, None], -torch.inf)
    if removes == "a key":
        scores[:, 0, :, 2] = -torch.inf
    else:
        distance, sizes = position[:, None] - position, torch.tensor([2, 3, 4, 5]).view(4, 1, 1)
        scores = scores.masked_fill((distance < 0) | (distance >= sizes), -torch.inf)
    expected = torch.softmax(scores, -1).nan_to_num(0.0)
    torch.testing.assert_close(edited.recording.calls("")[0].matrix.to_dense(), expected)
