"""The model of children's stories in PyTorch and in Node, for the tests of its page."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from regard.explore.explorers import CONTINUATIONS
from regard.learn import TinyGPT
from regard.pages.encoding import encode_array
from tests.helpers.pages import run_in_node

CONTEXT = 192  # tokens, as in the page
NAMES = ["Lily", "Tom", "Max", "Mia", "the dog", "a little bird", "Grandma", "the old car"]
VERBS = ["loved", "saw", "wanted", "did not like", "found", "ran to"]
THINGS = ["the park", "a red ball", "her mom", "the big tree", "a cake", "it"]
OTHERS = [
    "L",
    "\n",
    "",
    *CONTINUATIONS,
    '"Can I play with you?" she asked. "Yes," said',
    "Café, naïve, 猫 and 🦊\tor\r\u2028 \0 this",
    "\n\n  two  spaces\n and lines \n",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "QWXZ {}[]|\\~ 0123456789",
    "The end.\nThe end.\nThe end.\nThe",
    " ".join(["One day the cat sat on the mat."] * 30),
]


def draw_sentences(count: int = 50) -> list[str]:
    """Draw sentences, always the same ones; the first are special."""
    rng = np.random.default_rng(24)
    sentences = list(OTHERS)
    while len(sentences) < count:
        parts = [
            f"{rng.choice(NAMES)} {rng.choice(VERBS)} {rng.choice(THINGS)}" for _ in range(rng.integers(1, 4))
        ]
        sentences.append(". ".join(part[0].upper() + part[1:] for part in parts))
    return sentences


@cache
def load_torch(dtype: str = "float32") -> Any:
    """Load the stored model in PyTorch; in float64, its norms keep the epsilon of float32."""
    import torch

    from regard.learn.gpt import load_stories

    model = load_stories()[0].to(getattr(torch, dtype))
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = float(np.finfo(np.float32).eps)
    return model


@cache
def load_numpy() -> TinyGPT:
    """Load the stored model in NumPy."""
    return TinyGPT()


def window(text: str) -> list[int]:
    """Return the tokens of a text that the page shows to the model."""
    tokens = load_numpy().encode(text)
    excess = len(tokens) - CONTEXT
    return tokens[-(-excess // 64) * 64 if excess > 0 else 0 :]


def run_torch(tokens: list[int], dtype: str = "float32", edit: Any = None) -> dict[str, np.ndarray]:
    """Return guesses (n, vocabulary), maps (layers · heads, n, n) and the last guess at each place of the stream."""
    import torch

    import regard

    model, given = load_torch(dtype), torch.tensor([tokens])
    stream = []

    def keep(module: Any, inputs: Any) -> None:
        stream.append(inputs[0])

    norms = [norm for layer in model.layers for norm in (layer.norm, layer.mlp[0])] + [model.norm]
    hooks = [norm.register_forward_pre_hook(keep) for norm in norms]
    try:
        if edit is None:
            logits, matrices = model(given, need_matrices=True)
        else:
            with regard.intervene(model, edit):
                logits, matrices = model(given, need_matrices=True)
    finally:
        for hook in hooks:
            hook.remove()
    lens = torch.stack([model.unembedding(model.norm(x))[0, -1] for x in stream])
    maps = np.concatenate([A.to_dense()[0].numpy() for A in matrices])
    return {"guess": logits.softmax(-1)[0].numpy(), "maps": maps, "lens": lens.softmax(-1).numpy()}


def run_javascript(script: str, folder: Path) -> list[np.ndarray]:
    """Run a script in Node with `model`, `create()`, `tokenizer` and `put(array)`; return what was put."""
    gpt = load_numpy()
    matrices, vectors = (
        np.concatenate([array.ravel() for array in gpt.stored.values() if array.ndim == axes])
        for axes in (2, 1)
    )
    shapes = {name: array.shape for name, array in gpt.stored.items()}
    start = f"""
import {{ appendFileSync }} from "node:fs";
const arrays = [["int8", "{encode_array(matrices).text}"], ["half", "{encode_array(vectors).text}"]];
const tensors = splitTensors({json.dumps(shapes)}, ...(await Promise.all(arrays.map((pair) => decodeArray(...pair)))));
const create = () => createTransformer({{ ...{json.dumps(dict(gpt.config))}, context: {CONTEXT} }}, tensors);
const tokenizer = createTokenizer({json.dumps(list(gpt.pieces))});
const model = create(), file = {json.dumps(str(folder / "arrays"))};
const put = (array) => appendFileSync(file, Buffer.from(Float64Array.from([array.length, ...array]).buffer));
"""
    run_in_node(start + script, "matrix/payload", "gpt/transformer", "gpt/sampling", "gpt/tokens")
    whole, arrays, at = np.fromfile(folder / "arrays"), [], 0
    while at < len(whole):
        arrays.append(whole[at + 1 : at + 1 + int(whole[at])])
        at += 1 + int(whole[at])
    return arrays
