"""Verification on the trained models of this repository: exact numbers, planted bad policies, and their repair."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

import regard
from regard.interventions.gradient_attribution import attribute_restriction
from regard.policy import FULL
from regard.policy.model_runner import PolicyRunner, PolicySpec, compare_logits
from tests.helpers.policy_checks import (
    INDUCTION_MODEL,
    INDUCTION_TOKENS,
    TEXT_MODEL,
    LocalVerifier,
    build_policy,
    draw_repeated,
    list_changes,
)

# The previous-token head, a head that needs its first keys, and an induction head of the induction model.
PREVIOUS, SINK, INDUCTION = (0, 0), (0, 3), (1, 0)
GOOD = {PREVIOUS: (4, 4), (0, 2): (16, 4)}


@pytest.fixture(scope="module")
def verifier():
    return LocalVerifier(INDUCTION_MODEL, draw_repeated(1, 6))


@pytest.fixture(scope="module")
def thorough():
    return LocalVerifier(INDUCTION_MODEL, draw_repeated(1, 4), tests=True)


def test_a_good_policy_holds(thorough):
    found = thorough.verify(build_policy(INDUCTION_MODEL, GOOD), 0.01)
    assert found.holds and 0 < found.kl < 0.01 and found.agreement > 0.95
    assert [(test["test"], test["able"], test["passed"]) for test in found.tests] == [
        ("copy", True, True),
        ("needle", True, True),
    ]
    assert "The policy holds" in str(found)


def test_a_windowed_induction_head_is_caught_and_exactly_it_is_restored(thorough):
    policy = build_policy(INDUCTION_MODEL, {**GOOD, INDUCTION: (8, 4)})
    found = thorough.verify(policy, 0.05)
    assert not found.holds and found.kl > 0.5
    assert {test["test"] for test in found.failed_tests} == {"copy", "needle"}
    mended, _ = thorough.tighten(policy, 0.05)
    assert list_changes(policy, mended) == [INDUCTION]
    assert mended.windows[INDUCTION] == FULL


@pytest.mark.nightly
def test_a_test_that_the_corpus_does_not_need_is_restored_by_its_own_effects(thorough):
    policy = build_policy(INDUCTION_MODEL, {**GOOD, INDUCTION: (8, 4)})
    found = thorough.verify(policy, 100.0, effects=True)
    assert found.kl < found.bound and not found.holds and "no longer passes" in found.verdict
    mended, _ = thorough.tighten(policy, 100.0)
    assert list_changes(policy, mended) == [INDUCTION]


@pytest.mark.nightly
def test_a_dropped_sink_is_caught_and_mended(verifier):
    kept, dropped = (build_policy(INDUCTION_MODEL, {**GOOD, SINK: (16, sinks)}) for sinks in (4, 0))
    assert verifier.verify(kept, 0.2).holds
    found = verifier.verify(dropped, 0.2, effects=True)
    assert not found.holds and found.effects.argmax() == np.ravel_multi_index(SINK, (2, 4))
    mended, _ = verifier.tighten(dropped, 0.2)
    assert list_changes(dropped, mended) == [SINK]


def test_a_previous_token_head_with_a_window_of_one_is_caught_and_mended(verifier):
    policy = build_policy(INDUCTION_MODEL, {**GOOD, PREVIOUS: (1, 0)})
    assert verifier.verify(policy, 0.05).kl > 0.5
    mended, rounds = verifier.tighten(policy, 0.05)
    assert list_changes(policy, mended) == [PREVIOUS] and rounds == 1
    assert (mended.windows[PREVIOUS], mended.sinks[PREVIOUS]) == (2, 0)


# -- Numbers -------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_effects_add_up_to_the_divergence(verifier):
    windows = {(layer, head): (8, 1) for layer in range(2) for head in range(4)}
    found = verifier.verify(build_policy(INDUCTION_MODEL, windows), 0.01, effects=True)
    assert found.effects.sum() == pytest.approx(found.kl, rel=0.25)
    one = verifier.verify(build_policy(INDUCTION_MODEL, {(0, 3): (16, 4)}), 0.01, effects=True)
    assert one.effects.sum() == pytest.approx(one.kl, rel=0.05)
    assert np.count_nonzero(one.effects) == 1


def keep_window(window, sinks):
    return (
        regard.sliding_window(window) | regard.masks.first(sinks) if sinks else regard.sliding_window(window)
    )


def test_lost_weight_equals_that_of_the_dense_matrix(verifier):
    policy = build_policy(INDUCTION_MODEL, {(0, 1): (7, 3), (1, 2): (16, 0)})
    found = verifier.verify(policy, 1.0)
    totals, rows = np.zeros((2, 2, 4))
    for text in verifier.texts:
        with torch.no_grad(), regard.watch(verifier.loaded.model) as recording:
            verifier.loaded.forward(verifier.loaded.encode(text, INDUCTION_TOKENS))
        for layer, name in enumerate(policy.layers):
            weights = recording[name].to_dense().double().numpy()[0]
            n = weights.shape[-1]
            for head in range(4):
                window, sinks = int(policy.windows[layer, head]), int(policy.sinks[layer, head])
                if window == FULL:
                    continue
                kept = (regard.causal() & keep_window(window, sinks)).to_dense(n, n)
                totals[layer, head] += weights[head][~kept].sum()
                rows[layer, head] += (~kept & regard.causal().to_dense(n, n)).any(-1).sum()
    with np.errstate(invalid="ignore"):
        expected = totals / rows
    np.testing.assert_allclose(found.lost, expected, rtol=1e-5)


def test_the_masked_run_is_that_of_a_model_with_dense_masks(verifier):
    policy = build_policy(INDUCTION_MODEL, {(0, 1): (7, 3), (0, 2): (7, 3), (1, 0): (3, 0)})
    runner = PolicyRunner(verifier.loaded, PolicySpec("", policy))
    ids = verifier.loaded.encode(verifier.texts[0], INDUCTION_TOKENS).ids
    n = ids.shape[1]
    edits = [
        regard.interventions.restrict(
            name,
            heads=head,
            mask=regard.masks.dense(
                keep_window(int(policy.windows[layer, head]), int(policy.sinks[layer, head])).to_dense(n, n)
            ),
        )
        for layer, name in enumerate(policy.layers)
        for head in range(4)
        if policy.windows[layer, head] != FULL
    ]
    assert len(policy.edits()) == 2  # heads that keep the same keys share an edit
    with torch.no_grad(), regard.intervene(verifier.loaded.model, edits):
        expected = verifier.loaded.model(ids)[0]
    torch.testing.assert_close(runner.run_policy(ids, runner.run(ids)), expected, rtol=1e-4, atol=1e-4)


def test_logits_are_compared_token_by_token():
    generator = torch.Generator().manual_seed(0)
    plain, limited = torch.randn(2, 1100, 7, generator=generator, dtype=torch.float64)
    ids = torch.randint(7, (1100,), generator=generator)
    found = compare_logits(plain, limited, ids)
    p, q = plain.log_softmax(-1), limited.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    assert found["kl"] == pytest.approx(float(divergence.mean()), rel=1e-5)
    assert found["kl_max"] == pytest.approx(float(divergence.max()), rel=1e-5)
    assert found["agreement"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    expected = torch.nn.functional.cross_entropy(limited[:-1], ids[1:])
    assert found["policy_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert np.isnan(compare_logits(plain[:1], limited[:1], ids[:1])["loss"])


def test_a_restriction_of_nothing_has_no_parts(verifier):
    model = verifier.loaded.model
    ids = verifier.loaded.encode(verifier.texts[0], INDUCTION_TOKENS).ids
    wide = regard.interventions.restrict(0, mask=regard.sliding_window(1000))
    parts = attribute_restriction(model, lambda: model(ids).sum(), [wide])
    assert all(not part.any() for part in parts.values())


def test_another_model_is_refused(verifier):
    policy = build_policy(INDUCTION_MODEL, GOOD)
    other = regard.policy.CachePolicy(policy.windows[:, :2], policy.sinks[:, :2], policy.layers, {})
    with pytest.raises(regard.ArgumentError, match="of 4 heads"):
        verifier.verify(other, 0.01)
    missing = regard.policy.CachePolicy(
        np.vstack([policy.windows, policy.windows[:1]]),
        np.vstack([policy.sinks, policy.sinks[:1]]),
        (*policy.layers, "layers.9.attention"),
        policy.about,
    )
    with pytest.raises(regard.ArgumentError, match=r"layers\.9\.attention"):
        verifier.verify(missing, 0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"corpus": "none"}, "which does not exist"),
        ({"corpus": "broken.parquet"}, "is not valid Parquet"),
        ({"out": "thesis"}, r"contains 'a\.tex' but no settings\.json"),
        ({"executor": "spark"}, "executor 'spark'"),
        ({"model": lambda: None}, "cannot be pickled"),
        ({"bound": 0.0}, "bound 0"),
        ({"out": "out"}, "inside the corpus"),
        ({"model": TEXT_MODEL}, r"a model with the layer 'layers\.2\.attention'"),
    ],
)
def test_every_refusal_names_verify(arguments, words, tmp_path):
    """Whether the driver, the corpus or a worker process notices what is wrong."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/a.tex").touch()
    (tmp_path / "a.txt").write_text("some words")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    corpus = "" if arguments.get("out") == "out" else "*.txt"
    options = {"model": INDUCTION_MODEL, "corpus": corpus, "out": None, **arguments}
    paths = {name: options[name] and tmp_path / options[name] for name in ("corpus", "out")}
    paths["corpus"] = paths["corpus"] or tmp_path
    with pytest.raises(regard.ArgumentError, match=rf"policy\.verify: .*{words}"):
        build_policy(INDUCTION_MODEL, GOOD).verify(**options | paths)
