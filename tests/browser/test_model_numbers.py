"""The model of the page in Node: its numbers are those of PyTorch, whatever was computed before."""

from __future__ import annotations

import json

import numpy as np
import pytest

from regard.interventions import ablate
from tests.helpers.story_model import draw_sentences, run_javascript, run_torch

pytest.importorskip("torch")
pytest.importorskip("safetensors")

STATED = 1e-5  # on the page: probabilities agree with PyTorch's to 0.00001
READ_ALL = """
for (const text of SENTENCES) {
  model.read(Uint8Array.from(text), OFF);
  put(model.guess());
  put(model.maps());
  const last = (guess) => guess.subarray(guess.length - 256);
  put(Float64Array.from(Array.from({ length: model.places }, (_, place) => [...last(model.guess(place))]).flat()));
}
"""


def in_javascript(sentences, folder, off=()):
    heads = json.dumps([int(pair in off) for pair in range(16)])
    script = READ_ALL.replace("SENTENCES", json.dumps([list(s) for s in sentences]))
    arrays = run_javascript(script.replace("OFF", f"Uint8Array.from({heads})"), folder)
    return [
        dict(zip(("guess", "maps", "lens"), arrays[i : i + 3], strict=True)) for i in range(0, len(arrays), 3)
    ]


def test_50_sentences_agree_with_pytorch(tmp_path):
    sentences = [sentence.encode()[:192] for sentence in draw_sentences(50)]
    assert len(set(sentences)) >= 45
    errors = {"guess": [], "maps": [], "lens": []}
    for text, found in zip(sentences, in_javascript(sentences, tmp_path), strict=True):
        exact, eager = (run_torch(text, dtype) for dtype in ("float64", "float32"))
        for name, kept in errors.items():
            own = np.abs(found[name] - exact[name].ravel()).max()
            kept.append((own, np.abs(eager[name] - exact[name]).max()))
            assert np.abs(found[name] - eager[name].ravel()).max() < STATED, (name, text)
    for name, pairs in errors.items():
        own, eager = np.max(pairs, 0)
        assert own <= 2 * eager + 1e-12, name  # the error rule: twice that of an eager computation
        assert own < 1e-7, name  # computed in float64; maps are sent as float32


@pytest.mark.parametrize(("layer", "head"), [(0, 1), (3, 2)])
def test_a_head_that_is_off_is_an_ablated_head(tmp_path, layer, head):
    text = b"Once upon a time, there was a little girl named Lily. One day, Li"
    (found,) = in_javascript([text], tmp_path, off={4 * layer + head})
    expected = run_torch(text, "float64", ablate(layer, heads=head))
    np.testing.assert_allclose(found["guess"], expected["guess"].ravel(), rtol=0, atol=1e-9)
    np.testing.assert_allclose(found["lens"], expected["lens"].ravel(), rtol=0, atol=1e-9)
    intact = run_torch(text, "float64")
    assert np.abs(intact["guess"] - expected["guess"]).max() > 1e-3


EDITS = """
const texts = ["The cat sat", "The cat sat on", "The dog sat on the mat", "The", "A cat", "The dog sat on the mat", ""];
const offs = [[], [3], [3], [0, 15], [], [7], []];
texts.forEach((text, i) => {
  const bytes = new TextEncoder().encode(text);
  const off = Uint8Array.from({ length: 16 }, (_, pair) => Number(offs[i].includes(pair)));
  const fresh = create();
  for (const used of [model, fresh]) {
    used.read(bytes, off);
    if (i % 2) used.guess(1); // some places are read now, the others later
    for (const array of [used.guess(), used.maps(), used.guess(4), used.guess(0)]) put(array);
  }
});
"""


def test_what_was_kept_gives_the_same_bits_as_a_fresh_start(tmp_path):
    arrays = run_javascript(EDITS, tmp_path)
    assert len(arrays) == 7 * 2 * 4
    for start in range(0, len(arrays), 8):
        for kept, fresh in zip(arrays[start : start + 4], arrays[start + 4 : start + 8], strict=True):
            np.testing.assert_array_equal(kept, fresh)


def test_temperature_and_top_k(tmp_path):
    rng = np.random.default_rng(3)
    guess = rng.dirichlet(np.full(256, 0.1))
    cases = [(1, 256), (0.5, 256), (2, 20), (0.2, 3), (1, 1), (0, 256)]
    script = f"const guess = Float64Array.from({guess.tolist()});\n" + "".join(
        f"put(shapeGuess(guess, {temperature}, {k}));\n" for temperature, k in cases
    )
    script += "const places = Array.from({ length: 1000 }, (_, i) => (i + 0.5) / 1000);\n"
    script += "put(places.map((place) => drawByte(shapeGuess(guess, 1, 256), place)));\n"
    *found, drawn = run_javascript(script, tmp_path)
    for (temperature, k), shaped in zip(cases, found, strict=True):
        logits = np.log(guess) / max(temperature, 1e-9)
        logits[np.argsort(-guess, kind="stable")[k:]] = -np.inf
        expected = np.exp(logits - logits.max())
        np.testing.assert_allclose(shaped, expected / expected.sum(), rtol=1e-12, atol=1e-300)
    shares = np.bincount(drawn.astype(int), minlength=256) / 1000
    np.testing.assert_allclose(shares, guess, atol=1.01e-3)
