"""`watch(model, grad=True)`: gradients of recorded matrices equal those of attention written by hand."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402

import regard  # noqa: E402
from regard import ArgumentError, NotCapturedError  # noqa: E402

HEADS, DIM, LENGTH = 2, 4, 7
SLOPES = torch.tensor([0.5, 0.25])


def eager_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **options):
    """Return output and weights, as the eager function of transformers does."""
    scores = query @ key.mT * scaling + attention_mask
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class Layer(nn.Module):
    """Causal self-attention of one of several implementations."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.way = nn.Linear(8, 24), way

    def project(self, x):
        return (part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))

    def forward(self, x):
        query, key, value = self.project(x)
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if self.way == "eager":
            mask = torch.full((LENGTH, LENGTH), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
            return eager_attention(self, query, key, value, mask, scaling=DIM**-0.5)[0].transpose(1, 2)
        if self.way == "own softmax":
            return (query @ key.mT).softmax(-1) @ value
        block_mask = flex.create_block_mask(
            lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, device="cpu"
        )
        score_mod = None
        if self.way == "score_mod":
            score_mod = lambda score, b, h, q, kv: score - SLOPES[h] * (q - kv)  # noqa: E731
        return flex.flex_attention(query, key, value, block_mask=block_mask, score_mod=score_mod)

    def compute_weights(self, x):
        """Compute the weights by hand."""
        query, key, _ = self.project(x)
        scores = query @ key.mT * DIM**-0.5
        if self.way == "score_mod":
            scores = scores - SLOPES[:, None, None] * (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH))
        return scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.fixture(autouse=True)
def run_without_compiling(monkeypatch):
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    # On the CPU, torch refuses inputs that need gradients, since it has no backward pass of its own there.
    monkeypatch.setattr(flex, "_validate_device", lambda *args: None)


def record(way, **options):
    model, x = nn.ModuleDict({"layer": Layer(way)}), torch.randn(2, LENGTH, 8, dtype=torch.float64)
    model.double()
    with regard.watch(model, grad=True, **options) as recording:
        output = model["layer"](x)
    return model["layer"], x, recording, output


def compute_entropy(weights):
    return -torch.where(weights > 0, weights * weights.clamp(min=1e-300).log(), 0.0).sum(-1)


WAYS = ["sdpa", "eager", "flex", "score_mod"]


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_with_the_entropy_of_heads_has_the_gradient_of_the_definition(way):
    layer, x, recording, output = record(way)
    weights = layer.compute_weights(x)
    task = output.square().mean() if way in ("sdpa", "eager") else 0.0
    loss = task - 0.1 * recording["layer"].entropy().mean()
    expected = task - 0.1 * compute_entropy(weights).mean()
    gradients, others = (
        torch.autograd.grad(value, list(layer.parameters()), retain_graph=True) for value in (loss, expected)
    )
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_rows_and_products_have_gradients(way):
    layer, x, recording, _ = record(way, values=True)
    (call,), weights = recording.calls("layer"), layer.compute_weights(x)
    _, _, value = layer.project(x)
    results = (recording["layer"][:, 1, 3].square().sum() + (recording["layer"] @ call.value).sin().sum(),)
    expected = (weights[:, 1, 3].square().sum() + (weights @ value).sin().sum(),)
    gradients, others = (
        torch.autograd.grad(value, list(layer.parameters()), retain_graph=True)
        for value in (results, expected)
    )
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)


def test_analyses_have_no_gradients_and_take_none_away(tmp_path):
    pytest.importorskip("safetensors")
    layer, x, recording, _ = record("sdpa")
    assert len(recording.heads()) == HEADS and len(recording.find(3, 1)) == HEADS
    assert len(recording.rollout(3)) == LENGTH
    assert not recording.diagnose().by_severity("error")
    assert recording.page([str(i) for i in range(LENGTH)])
    recording.save(tmp_path / "recording.safetensors")
    assert not regard.load_recording(tmp_path / "recording.safetensors").calls("layer")[0].query.requires_grad
    with torch.no_grad():
        assert not recording["layer"].entropy().requires_grad
    (gradient,) = torch.autograd.grad(recording["layer"].entropy().sum(), layer.qkv.weight)
    (other,) = torch.autograd.grad(compute_entropy(layer.compute_weights(x)).sum(), layer.qkv.weight)
    torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)


def test_by_default_nothing_is_recorded_with_its_graph():
    layer = Layer("sdpa")
    model = nn.ModuleDict({"layer": layer})
    with regard.watch(model, values=True) as recording:
        layer(torch.randn(1, LENGTH, 8))
    (call,) = recording.calls("layer")
    tensors = (call.query, call.key, call.value, call.output, call.lse)
    assert not any(tensor.requires_grad for tensor in tensors)
    assert not recording["layer"].entropy().requires_grad


def test_steps_of_one_cache_keep_their_gradients():
    class CachedLayer(Layer):
        cache = None

        def forward(self, x):
            query, key, value = self.project(x)
            if self.cache is not None:
                key, value = (torch.cat(pair, -2) for pair in zip(self.cache, (key, value), strict=True))
            is_first, self.cache = self.cache is None, (key, value)
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_first)

    layer, x = CachedLayer("sdpa").double().eval(), torch.randn(1, LENGTH, 8, dtype=torch.float64)
    with regard.watch(nn.ModuleDict({"layer": layer}), grad=True) as recording:
        for start, stop in ((0, 4), (4, 5), (5, 6), (6, 7)):
            layer(x[:, start:stop])
    assert recording["layer"].shape == (1, HEADS, LENGTH, LENGTH)
    (gradient,) = torch.autograd.grad(recording["layer"].entropy().sum(), layer.qkv.weight)
    (other,) = torch.autograd.grad(compute_entropy(layer.compute_weights(x)).sum(), layer.qkv.weight)
    torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)


def test_returned_weights_of_torch_layers_have_gradients():
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, HEADS, batch_first=True).double(), torch.randn(2, 5, 8).double()
    with regard.watch(nn.ModuleDict({"layer": layer}), grad=True) as recording:
        _, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
    gradients, others = (
        torch.autograd.grad(value.sum(), [layer.in_proj_weight])
        for value in (recording["layer"].entropy(), compute_entropy(weights))
    )
    torch.testing.assert_close(gradients, others, rtol=1e-9, atol=1e-12)


def test_a_learnt_bias_has_gradients():
    class BiasedLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(HEADS, 5, 5, dtype=torch.float64))

        def forward(self, query, key):
            return F.scaled_dot_product_attention(query, key, key, attn_mask=self.bias)

    layer = BiasedLayer()
    query, key = torch.randn(2, 1, HEADS, 5, DIM, dtype=torch.float64)
    with regard.watch(nn.ModuleDict({"layer": layer}), grad=True) as recording:
        layer(query, key)
    weights = (query @ key.mT * DIM**-0.5 + layer.bias).softmax(-1)
    (gradient,) = torch.autograd.grad(recording["layer"].entropy().sum(), layer.bias)
    (other,) = torch.autograd.grad(compute_entropy(weights).sum(), layer.bias)
    torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)


def test_what_has_no_gradients_is_refused():
    layer = Layer("sdpa")
    model, x = nn.ModuleDict({"layer": layer}), torch.randn(1, LENGTH, 8)
    with pytest.raises(ArgumentError, match="values=True and measures"):
        regard.watch(model, values=True, measures="default")
    with pytest.raises(ArgumentError, match="grad=True and measures"):
        regard.watch(model, grad=True, measures="default")
    for context in (torch.no_grad, torch.inference_mode):
        with (
            pytest.raises(ArgumentError, match="'layer' where gradients are disabled"),
            context(),
            regard.watch(model, grad=True),
        ):
            layer(x)
    own = nn.ModuleDict({"layer": Layer("own softmax")})
    with pytest.raises(NotCapturedError, match="recorded without gradients"), regard.watch(own, grad=True):
        own["layer"](x)
