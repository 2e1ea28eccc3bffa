"""The model of children's stories in PyTorch and in Node, for the tests of its page."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from regard.learn import TinyGPT
from regard.pages.encoding import encode_array
from tests.helpers.pages import run_in_node

NAMES = ["Lily", "Tom", "Max", "Mia", "the dog", "a little bird", "Grandma", "the old car"]
VERBS = ["loved", "saw", "wanted", "did not like", "found", "ran to"]
THINGS = ["the park", "a red ball", "her mom", "the big tree", "a cake", "it"]
OTHERS = [
    "L",
    "\n",
    "Once upon a time, there was a little girl named Lily. One day, Li",
    '"Can I play with you?" she asked. "Yes," said',
    "Café, naïve, 猫 and 🦊",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "QWXZ {}[]|\\~ 0123456789",
    "The end.\nThe end.\nThe end.\nThe",
    " ".join(["One day the cat sat on the mat."] * 6),
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

    from examples.stories import load_stories

    model = load_stories().to(getattr(torch, dtype))
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = float(np.finfo(np.float32).eps)
    return model


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
    """Run a script in Node with `model`, `create()` for another one, and `put(array)`; return what was put."""
    stored = TinyGPT()
    numbers = np.concatenate([array.ravel() for array in stored.parameters.values()]).astype(np.float16)
    shapes = {name: list(array.shape) for name, array in stored.parameters.items()}
    start = f"""
import {{ appendFileSync }} from "node:fs";
const tensors = splitTensors({json.dumps(shapes)}, await decodeArray("half", "{encode_array(numbers).text}"));
const create = () => createTransformer({{ ...{json.dumps(dict(stored.config))}, context: 192 }}, tensors);
const model = create(), file = {json.dumps(str(folder / "arrays"))};
const put = (array) => appendFileSync(file, Buffer.from(Float64Array.from([array.length, ...array]).buffer));
"""
    run_in_node(start + script, "matrix/payload", "gpt/transformer", "gpt/sampling")
    whole, arrays, at = np.fromfile(folder / "arrays"), [], 0
    while at < len(whole):
        arrays.append(whole[at + 1 : at + 1 + int(whole[at])])
        at += 1 + int(whole[at])
    return arrays
