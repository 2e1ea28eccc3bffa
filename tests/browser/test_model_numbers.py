"""The model of the page in Node: its numbers are those of PyTorch, whatever was computed before."""

from __future__ import annotations

import json

import numpy as np
import pytest

from regard.interventions import ablate
from tests.helpers.pages import HOSTILE
from tests.helpers.story_model import draw_sentences, load_numpy, run_javascript, run_torch, window

pytest.importorskip("torch")
pytest.importorskip("safetensors")

STATED = 1e-5  # on the page: probabilities agree with PyTorch's to 0.00001
READ_ALL = """
for (const [text, off] of SENTENCES) {
  const tokens = tokenizer.encode(text), excess = tokens.length - 192;
  model.read(tokens.subarray(excess > 0 ? 64 * Math.ceil(excess / 64) : 0), Uint8Array.from(off));
  put(model.guess());
  put(model.maps());
  const last = model.guess().length / 2560 - 1;
  put(Array.from({ length: model.places }, (_, place) => [...model.guessAt(place, last)]).flat());
}
"""


def in_javascript(sentences, folder, offs=None):
    """Read each sentence in the model of the page; `offs` are the numbers of the heads that are off for each."""
    heads = [[int(pair in off) for pair in range(32)] for off in offs or [()] * len(sentences)]
    script = READ_ALL.replace("SENTENCES", json.dumps(list(zip(sentences, heads, strict=True))))
    arrays = run_javascript(script, folder)
    return [
        dict(zip(("guess", "maps", "lens"), arrays[i : i + 3], strict=True)) for i in range(0, len(arrays), 3)
    ]


def test_50_sentences_agree_with_pytorch(tmp_path):
    sentences = draw_sentences(50)
    assert len(set(sentences)) >= 45
    errors = {"guess": [], "maps": [], "lens": []}
    for text, found in zip(sentences, in_javascript(sentences, tmp_path), strict=True):
        exact, eager = (run_torch(window(text), dtype) for dtype in ("float64", "float32"))
        for name, kept in errors.items():
            own = np.abs(found[name] - exact[name].ravel()).max()
            kept.append((own, np.abs(eager[name] - exact[name]).max()))
            assert np.abs(found[name] - eager[name].ravel()).max() < STATED, (name, text)
    for name, pairs in errors.items():
        own, eager = np.max(pairs, 0)
        assert own <= 2 * eager + 1e-12, name  # the error rule: twice that of an eager computation
        assert own < 1e-7, name  # computed in float64; maps are sent as float32


def test_20_removals_of_heads_agree_with_numpy(tmp_path):
    rng, changes = np.random.default_rng(7), []
    removals = [[int(pair)] for pair in rng.permutation(32)[:16]] + [
        rng.permutation(32)[:n].tolist() for n in (2, 3, 5, 8)
    ]
    sentences = draw_sentences(40)[20:]
    for text, off, found in zip(
        sentences, removals, in_javascript(sentences, tmp_path, removals), strict=True
    ):
        expected = load_numpy()(text, off=[divmod(pair, 8) for pair in off])
        np.testing.assert_allclose(found["guess"], expected.guesses[-1].ravel(), rtol=0, atol=1e-7)
        np.testing.assert_allclose(found["lens"], expected.guesses[:, -1].ravel(), rtol=0, atol=1e-7)
        changes.append(np.abs(load_numpy()(text).guesses[-1] - expected.guesses[-1]).max())
    assert min(changes) > 1e-6 and max(changes) > 1e-2


def test_a_head_that_is_off_is_an_ablated_head(tmp_path):
    text = "Zobi and Rumo went to the park. Zobi had a kite, and gave it to"
    (found,) = in_javascript([text], tmp_path, [[8 * 3 + 2]])
    expected = run_torch(window(text), "float64", ablate(3, heads=2))
    np.testing.assert_allclose(found["guess"], expected["guess"].ravel(), rtol=0, atol=1e-7)


def test_tokens_are_those_of_python(tmp_path):
    sentences = [
        *draw_sentences(50),
        *HOSTILE,
        "".join(map(chr, range(300))),
        "a\n\n b\n  c \n",
        " ",
        "\n ",
        "\r\n x\r y",
    ]
    texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in sentences]
    script = f"""const back = [];
for (const text of {json.dumps(texts)}) {{
  const tokens = tokenizer.encode(text);
  put(tokens);
  back.push(tokenizer.decode(tokens));
}}
put(new TextEncoder().encode(JSON.stringify(back)));"""
    *found, back = run_javascript(script, tmp_path)
    gpt = load_numpy()
    assert [tokens.astype(int).tolist() for tokens in found] == [gpt.encode(text) for text in texts]
    assert json.loads(bytes(back.astype(np.uint8))) == [gpt.decode(gpt.encode(text)) for text in texts]


EXPLAIN = """
model.read(tokenizer.encode(TEXT));
for (const [pair, i, j] of CELLS) {
  const found = model.explain(pair, i, j), { written } = found;
  put([...found.query, ...found.key, ...found.value, ...found.share, ...found.output]);
  put([found.scale, found.score, found.weight, found.shift, found.total, found.others,
       written.norm, written.head, written.stream]);
  put(found.keys);
  put([...found.scores, ...found.weights]);
  put([...written.promoted.flat(), ...written.suppressed.flat()]);
}
"""


def test_the_steps_of_a_weight_are_those_of_numpy(tmp_path):
    gpt, text = load_numpy(), "Zobi and Rumo went to the park. Zobi had a kite, and gave it to"
    run, P = gpt(text), gpt.parameters
    n, rng = len(run.tokens), np.random.default_rng(1)
    cells = [(int(rng.integers(32)), int(i), int(rng.integers(i + 1))) for i in rng.integers(0, n, 12)]
    cells += [(31, n - 1, 0), (0, 0, 0)]
    arrays = run_javascript(
        EXPLAIN.replace("TEXT", json.dumps(text)).replace("CELLS", json.dumps(cells)), tmp_path
    )
    for (pair, i, j), (vectors, numbers, keys, row, changes) in zip(
        cells, zip(*[iter(arrays)] * 5, strict=True), strict=True
    ):
        layer, head = divmod(pair, 8)
        Q, K, V, A = (getattr(run, name)[layer, head] for name in ("query", "key", "value", "weights"))
        share, output = A[i, j] * V[j], A[i] @ V
        np.testing.assert_allclose(
            vectors, np.concatenate([Q[i], K[j], V[j], share, output]), rtol=0, atol=1e-12
        )
        scores = Q[i] @ K[: i + 1].T / np.sqrt(32)
        out = P[f"layers.{layer}.attention.out_proj.weight"][:, 32 * head : 32 * head + 32]
        written, stream = out @ share, run.stream[2 * layer, i]
        norms = [np.linalg.norm(x) for x in (written, out @ output, stream)]
        expected = [
            32**-0.5,
            scores[j],
            A[i, j],
            scores.max(),
            np.exp(scores - scores.max()).sum(),
            max(0, i + 1 - 8),
            *norms,
        ]
        np.testing.assert_allclose(numbers, expected, rtol=1e-10, atol=1e-12)
        keys = keys.astype(int)
        assert (
            j in keys
            and set(np.argsort(-scores, kind="stable")[:7]) <= set(keys)
            and (np.diff(keys) > 0).all()
        )
        np.testing.assert_allclose(row, [*scores[keys], *A[i, keys]], rtol=1e-10, atol=1e-12)
        last = run.stream[-1, i]
        logits = P["unembedding.weight"] @ (written / np.sqrt((last**2).mean() + 2.0**-23) * P["norm.weight"])
        logits -= logits.mean()
        np.testing.assert_allclose(changes[1::2], logits[changes[::2].astype(int)], rtol=0, atol=1e-10)
        np.testing.assert_allclose(changes[1:10:2], np.sort(logits)[::-1][:5], rtol=0, atol=1e-10)
        np.testing.assert_allclose(changes[11::2], np.sort(logits)[:5], rtol=0, atol=1e-10)


EDITS = """
const texts = ["The cat sat", "The cat sat on", "The dog sat on the mat", "The", "A cat", "The dog sat on the mat", ""];
const offs = [[], [3], [3], [0, 31], [], [7], []];
texts.forEach((text, i) => {
  const tokens = tokenizer.encode(text);
  const off = Uint8Array.from({ length: 32 }, (_, pair) => Number(offs[i].includes(pair)));
  const fresh = create();
  for (const used of [model, fresh]) {
    used.read(tokens, off);
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
    script += "put(places.map((place) => drawToken(shapeGuess(guess, 1, 256), place)));\n"
    *found, drawn = run_javascript(script, tmp_path)
    for (temperature, k), shaped in zip(cases, found, strict=True):
        logits = np.log(guess) / max(temperature, 1e-9)
        logits[np.argsort(-guess, kind="stable")[k:]] = -np.inf
        expected = np.exp(logits - logits.max())
        np.testing.assert_allclose(shaped, expected / expected.sum(), rtol=1e-12, atol=1e-300)
    shares = np.bincount(drawn.astype(int), minlength=256) / 1000
    np.testing.assert_allclose(shares, guess, atol=1.01e-3)
