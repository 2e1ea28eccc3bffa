"""The GPT of the book in NumPy: its numbers are PyTorch's, and it says what is wrong with an argument."""

from __future__ import annotations

import numpy as np
import pytest

from regard import ArgumentError
from regard.learn import TinyGPT
from tests.helpers.story_model import draw_sentences, load_torch, run_torch

TEXT = "Once upon a time, there was a little girl named Lily. One day, Li"


@pytest.fixture(scope="module")
def gpt():
    return TinyGPT()


def test_shapes_and_sums(gpt):
    run = gpt(TEXT)
    n = len(TEXT)
    assert run.stream.shape == (9, n, 128) and run.weights.shape == (4, 4, n, n)
    assert run.guesses.shape == (9, n, 256) and bytes(run.tokens) == TEXT.encode()
    np.testing.assert_allclose(run.weights.sum(-1), 1, atol=1e-12)
    np.testing.assert_allclose(run.guesses.sum(-1), 1, atol=1e-12)
    assert not np.triu(run.weights, 1).any()


@pytest.mark.parametrize("text", [TEXT, *draw_sentences(12)[4:12]])
def test_numbers_are_those_of_pytorch(gpt, text):
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    text = text.encode()[:192]
    found, expected = gpt(text), run_torch(text, "float64")
    np.testing.assert_allclose(found.guesses[-1], expected["guess"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(
        found.weights.reshape(16, len(text), len(text)), expected["maps"], rtol=0, atol=1e-10
    )
    np.testing.assert_allclose(found.guesses[:, -1], expected["lens"], rtol=0, atol=1e-10)


def test_a_head_that_is_off_is_an_ablated_head(gpt):
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    from regard.interventions import ablate

    found = gpt(TEXT, off=[(1, 2), (3, 0)])
    expected = run_torch(TEXT.encode(), "float64", [ablate(1, heads=2), ablate(3, heads=0)])
    np.testing.assert_allclose(found.guesses[-1], expected["guess"], rtol=0, atol=1e-10)
    assert np.abs(found.guesses - gpt(TEXT).guesses).max() > 1e-3


def test_it_writes_what_pytorch_writes(gpt):
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    from examples.induction import decode, encode

    assert gpt.generate(TEXT, 12) == decode(load_torch().generate(encode(TEXT), 12))


def test_drawing_depends_on_seed_and_temperature(gpt):
    texts = {gpt.generate("The ", 8, temperature=1.5, seed=seed) for seed in range(4)}
    assert len(texts) == 4 and gpt.generate("The ", 8, temperature=1.5) in texts
    assert gpt.generate("The ", 8, temperature=1e-6) == gpt.generate("The ", 8)


@pytest.mark.parametrize("text", ["", b"", 3, None])
def test_a_text_is_needed(gpt, text):
    with pytest.raises(ArgumentError, match="expected a text of at least one character"):
        gpt(text)


@pytest.mark.parametrize("head", [(4, 0), (0, 4), (-1, 0)])
def test_an_unknown_head_is_refused(gpt, head):
    with pytest.raises(ArgumentError, match="expected a layer from 0 to 3 and a head from 0 to 3"):
        gpt("The", off=[head])
