"""Save and load models of `regard.learn.gpt`: two small causal models built from `regard.nn` layers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regard.learn.gpt import GPT, GPTConfig

HERE = Path(__file__).parent


def save(model: GPT, path: str | Path, about: dict[str, Any] | None = None) -> None:
    """Save the weights in float16, with the config and `about` in the header of the file.

    Args:
        model: The model.
        path: The safetensors file to write.
        about: How the model was trained and what was measured, as JSON data.
    """
    from safetensors.torch import save_file

    halves = {name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {"config": json.dumps(asdict(model.config)), "about": json.dumps(about or {})}
    save_file(halves, path, metadata=metadata)


def load(name: str | Path = "induction") -> GPT:
    """Load a trained model in float32, in eval mode and without gradients.

    `model.config` has the sizes, `model.about` how it was trained and what was measured.

    Args:
        name: "induction" repeats sequences, "text" generates English bytes; or the path of a file that `save` wrote.

    Returns:
        The model.
    """
    from safetensors import safe_open

    path = HERE / f"{name}.safetensors" if Path(name).suffix == "" else Path(name)
    with safe_open(path, "pt") as file:
        header = file.metadata()
        weights = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118 - not a dict
    model = GPT(GPTConfig(**json.loads(header["config"])))
    model.load_state_dict(weights, strict=True)
    model.about = json.loads(header["about"])
    return model.eval().requires_grad_(False)
