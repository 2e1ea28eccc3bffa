"""The trained induction model: what it loses without its previous-token head, and without its induction edges."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import regard  # noqa: E402
from examples.induction import draw_repeats, load  # noqa: E402
from regard.interventions import ablate, effects, knockout, restrict  # noqa: E402

SEED = 20_261_116
CHANCE = 1 / 128


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(scope="module")
def repeats():
    return draw_repeats(24, SEED)


def measure_accuracy(model, repeats, *edits):
    """Return how often the next token is right where it repeats an earlier one."""
    with torch.no_grad(), regard.intervene(model, edits):
        guess = model(repeats.tokens)[:, :-1].argmax(-1)
    counted = repeats.source[:, :-1] >= 0
    # The first tokens of the second copy do not show yet that it is one.
    counted &= counted.roll(1, 1) & counted.roll(2, 1)
    return float((guess == repeats.tokens[:, 1:])[counted].float().mean())


@pytest.fixture(scope="module")
def heads(model, repeats):
    """The previous-token head and the induction head, found by their weights."""
    with torch.no_grad(), regard.watch(model) as recording:
        model(repeats.tokens)
    table = recording.heads(repeats.tokens)
    previous = table.filter(layer=0).sort("previous")[0]
    induction = table.filter(layer=1).sort("induction")[0]
    return (0, previous["head"]), (1, induction["head"])


def test_ablating_any_other_head_leaves_the_repeat(model, repeats, heads):
    """The last layer has three heads with induction weights of about 0.9: each can do without one of the others."""
    previous, _ = heads
    accuracy = {
        (layer, head): measure_accuracy(model, repeats, ablate(layer, heads=head))
        for layer in range(2)
        for head in range(model.config.heads)
    }
    assert measure_accuracy(model, repeats) > 0.99
    assert accuracy.pop(previous) < 0.2
    assert min(accuracy.values()) > 0.9


def test_without_its_edges_the_model_guesses(model, repeats, heads):
    (previous_layer, previous_head), (layer, _) = heads
    # Every query but its own predecessor.
    others = regard.sliding_window(1) | ~regard.sliding_window(left=1, right=0)
    assert (
        measure_accuracy(model, repeats, restrict(previous_layer, heads=previous_head, mask=others))
        < 4 * CHANCE
    )
    assert measure_accuracy(model, repeats, restrict(previous_layer, mask=others)) < 2 * CHANCE
    induction = (
        torch.nn.functional.one_hot(repeats.source.clamp(min=0), 64).bool() & (repeats.source >= 0)[..., None]
    )
    kept = restrict(layer, mask=regard.masks.dense(~induction[:, None]))
    assert measure_accuracy(model, repeats, kept) < 2 * CHANCE
    # As many other edges of the same rows do not matter.
    shifted = regard.masks.dense(~induction[:, None].roll(3, -1))
    assert measure_accuracy(model, repeats, restrict(layer, mask=shifted)) > 0.9


def test_knocking_out_the_edges_of_one_sequence(model, repeats, heads):
    layer, entry = heads[1][0], 0
    one = type(repeats)(*(part[:1] for part in repeats))
    edges = [
        knockout(layer, queries=query, keys=key)
        for query, key in enumerate(one.source[entry].tolist())
        if key >= 0
    ]
    assert measure_accuracy(model, one) == 1.0
    assert measure_accuracy(model, one, *edges) < 0.1


def test_effects_rank_the_two_heads_first(model, repeats, heads):
    counted = repeats.source[:, :-1] >= 0

    def measure_loss(logits):
        copies = len(logits) // len(repeats.tokens)
        tokens, kept = repeats.tokens.repeat(copies, 1), counted.repeat(copies, 1)
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
        return (losses * kept).sum(1) / kept.sum(1)

    table = effects(model, repeats.tokens, measure_loss)
    assert len(table) == 2 * model.config.heads
    ranked = [(row["layer"], row["head"]) for row in table.sort("effect")]
    assert ranked[0] == heads[0] and ranked[1] == heads[1]
    ordered = table.sort("effect").column("effect")
    assert ordered[0] > 1.5 * ordered[1]
