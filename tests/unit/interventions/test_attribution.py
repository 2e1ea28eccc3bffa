"""`interventions.attribution`: gradients of weights and outputs equal those of eager autograd, in O(n) memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from torch import nn  # noqa: E402

import regard  # noqa: E402
from regard import ArgumentError, ArgumentTypeError, NotCapturedError  # noqa: E402
from regard.interventions import ablate as ablate_heads  # noqa: E402
from regard.interventions import attribution, effects, knockout, logit_difference  # noqa: E402
from regard.interventions.gradient_attribution import EdgeGradients  # noqa: E402
from regard.tiling import use_tile_sizes  # noqa: E402
from tests.helpers.tiny_models import TINY, eager_weights  # noqa: E402

ROOT = Path(__file__).parents[3]
# Grouped heads, a window, sinks, a soft cap, an encoder with padding, cross-attention, images, latent attention.
FAMILIES = ["GPT-2", "BERT", "Llama", "Mistral", "Qwen3", "BART", "ViT", "DeepSeek-V3", "Gemma 2", "GPT-OSS"]


def metric(output):
    """A number that depends on every token: a fixed random direction of the logits or of the last states."""
    tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
    return (tensor * noise.to(tensor.dtype)).sum()


def run_eager(family, inputs):
    """Return the weights of eager attention and their gradients, by autograd."""
    model = family.build("eager", torch.float64)
    output = model(**inputs, output_attentions=True)
    weights = eager_weights(output)
    for array in weights:
        array.retain_grad()
    metric(output).backward()
    return weights, [array.grad for array in weights]


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_weights_equal_those_of_eager_autograd(name, small):
    family = TINY[name]
    inputs = family.inputs("right" if family.pads else "none")
    found = attribution(family.build(), inputs, metric, edges=5)
    doubled = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    weights, gradients = run_eager(family, doubled)
    assert len(weights) == len(found.recording)
    for layer, expected, gradient in zip(found.recording, weights, gradients, strict=True):
        expected, gradient = expected.detach(), gradient.detach()
        scale = float(gradient.abs().amax())
        ours = found.weight_gradients(layer)
        live = expected > 0
        assert float(torch.where(live, ours - gradient, 0.0).abs().amax()) <= 1e-5 * scale
        products = expected * gradient
        size = float(products.abs().amax())
        torch.testing.assert_close(found.by_key(layer), products.sum(-2), rtol=0, atol=3e-5 * size)
        torch.testing.assert_close(found.by_query(layer), products.sum(-1), rtol=0, atol=3e-5 * size)
        by_head = products.abs().sum((-2, -1)).reshape(-1, products.shape[1]).sum(0)
        rows = sorted(found.heads.filter(module=layer), key=lambda row: row["head"])
        torch.testing.assert_close(
            torch.tensor([row["attention"] for row in rows]).double(), by_head, rtol=1e-4, atol=1e-5 * size
        )
        for head in range(products.shape[1]):
            largest = products[:, head].abs().flatten().sort(descending=True).values[:5]
            edges = found.edges.filter(module=layer, head=head)
            ours = torch.tensor([abs(edge["product"]) for edge in edges]).double()
            torch.testing.assert_close(ours, largest[: len(ours)], rtol=0, atol=3e-5 * size)
            for edge in edges:
                value = products[edge["batch"], head, edge["query"], edge["key"]]
                assert edge["product"] == pytest.approx(float(value), abs=3e-5 * size)


def test_rows_of_gradient_times_weight_add_up_to_gradient_times_output():
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    found = attribution(model, inputs, metric)
    for name in found.recording:
        by_query, by_key = found.by_query(name), found.by_key(name)
        torch.testing.assert_close(by_query.sum((0, -1)), by_key.sum((0, -1)), rtol=1e-4, atol=1e-5)
        rows = sorted(found.heads.filter(module=name), key=lambda row: row["head"])
        outputs = torch.tensor([row["output"] for row in rows]).double()
        torch.testing.assert_close(outputs, by_query.sum((0, -1)), rtol=1e-5, atol=1e-6)
        dense = found.weight_gradients(name, 3)
        torch.testing.assert_close(dense, found.weight_gradients(name, [3])[..., 0, :])


def ablate(model, layer, head, to):
    """Return a handle that replaces the output of one head of a GPT-2 by hand."""

    def replace(module, args):
        heads = args[0].unflatten(-1, (4, -1)).clone()
        heads[..., head, :] = to
        return (heads.flatten(-2),)

    return model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(replace)


@pytest.mark.parametrize("baseline", ["zero", "mean", "recording"])
def test_the_estimate_is_the_derivative_of_the_ablation(baseline):
    """Scaled towards the baseline by a small step, the metric changes by the estimate times that step."""
    model, inputs = TINY["GPT-2"].build(dtype=torch.float64), TINY["GPT-2"].inputs("none")
    other = inputs | {"input_ids": inputs["input_ids"].flip(1)}
    with torch.no_grad(), regard.watch(model, values=True) as run:
        model(**other)
    with torch.no_grad(), regard.watch(model, values=True) as clean:
        start = metric(model(**inputs))
    found = attribution(model, inputs, metric, baseline=run if baseline == "recording" else baseline)
    step = 1e-5
    for row in found.heads:
        name, head = row["module"], row["head"]
        output = clean.calls(name)[0].output[:, head]
        target = {
            "zero": torch.zeros_like(output),
            "mean": output.mean((0, 1)).expand_as(output),
            "recording": run.calls(name)[0].output[:, head],
        }[baseline]
        handle = ablate(model, row["layer"], head, output + step * (target - output))
        with torch.no_grad():
            change = float(metric(model(**inputs)) - start) / step
        handle.remove()
        assert row["effect"] == pytest.approx(change, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("baseline", ["zero", "mean"])
def test_integrated_effects_of_a_layer_add_up_to_its_ablation(implementation, baseline):
    model, inputs = TINY["Llama"].build(implementation), TINY["Llama"].inputs("none")
    found = attribution(model, inputs, metric, baseline=baseline, steps=24)
    start = metric(model(**inputs)).item()
    for layer in found.recording:
        edit = ablate_heads(layer, baseline=baseline)
        with torch.no_grad(), regard.intervene(model, edit):
            change = metric(model(**inputs)).item() - start
        total = sum(row["effect"] for row in found.heads.filter(module=layer))
        size = sum(abs(row["effect"]) for row in found.heads.filter(module=layer))
        assert total == pytest.approx(change, abs=5e-3 * size)
    once = attribution(model, inputs, metric, baseline=baseline)
    assert not once.completeness
    assert once.edges == found.edges
    columns = ("module", "head", "output", "attention")
    assert sorted([row[name] for name in columns] for row in once.heads) == sorted(
        [row[name] for name in columns] for row in found.heads
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_mean_baseline_leaves_out_padding(side):
    """The sum over a layer is the effect of ablating it to its mean, over the tokens that are not padding."""
    model, inputs = TINY["Llama"].build(dtype=torch.float64), TINY["Llama"].inputs(side)
    real = inputs["attention_mask"].bool()

    def last_tokens(output):
        return (output.logits[..., 7] * real).sum()

    found = attribution(model, inputs, last_tokens, baseline="mean", steps=200)
    with torch.no_grad(), regard.watch(model, values=True) as clean:
        model(**inputs)
    for layer in clean:
        mean = clean.calls(layer)[0].output.movedim(1, 2)[real].mean(0)  # (heads, value_dim)
        handle = model.get_submodule(layer).o_proj.register_forward_pre_hook(
            lambda _, args, mean=mean: (mean.flatten().expand_as(args[0]),)
        )
        with torch.no_grad():
            change = float(last_tokens(model(**inputs))) - found.metric
        handle.remove()
        total = sum(row["effect"] for row in found.heads.filter(module=layer))
        assert total == pytest.approx(change, abs=1e-2 * abs(change))


def make_curved_model():
    """Return a Llama whose metric swings along the path: 64 points at equal distances miss its effect by far."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(1)
    return hf.LlamaForCausalLM(config).eval(), torch.randint(1, 98, (2, 24))


def test_integrated_effects_are_as_complete_as_they_say():
    model, tokens = make_curved_model()
    measure = logit_difference(5, 7)
    found = attribution(model, tokens, measure, steps=256)
    assert found.completeness.columns == ["module", "layer", "effect", "change", "gap", "points"]
    for row in found.completeness:
        handle = model.get_submodule(row["module"]).o_proj.register_forward_pre_hook(
            lambda _, args: (torch.zeros_like(args[0]),)
        )
        with torch.no_grad():
            change = float(measure(model(tokens)).mean()) - found.metric
        handle.remove()
        total = sum(entry["effect"] for entry in found.heads.filter(module=row["module"]))
        assert row["effect"] == pytest.approx(total) and row["change"] == pytest.approx(change, abs=1e-4)
        assert row["gap"] == pytest.approx(abs(total - change), abs=1e-4)
        assert row["gap"] < 0.02 * abs(change) and 3 <= row["points"] <= 256
    points = [row["points"] for row in found.completeness]
    assert points[0] > points[1]  # more where the metric swings
    with pytest.warns(
        UserWarning, match=r"'model.layers.0.self_attn'.* not complete within max_gap=0.01.* 7 points"
    ):
        few = attribution(model, tokens, measure, steps=8)
    assert few.completeness[0]["gap"] > 0.5 * abs(few.completeness[0]["change"])
    with pytest.raises(ArgumentError, match="max_gap=-1"):
        attribution(model, tokens, measure, max_gap=-1)


def test_a_layer_that_runs_several_times_is_complete():
    config = hf.AlbertConfig(
        vocab_size=61, embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model, tokens = hf.AlbertForMaskedLM(config).eval(), torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape), alpha=0.2)
    for baseline in ("zero", "mean"):
        found = attribution(model, tokens, metric, baseline=baseline, steps=128)
        (row,) = found.completeness
        assert row["gap"] < 0.02 * abs(row["change"])
    (name,) = found.recording
    for read in (found.weight_gradients, found.by_query, found.by_key):
        with pytest.raises(
            ArgumentError, match="which was called 3 times; expected a layer that was called once"
        ):
            read(name)


def test_edges_of_a_matrix_in_numpy():
    rng = np.random.default_rng(0)
    key, value = rng.normal(size=(2, 2, 2, 7, 3))
    gradient = rng.normal(size=(2, 4, 7, 3))
    A = regard.attention(rng.normal(size=(2, 4, 7, 3)), key, mask=regard.causal(), enable_gqa=True)
    products = A.to_dense() * (gradient @ np.repeat(value, 2, 1).swapaxes(-1, -2))
    with use_tile_sizes(rows=2, columns=3, entries=12):
        sums = A.measure(edges=EdgeGradients(value, gradient, 6)).edges
    np.testing.assert_allclose(sums.magnitude, np.abs(products).sum((-2, -1)), rtol=1e-12)
    np.testing.assert_allclose(sums.received, products.sum(-2), rtol=1e-12, atol=1e-14)
    ranked = -np.sort(-np.abs(products).reshape(2, 4, -1), -1)[..., :6]
    np.testing.assert_allclose(np.abs(sums.weights * sums.gradients), ranked, rtol=1e-12)
    batch, head = np.ogrid[:2, :4]
    at = products[batch[..., None], head[..., None], sums.queries, sums.keys]
    np.testing.assert_allclose(sums.weights * sums.gradients, at, rtol=1e-12)


def test_a_head_with_fewer_edges_than_asked_lists_those_it_has():
    A = regard.attention(np.zeros((2, 1)), np.zeros((2, 1)), mask=regard.causal())
    sums = A.measure(edges=EdgeGradients(np.ones((2, 1)), np.ones((2, 1)), 4)).edges
    edges = sorted(zip(sums.queries.tolist(), sums.keys.tolist(), strict=True))
    assert edges == [(-1, -1), (0, 0), (1, 0), (1, 1)]


def test_parameters_and_hooks_are_left_as_they_were():
    model, inputs = TINY["GPT-2"].build(), TINY["GPT-2"].inputs("none")
    model.requires_grad_(False)
    chosen = model.transformer.h[0].attn.c_attn.weight.requires_grad_(True)
    hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
    with torch.no_grad():
        found = attribution(model, inputs, metric)
        assert not torch.is_grad_enabled()
    assert len(found.heads) == 8 and found.metric == pytest.approx(metric(model(**inputs)).item(), rel=1e-5)
    assert [p for p in model.parameters() if p.requires_grad] == [chosen]
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ZeroDivisionError):
        attribution(model, inputs, lambda output: 1 / 0)
    assert [p for p in model.parameters() if p.requires_grad] == [chosen]
    assert hooks == sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    )


def test_attributions_of_several_threads_do_not_mix():
    model, inputs = TINY["GPT-2"].build(), TINY["GPT-2"].inputs("none")
    wanted = attribution(model, inputs, metric).heads
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(attribution(model, inputs, metric).heads))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 4
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_arguments_that_cannot_be_attributed_are_refused():
    model, inputs = TINY["GPT-2"].build(), TINY["GPT-2"].inputs("none")
    with pytest.raises(ArgumentTypeError, match="metric as int 3"):
        attribution(model, inputs, 3)
    with pytest.raises(ArgumentTypeError, match="inputs as"):
        attribution(model, "text", metric)
    with pytest.raises(ArgumentTypeError, match="metric that returns"):
        attribution(model, inputs, lambda output: metric(output).item())
    with pytest.raises(ArgumentError, match="metric of shape"):
        attribution(model, inputs, lambda output: output.logits[:, -1])
    with pytest.raises(ArgumentError, match="without a gradient"):
        attribution(model, inputs, lambda output: metric(output).detach())
    with pytest.raises(ArgumentTypeError, match="baseline as"):
        attribution(model, inputs, metric, baseline="median")
    with pytest.raises(ArgumentError, match="edges"):
        attribution(model, inputs, metric, edges=0)
    with pytest.raises(ArgumentError, match="steps"):
        attribution(model, inputs, metric, steps=0)
    with torch.no_grad(), regard.watch(model, values=True) as shorter:
        model(inputs["input_ids"][:, :5])
    with pytest.raises(ArgumentError, match=r"outputs of shape \(2, 4, 5, 8\)"):
        attribution(model, inputs, metric, baseline=shorter)

    class OwnSoftmax(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
            return (q @ k.mT).softmax(-1) @ v

    with pytest.raises(NotCapturedError, match="without gradients"):
        attribution(OwnSoftmax(), torch.randn(1, 5, 8), lambda output: output.sum())


@pytest.mark.nightly
def test_the_heads_of_the_induction_model_are_ranked_as_effects_ranks_them():
    """Metric: how far the logit of the right token is above that of a wrong one, where a copy makes it predictable."""
    induction = pytest.importorskip("examples.induction")
    model, fresh = induction.load(), induction.draw_repeats(32, seed=1)
    seed = torch.Generator().manual_seed(7)
    other, wrong = torch.randint(128, (2, *fresh.tokens.shape), generator=seed)
    known = (fresh.source >= 0)[:, :-1]

    def difference(logits):
        right, rest = (logits[:, :-1].gather(-1, ids[:, 1:, None])[known] for ids in (fresh.tokens, wrong))
        return (right - rest).mean()

    with torch.no_grad(), regard.watch(model, values=True) as resampled:
        model(other)

    def rank(table, column):
        return [(row["layer"], row["head"]) for row in sorted(table, key=lambda row: -abs(row[column]))]

    # The head of the previous token, and the first of three induction heads, which are almost equal.
    for baseline in ("mean", resampled):
        measured = effects(model, fresh.tokens, difference, baseline=baseline)
        assert rank(measured, "effect")[:2] == [(0, 0), (1, 0)]
        found = attribution(model, fresh.tokens, difference, baseline=baseline, steps=32)
        assert rank(found.heads, "effect")[:2] == rank(found.heads, "attention")[:2] == [(0, 0), (1, 0)]
        assert all(row["effect"] < 0 for row in found.heads[:2])
        # One gradient has the wrong sign for the first: its softmax is saturated, and the estimate is local.
        once = attribution(model, fresh.tokens, difference, baseline=baseline).heads.filter(layer=0, head=0)
        assert once[0]["effect"] > 0 > measured.filter(layer=0, head=0)[0]["effect"]


def test_effects_of_a_batch_with_outputs_of_another_run_are_those_of_its_entries():
    """Edits run as copies of the batch, and each copy takes the outputs of its own entry."""
    model, inputs = TINY["GPT-2"].build(), TINY["GPT-2"].inputs("none")
    other = inputs | {"input_ids": inputs["input_ids"].flip(1)}
    with torch.no_grad(), regard.watch(model, values=True) as resampled:
        model(**other)
    together = effects(model, inputs, lambda output: output.logits[:, -1, 3], baseline=resampled)
    one_by_one = effects(model, inputs, lambda output: output.logits[:, -1, 3].mean(), baseline=resampled)
    assert together.column("effect") == pytest.approx(one_by_one.column("effect"), rel=1e-4, abs=1e-5)


def test_attribution_of_an_edited_model():
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    with regard.intervene(model, knockout(0, heads=2, queries=10, keys=[0, 1, 2])):
        found = attribution(model, inputs, metric, edges=200)
        with torch.no_grad():
            assert found.metric == pytest.approx(metric(model(**inputs)).item(), rel=1e-5)
    removed = found.edges.filter(layer=0, head=2, query=10)
    assert {edge["key"] for edge in removed} == set(range(3, 11))
    assert found.metric != attribution(model, inputs, metric).metric


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory as Linux reports it")
def test_memory_is_linear_in_the_length():
    """One layer of two heads at 8,192 tokens: the weights of one head alone would take 256 MiB."""
    code = """
import pathlib, torch
from regard.interventions import attribution

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.qkv = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 48)
        self.out = torch.nn.Linear(16, 32)

    def forward(self, tokens):
        q, k, v = self.qkv(self.embedding(tokens)).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

model = torch.nn.Sequential(Model())
# In MiB; unlike getrusage, without the peak of the parent.
peak = lambda: int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
metric = lambda logits: logits[:, -1, 3]
attribution(model, torch.randint(32, (1, 256)), metric)
before = peak()
found = attribution(model, torch.randint(32, (1, 8192)), metric)
assert len(found.edges) == 16
print(peak() - before)
with torch.no_grad():
    found.weight_gradients("0")  # stores the gradients of both heads
print(peak() - before)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    linear, dense = map(float, run.stdout.split())
    # The second number shows that the peak is seen; memory that the first call gave back is used again.
    assert linear < 100 and dense > 2 * 256 - linear


class TokenTable(nn.Module):
    """Tokens are read from a parameter, and an embedding comes in only after the first layer."""

    def __init__(self):
        super().__init__()
        self.table, self.late = nn.Parameter(torch.randn(20, 8)), nn.Embedding(20, 8)
        self.first, self.second = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, tokens):
        return self.second(self.first(self.table[tokens]) + self.late(tokens))


def test_layers_before_the_first_embedding_are_attributed():
    torch.manual_seed(0)
    model, tokens = TokenTable().double().eval(), torch.randint(0, 20, (2, 5))
    model.late.weight.requires_grad_(False)
    found = attribution(model, tokens, lambda output: output[:, 0, 0])
    assert [parameter.requires_grad for parameter in model.parameters()].count(False) == 1
    for row in found.heads:
        results = []
        for factor in (1 - 1e-4, 1 + 1e-4):
            edit = ablate_heads(row["module"], heads=row["head"], baseline=factor)
            with torch.no_grad(), regard.intervene(model, edit):
                results.append(float(model(tokens)[:, 0, 0].mean()))
        assert row["effect"] == pytest.approx((results[0] - results[1]) / 2e-4, abs=1e-6)
        assert row["effect"]


def test_integrated_effects_continue_the_cache_of_the_inputs_every_time():
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    with torch.no_grad():
        cache = model(inputs["input_ids"][:, :7], use_cache=True).past_key_values
    given = {"input_ids": inputs["input_ids"][:, 7:], "past_key_values": cache}
    found = attribution(model, given, logit_difference(3, 4), steps=33)
    assert cache.get_seq_length() == 7
    for row in found.completeness:
        assert row["effect"] == pytest.approx(row["change"], rel=0.02, abs=1e-3)
