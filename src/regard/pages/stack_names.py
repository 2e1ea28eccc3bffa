"""Names of the stacks of layers on a page."""

from __future__ import annotations


def stack_names(names: list[str]) -> dict[str, str]:
    """Return what distinguishes the layers of several stacks: the parts of their names that differ, without numbers.

    >>> stack_names(["encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross"])["decoder.0.cross"]
    'decoder cross'
    >>> stack_names(["layers.0.attn", "layers.1.attn"])
    {'layers.0.attn': '', 'layers.1.attn': ''}
    """
    parts = {name: [part for part in name.split(".") if not part.isdigit()] for name in names}
    depth = max(map(len, parts.values()))
    differ = [i for i in range(depth) if len({tuple(own[i : i + 1]) for own in parts.values()}) > 1]
    return {name: " ".join(own[i] for i in differ if i < len(own)) for name, own in parts.items()}
