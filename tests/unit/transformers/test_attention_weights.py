"""`AttentionWeights` reads like the tensor of eager attention, and refuses what would store it."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from regard import ArgumentError, ArgumentTypeError, IndexOutOfRangeError  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from regard.transformers import AttentionWeights, attention_weights  # noqa: E402
from tests.helpers.tensors import limit_score_error  # noqa: E402
from tests.helpers.tiny_models import TINY, softmax_in_own_dtype  # noqa: E402


@pytest.fixture(scope="module")
def layer():
    """Weights of one layer: lazy, by eager attention, and by eager attention in float64."""
    inputs = TINY["Llama"].inputs("right")
    runs = (("regard", torch.float32), ("eager", torch.float32), ("eager", torch.float64))
    with torch.no_grad(), softmax_in_own_dtype():
        return [
            TINY["Llama"].build(implementation, dtype)(**inputs, output_attentions=True).attentions[1]
            for implementation, dtype in runs
        ]


@pytest.fixture(scope="module")
def score_error(layer):
    return limit_score_error(layer[0].matrix)


READINGS = {
    "an entry": lambda a: a[1, 2, 3, 1],
    "a row": lambda a: a[0, 1, 3],
    "the last row of all heads": lambda a: a[0, :, -1],
    "a column": lambda a: a[:, :, :, 0],
    "a block": lambda a: a[0, 1:3, 2:7, ::2],
    "rows by an array": lambda a: a[0, 1, torch.tensor([5, 2, 2])],
    "keys by booleans": lambda a: a[:, :, -1, torch.arange(11) % 2 == 0],
    "keys by a list of booleans": lambda a: a[0, 0, 4, [True, False] * 5 + [True]],
    "a new axis": lambda a: a[0, None, :, -1],
    "an ellipsis": lambda a: a[..., 2:4, :],
    "one entry of the batch": lambda a: a[1],
    "one head": lambda a: a[:, 2],
    "a list of heads": lambda a: a[:, [3, 0]],
    "squeeze": lambda a: a[:1].squeeze(0),
    "squeeze all": lambda a: a[:1, :1].squeeze(),
    "squeeze nothing": lambda a: a.squeeze(0),
    "iteration": lambda a: next(iter(a))[0, 1],
    "mean of heads": lambda a: a.mean(1),
    "mean of heads, by dim": lambda a: a.mean(dim=1)[0],
    "mean of heads of an entry": lambda a: a[0].mean(0),
    "mean of heads, a function": lambda a: torch.mean(a, dim=1)[1, -1],
    "mean of batch and heads": lambda a: a.mean((0, 1))[3],
    "mean of heads, rows by an array": lambda a: a.mean(1)[0, torch.tensor([9, 1])],
    "mean of heads, a column": lambda a: a.mean(1)[:, 2:, 0],
    "mean of heads, a new axis": lambda a: a.mean(1)[:, None, -1],
    "sum of heads": lambda a: a.sum(1)[0, 2:5],
    "sum of keys": lambda a: a.sum(-1),
    "sum of queries": lambda a: a.sum(dim=-2),
    "sum of everything": lambda a: a.sum(),
    "sum of queries and heads": lambda a: torch.sum(a, (1, 2)),
    "sum of keys, kept": lambda a: a.sum(-1, keepdim=True),
    "mean of queries": lambda a: a.mean(-2),
    "mean of everything": lambda a: a.mean(),
    "mean of the mean": lambda a: a.mean(1).mean(-2),
    "sum of keys of the mean": lambda a: a.mean(1).sum(-1),
    "mean in float64": lambda a: a.mean(-2, dtype=torch.float64),
    "max": lambda a: a.max(),
    "max of rows": lambda a: a.max(dim=-1).values,
    "max of columns": lambda a: a.max(-2, keepdim=True).values,
    "max of rows of the mean": lambda a: a.mean(1).max(-1).values,
    "max of columns of the mean": lambda a: a.mean(1).amax(-2),
    "max of the whole": lambda a: a.amax(),
    "max of each head": lambda a: torch.amax(a, dim=(-2, -1)),
    "max of each head, kept": lambda a: a.amax((-2, -1), keepdim=True),
    "max of each head of the mean": lambda a: a.mean(1).amax((1, 2)),
    "max over heads and keys": lambda a: a.amax((1, -1)),
    "max of minus": lambda a: (a * -1).max(-1).values,
    "topk": lambda a: a.topk(3).values,
    "topk of the mean": lambda a: a.mean(1).topk(2, dim=-1).values,
    "topk, a function": lambda a: torch.topk(a[0, 1], 2).values,
    "times a number": lambda a: (a * 2)[0, 0],
    "a number times": lambda a: (0.5 * a).mean(1)[0],
    "times a scalar tensor": lambda a: (torch.tensor(3.0) * a)[1, 1, 4],
    "divided": lambda a: (a / 4).sum(-2),
    "to float64": lambda a: a.to(torch.float64)[0, 0],
    "converted": lambda a: a.detach().cpu().to("cpu").float().clone()[0, 3],
}


@pytest.mark.parametrize("name", READINGS)
def test_a_reading_equals_that_of_the_tensor(layer, score_error, name, monkeypatch):
    monkeypatch.setattr(attention_weights, "BAND", 100)  # several bands, of two rows each
    lazy, naive, exact = (READINGS[name](weights) for weights in layer)
    dense = lazy.to_dense() if isinstance(lazy, AttentionWeights) else lazy
    assert lazy.shape == naive.shape and lazy.dtype == naive.dtype
    assert_matches(dense, exact, naive, dtype="float32", score_error=score_error, what=name)


INDICES = {
    "argmax of rows": lambda a: a.argmax(dim=-1),
    "argmax of columns": lambda a: a.argmax(-2),
    "argmax": lambda a: a[0, 1].argmax(),
    "argmax of the mean": lambda a: a.mean(1).argmax(-1, keepdim=True),
    "argmax of columns of the mean": lambda a: a.mean(1).max(-2).indices,
    "argmax of the whole mean": lambda a: torch.argmax(a[1].mean(0)),
    "topk": lambda a: a[:, :, 5:].topk(2).indices,
    "topk of the mean": lambda a: a.mean(1)[:, 5:].topk(2).indices,
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_equal_those_of_the_tensor(layer, name, monkeypatch):
    monkeypatch.setattr(attention_weights, "BAND", 100)
    lazy, _, exact = (INDICES[name](weights) for weights in layer)
    assert torch.equal(lazy, exact)


def test_attributes_are_those_of_the_tensor(layer):
    lazy, naive, _ = layer
    for name in ("shape", "ndim", "dtype", "device", "nbytes", "requires_grad"):
        assert getattr(lazy, name) == getattr(naive, name), name
    assert lazy.size() == naive.size() and lazy.size(1) == naive.size(1) and lazy.size(-1) == naive.size(-1)
    assert lazy.dim() == naive.dim() and lazy.numel() == naive.numel() and len(lazy) == len(naive)
    assert lazy.mean(1).dim() == 3 and lazy[0].size(0) == naive[0].size(0)
    assert repr(lazy) == "AttentionWeights(batch 2, heads 4, q_len 11, kv_len 11) float32"
    assert (
        repr(lazy.mean(1) * 2)
        == "AttentionWeights(2, 11, 11), a mean over axes (1,) of (2, 4, 11, 11), float32 × 2"
    )


REFUSED = {
    "stack with a tensor": lambda a: torch.stack([a, torch.ones(2, 4, 11, 11)]),
    "cat": lambda a: torch.cat((a, a), dim=1),
    "matmul": lambda a: torch.matmul(a, a),
    "eye plus": lambda a: torch.eye(11) + a,
    "plus": lambda a: a + a,
    "times a tensor": lambda a: a * torch.ones(11),
    "compared": lambda a: a > 0.5,
    "equal to a number": lambda a: a == 0,
    "different from a tensor": lambda a: a != torch.zeros(11),
    "max of two axes": lambda a: a.max((-2, -1)),
    "numpy": lambda a: a.numpy(),
    "asarray": lambda a: np.asarray(a),
    "array of a list": lambda a: np.array([a, a]),
    "max of heads": lambda a: a.max(dim=1),
    "keepdim": lambda a: a.mean(1, keepdim=True),
    "smallest": lambda a: a.topk(2, largest=False),
    "squeeze of keys": lambda a: a.squeeze(-1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_store_the_matrix_is_refused_with_a_fix(layer, name):
    with pytest.raises(
        ArgumentTypeError, match=r"lazy weights of shape \(2, 4, 11, 11\).* 3,872 bytes"
    ) as caught:
        REFUSED[name](layer[0])
    assert any(
        fix in caught.value.hint for fix in ("to_dense()", "weights[", "Leave it out", "topk(k)", "one axis")
    )


def test_weights_are_equal_to_themselves_alone(layer):
    lazy, other = layer[0], layer[0] * 2
    assert lazy == lazy and lazy != other and lazy != None  # noqa: E711
    assert [other, lazy].index(lazy) == 1 and len({lazy, other, lazy}) == 2


@pytest.mark.parametrize("k", [0, -1, 12, 1.5])
@pytest.mark.parametrize("read", [lambda a: a, lambda a: a.mean(1), lambda a: a * -1])
def test_topk_takes_a_number_of_keys(layer, read, k):
    with pytest.raises((ArgumentError, ArgumentTypeError), match="k"):
        read(layer[0]).topk(k)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "max", "argmax", "topk"])
def test_an_axis_that_does_not_exist_names_the_method(layer, name):
    options = {"k": 1} if name == "topk" else {}
    with pytest.raises(ArgumentError, match=rf"weights\.{name}: received dim=4; expected distinct axes"):
        getattr(layer[0], name)(dim=4, **options)


def test_other_methods_of_tensors_name_the_fix(layer):
    with pytest.raises(AttributeError, match=r"Call weights.to_dense\(\).permute, which stores 3,872 bytes"):
        layer[0].permute(0, 2, 1, 3)
    assert not hasattr(layer[0], "permute") and not hasattr(layer[0], "something")


def test_axes_that_do_not_exist_are_refused(layer):
    with pytest.raises(ArgumentError, match="distinct axes from -4 to 3"):
        layer[0].sum(4)
    with pytest.raises(ArgumentError, match="distinct axes"):
        layer[0].mean((1, -3))
    with pytest.raises(IndexOutOfRangeError, match="at most 3 indices"):
        layer[0].mean(1)[0, 0, 0, 0]
    with pytest.raises(IndexOutOfRangeError, match="3 booleans for an axis of size 11"):
        layer[0][0, 0, 0, [True, False, True]]
    with pytest.raises(ArgumentError, match="Measure first, then average"):
        layer[0].mean(1).matrix  # noqa: B018


def test_the_matrix_is_that_of_regard(layer):
    lazy, _, exact = layer
    entropy = -torch.special.xlogy(exact, exact).sum(-1)
    assert torch.allclose(lazy.matrix.entropy().double(), entropy, atol=1e-6)
    assert lazy[0, 1].matrix.shape == (11, 11) and repr(lazy[:1].matrix.mask) == repr(lazy.matrix.mask)


def test_half_precision_rounds_results_only():
    inputs = TINY["Llama"].inputs("none")
    model = TINY["Llama"].build("regard", torch.bfloat16)
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions[0]
    assert weights.dtype == weights[0, 0, 1].dtype == weights.mean(1)[0, 0].dtype == torch.bfloat16
    wide = weights.float()
    assert wide.dtype == wide[0, 0, 0].dtype == torch.float32
    assert torch.equal(wide[0].to_dense().bfloat16(), weights[0].to_dense())
    assert (wide.sum(-1) - 1).abs().max() < 1e-6
    assert weights.half().dtype == weights.half()[0, 0, 0].dtype == torch.float16
    assert weights.bfloat16().dtype == torch.bfloat16 and weights.double()[0, 0, 0].dtype == torch.float64


def test_gradients_flow_to_the_model_and_detach_stops_them():
    model, eager = TINY["Llama"].build("regard"), TINY["Llama"].build("eager")
    inputs = TINY["Llama"].inputs("none")
    gradients = []
    for each in (model, eager):
        weights = each(**inputs, output_attentions=True).attentions[1]
        assert weights.requires_grad
        weights.mean(1)[0, -1].square().sum().backward()
        gradients.append(each.model.layers[1].self_attn.q_proj.weight.grad)
    assert gradients[1].abs().max() > 0
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)
    weights = model(**inputs, output_attentions=True).attentions[1]
    for detached in (weights.detach(), weights[0].detach()):
        assert not detached.requires_grad and not detached[..., -1, :].requires_grad


def test_weights_can_be_copied_and_pickled(layer):
    for other in (copy.copy(layer[0]), copy.deepcopy(layer[0]), pickle.loads(pickle.dumps(layer[0]))):
        assert torch.equal(other[0, 1].to_dense(), layer[0][0, 1].to_dense())
