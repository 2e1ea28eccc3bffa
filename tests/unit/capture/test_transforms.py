"""A watched model under torch.func, jit.trace, export, meta and fake tensors runs unchanged, and this is reported."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

import regard  # noqa: E402
from regard import NotCapturedError  # noqa: E402
from regard.capture import patching, watchers  # noqa: E402


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(-2, -3) for part in self.qkv(x).chunk(3, -1)
        )
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(-2, -3).flatten(-2)


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x)[0]


def build(layer_class) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(layer_class()).eval()


X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


def vmap(model):
    return torch.func.vmap(lambda x: model(x[None])[0])(X)


def per_sample_gradients(model):
    parameters = dict(model.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x[None],)).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, X)
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def meta(model):
    return torch.empty_like(model.to("meta")(X.to("meta")), device="cpu").zero_()


def fake(model):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return torch.zeros(tuple(model(mode.from_tensor(X)).shape)).shape


def trace(model):
    return torch.jit.trace(model, X, check_trace=False)(X)


def export(model):
    return torch.export.export(model, (X,)).module()(X)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layer_class", [Attend, EncoderLayer])
@pytest.mark.parametrize("transform", [vmap, per_sample_gradients, meta, fake, trace, export])
def test_a_transformed_model_runs_unchanged_and_is_reported(transform, layer_class):
    expected, results = transform(build(layer_class)), []
    model = build(layer_class)
    with (
        pytest.raises(NotCapturedError, match=r"was not captured: it ran (inside|on)"),
        regard.watch(model) as recording,
    ):
        results.append(transform(model))
    assert len(results) == 1 and not recording
    assert torch.equal(torch.as_tensor(results[0]), torch.as_tensor(expected))
    assert not watchers.watched and not patching.list_patches()


class DoubleAttention(TorchFunctionMode):
    """A mode of a user that doubles the output of attention."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if getattr(function, "__name__", "") == "scaled_dot_product_attention" else result


def test_a_function_mode_of_the_user_applies():
    model, plain = build(Attend), build(Attend)
    with torch.no_grad(), DoubleAttention():
        expected = plain(X)
        with regard.watch(model) as recording:
            assert torch.equal(model(X), expected)
    with torch.no_grad(), regard.watch(plain) as unchanged:
        assert torch.equal(plain(X) * 2, expected)
    assert torch.allclose(recording["0"].to_dense(), unchanged["0"].to_dense(), atol=1e-6)


def test_a_mapping_that_imports_what_is_read_is_left_alone(monkeypatch):
    """`from transformers import *` brings such mappings into the file of a model."""

    class Lazy(dict):
        def items(self):
            raise ValueError("a model that is not installed")

    monkeypatch.setitem(globals(), "MODELS", Lazy(bert="Bert"))
    model = build(Attend)
    with torch.no_grad(), regard.watch(model) as recording:
        model(X)
    assert list(recording) == ["0"]
