"""TransformerLens 4 on the same model: patterns, circuits, composition scores and edits of one head's input."""

from __future__ import annotations

import pytest
import torch
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.patching import get_act_patch_direct_path

import regard
from regard.interventions import ablate, circuits, knockout, patch, patch_input
from tests.tools.models import FAMILIES, build, draw_tokens

LIMIT = 1e-5
TOKENS, OTHERS = draw_tokens(1), draw_tokens(2)


def bridge_from(model):
    return build_bridge_from_module(
        model, architecture=type(model).__name__, hf_config=model.config, device="cpu", dtype=torch.float32
    )


def build_both(family, **sizes):
    return build(family, **sizes), bridge_from(build(family, "eager", **sizes))


def max_difference(a, b):
    return float((torch.as_tensor(a) - torch.as_tensor(b)).detach().abs().max())


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bridge_is_watched_with_equal_outputs_and_its_own_patterns(family):
    bridge = bridge_from(build(family, "eager"))
    expected = bridge(TOKENS)
    with regard.watch(bridge) as recording:
        output = bridge(TOKENS)
    assert torch.equal(output, expected)
    _, cache = bridge.run_with_cache(TOKENS)
    assert len(recording) == 3
    for i, name in enumerate(recording):
        assert torch.equal(recording[name].to_dense(), cache["pattern", i])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_shares_its_weights_with_a_bridge_has_lazy_patterns(family):
    source = build(family, "eager")
    lazy = type(source)._from_config(source.config, attn_implementation="sdpa").eval()
    lazy.load_state_dict(source.state_dict(), assign=True)
    bridge = bridge_from(source)
    with regard.watch(lazy) as recording:
        lazy(TOKENS)
    _, cache = bridge.run_with_cache(TOKENS)
    for i, name in enumerate(recording):
        (call,) = recording.calls(name)
        assert (call.weights, call.kernel) == (None, "torch: flash on CPU")
        assert max_difference(recording[name].to_dense(), cache["pattern", i]) < LIMIT
    own = dict(lazy.named_parameters())
    assert own["transformer.h.0.mlp.c_fc.weight" if family == "gpt2" else "lm_head.weight"].data_ptr() in {
        weight.data_ptr() for weight in bridge.parameters()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_circuits_and_composition(family):
    model, bridge = build_both(family)
    found, (qk, ov) = circuits(model, TOKENS), (bridge.QK, bridge.OV)
    for layer in range(3):
        for head in range(4):
            assert max_difference(found.qk(layer, head).to_dense(), qk[layer, head].AB) < LIMIT
            assert max_difference(found.ov(layer, head).to_dense(), ov[layer, head].AB) < LIMIT
            ours, theirs = (
                x.abs().sort().values
                for x in (found.ov(layer, head).eigenvalues(), ov[layer, head].eigenvalues)
            )
            assert max_difference(ours / theirs.max(), theirs / theirs.max()) < LIMIT
            ours, theirs = found.qk(layer, head).svd()[1], qk[layer, head].svd()[1]
            assert max_difference(ours / theirs.max(), theirs / theirs.max()) < LIMIT
    for mode in ("Q", "K", "V"):
        theirs = bridge.all_composition_scores(mode).scores
        assert float(theirs.max()) > 0.1
        assert max_difference(found.composition(mode), theirs) < LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_circuits_with_folded_norms(family):
    model, bridge = build_both(family, num_key_value_heads=4)
    bridge.enable_compatibility_mode(fold_value_biases=False, disable_warnings=True)
    found = circuits(model, TOKENS, fold_norms=True)
    for layer in range(3):
        for head in range(4):
            for ours, theirs in ((found.qk, bridge.QK), (found.ov, bridge.OV)):
                dense = theirs[layer, head].AB
                assert (
                    max_difference(
                        ours(layer, head).to_dense() / dense.abs().max(), dense / dense.abs().max()
                    )
                    < LIMIT
                )
    for mode in ("Q", "K", "V"):
        assert max_difference(found.composition(mode), bridge.all_composition_scores(mode).scores) < LIMIT


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("family", FAMILIES)
def test_queries_keys_and_values_of_one_head_of_another_run(family, what):
    model, bridge = build_both(family, num_key_value_heads=4)
    _, cache = bridge.run_with_cache(OTHERS)
    rotated = family == "llama" and what != "value"
    name = f"blocks.1.attn.hook_{'rot_' if rotated else ''}{what[0]}"

    def replace(vectors, hook):
        assert vectors.shape == (2, 30, 4, 16)
        vectors[:, :, 2] = cache[name][:, :, 2]
        return vectors

    theirs = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, replace)])
    with regard.watch(model, values=True) as source:
        model(OTHERS)
    with regard.intervene(model, patch(1, heads=2, what=what, source=source)):
        ours = model(TOKENS).logits
    assert max_difference(ours, model(TOKENS).logits) > 0.01
    assert max_difference(ours, theirs) < LIMIT * float(theirs.abs().max())


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_input_of_one_head(family, what):
    model, bridge = build_both(family, num_key_value_heads=4)
    direction = torch.randn(2, 30, 64, generator=torch.Generator().manual_seed(5))
    bridge.set_use_split_qkv_input(True)

    def add(inputs, hook):
        inputs = inputs.clone()
        inputs[:, :, 2] += direction
        return inputs

    theirs = bridge.run_with_hooks(TOKENS, fwd_hooks=[(f"blocks.1.attn.hook_{what[0]}_input", add)])
    with regard.intervene(
        model, patch_input(1, heads=2, what=what, change=lambda stream: stream + direction)
    ):
        ours = model(TOKENS).logits
    assert max_difference(ours, model(TOKENS).logits) > 0.01
    assert max_difference(ours, theirs) < LIMIT * float(theirs.abs().max())


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("family", FAMILIES)
def test_direct_paths(family, what):
    model, bridge = build_both(family, num_key_value_heads=4)
    (_, clean), (_, corrupted) = (bridge.run_with_cache(tokens) for tokens in (OTHERS, TOKENS))

    def metric(logits):
        return logits[:, -1, 5].sum() - logits[:, -1, 7].sum()

    theirs = get_act_patch_direct_path(bridge, TOKENS, clean, corrupted, metric, 0, 1, what[0], verbose=False)
    with regard.watch(model, values=True) as other:
        model(OTHERS)
    with regard.watch(model, values=True) as own:
        model(TOKENS)
    name = next(iter(own))
    outputs = [recording.calls(name)[0].output[:, 1] for recording in (other, own)]
    written = (outputs[0] - outputs[1]) @ circuits(model, TOKENS).weights(0, 1).W_O
    changes = []
    for layer in (1, 2):
        for head in range(4):
            edit = patch_input(layer, heads=head, what=what, change=lambda stream: stream + written)
            with regard.intervene(model, edit):
                ours = metric(model(TOKENS).logits)
            changes.append(abs(float(theirs[layer, head] - metric(bridge(TOKENS)))))
            assert abs(float(ours - theirs[layer, head])) < LIMIT * float(bridge(TOKENS).abs().max())
    assert max(changes) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_edits_of_a_bridge_itself(family):
    bridge = bridge_from(build(family, "eager"))

    def clear(z, hook):
        z[:, :, 2] = 0
        return z

    def mask(scores, hook):
        scores[:, 2, 20:, 5:9] = -torch.inf
        return scores

    for edit, name, hook in (
        (ablate(1, heads=2), "blocks.1.attn.hook_z", clear),
        (
            knockout(1, heads=2, queries=slice(20, None), keys=slice(5, 9)),
            "blocks.1.attn.hook_attn_scores",
            mask,
        ),
    ):
        theirs = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, hook)])
        with regard.intervene(bridge, edit):
            ours = bridge(TOKENS)
        assert max_difference(ours, theirs) < LIMIT * float(theirs.abs().max())
        assert max_difference(ours, bridge(TOKENS)) > 0.01
