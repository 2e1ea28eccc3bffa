"""The GPT of the book in NumPy: its numbers are PyTorch's, and it says what is wrong with an argument."""

from __future__ import annotations

import numpy as np
import pytest

from regard import ArgumentError
from regard.learn import TinyGPT
from tests.helpers.story_model import load_torch, run_torch

TEXT = "A girl named Zobi found a red hat in the park. The red hat now belongs to"
SENTENCES = [TEXT, "L", "\n", "Café, naïve, 猫", "QWXZ {}[]|\\~ 0123", "The end.\nThe end.\n  The end."]


@pytest.fixture(scope="module")
def gpt():
    return TinyGPT()


def test_shapes_and_sums(gpt):
    run = gpt(TEXT)
    n = len(run.tokens)
    assert run.stream.shape == (9, n, 256) and run.weights.shape == (4, 8, n, n)
    assert run.query.shape == run.key.shape == run.value.shape == (4, 8, n, 32)
    assert run.guesses.shape == (9, n, 2560) and run.tokens.tolist() == gpt.encode(TEXT)
    np.testing.assert_allclose(run.weights.sum(-1), 1, atol=1e-12)
    np.testing.assert_allclose(run.guesses.sum(-1), 1, atol=1e-12)
    np.testing.assert_allclose(run.next, run.guesses[-1, -1], atol=1e-15)
    assert not np.triu(run.weights, 1).any()


def test_weights_are_those_of_query_and_key(gpt):
    run = gpt(TEXT)
    scores = np.where(np.tri(len(run.tokens)), run.query @ run.key.swapaxes(-1, -2) / np.sqrt(32), -np.inf)
    expected = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(run.weights, expected / expected.sum(-1, keepdims=True), atol=1e-12)


@pytest.mark.parametrize("text", SENTENCES)
def test_tokens_are_pieces_of_the_text(gpt, text):
    tokens = gpt.encode(text)
    assert tokens[0] == 0 and gpt.pieces[0] == "\n"
    assert gpt.decode(tokens) == text.encode("ascii", "replace").decode()
    for at, token in enumerate(tokens):  # no longer piece fits
        rest = "".join(gpt.pieces[token] for token in tokens[at:])
        assert gpt.pieces[token] == max((p for p in gpt.pieces if rest.startswith(p)), key=len)


@pytest.mark.parametrize("text", SENTENCES)
def test_numbers_are_those_of_pytorch(gpt, text):
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    found, expected = gpt(text), run_torch(gpt.encode(text), "float64")
    np.testing.assert_allclose(found.guesses[-1], expected["guess"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(
        found.weights.reshape(32, *found.weights.shape[2:]), expected["maps"], rtol=0, atol=1e-10
    )
    np.testing.assert_allclose(found.guesses[:, -1], expected["lens"], rtol=0, atol=1e-10)


def test_a_head_that_is_off_is_an_ablated_head(gpt):
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    from regard.interventions import ablate

    found = gpt(TEXT, off=[(1, 2), (3, 0)])
    expected = run_torch(gpt.encode(TEXT), "float64", [ablate(1, heads=2), ablate(3, heads=0)])
    np.testing.assert_allclose(found.guesses[-1], expected["guess"], rtol=0, atol=1e-10)
    assert np.abs(found.guesses - gpt(TEXT).guesses).max() > 1e-3


def test_it_writes_what_pytorch_writes(gpt):
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    tokens = torch.tensor([gpt.encode(TEXT)])
    assert gpt.generate(TEXT, 12) == gpt.decode(load_torch().generate(tokens, 12)[0].tolist())


def test_drawing_depends_on_seed_and_temperature(gpt):
    texts = {gpt.generate("The ", 8, temperature=1.5, seed=seed) for seed in range(4)}
    assert len(texts) == 4 and gpt.generate("The ", 8, temperature=1.5) in texts
    assert gpt.generate("The ", 8, temperature=1e-6) == gpt.generate("The ", 8)


def test_tokens_may_be_those_of_a_run(gpt):
    run = gpt("The cat")
    assert np.array_equal(gpt(run.tokens).next, run.next)


@pytest.mark.parametrize("temperature", [-1, float("nan")])
def test_a_temperature_below_zero_is_refused(gpt, temperature):
    with pytest.raises(ArgumentError, match="expected a temperature of at least 0"):
        gpt.generate("The", 1, temperature=temperature)


@pytest.mark.parametrize("text", ["", b"", b"a", [], 3, None, [10**6], [-1], [1.5], ["a"], [[1, 2]]])
def test_a_text_is_needed(gpt, text):
    with pytest.raises(ArgumentError, match="expected a text of at least one character"):
        gpt(text)


@pytest.mark.parametrize("head", [(4, 0), (0, 8), (-1, 0), 1, (1,), (0.5, 0)])
def test_an_unknown_head_is_refused(gpt, head):
    with pytest.raises(ArgumentError, match="expected a layer from 0 to 3 and a head from 0 to 7"):
        gpt("The", off=[head])
