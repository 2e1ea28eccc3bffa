"""Check how a model uses its weights: norms without effect, and the rows of position tables that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from regard.capture.module_hints import is_position_table
from regard.diagnosis.call_log import LoggedCall, is_norm
from regard.diagnosis.subject import Subject
from regard.findings import Finding

Tensor = Any  # the types of torch are not followed

# Rows of a table of positions beyond the largest position: 2 in OPT and BART, for ids that are no positions.
MAX_EXTRA_ROWS = 4


def find_silent_norms(calls: Sequence[LoggedCall]) -> dict[str, nn.Module]:
    """Return the norms inside attention layers that were not called while their layer ran, by name.

    Args:
        calls: The calls of one forward pass.

    Returns:
        Those whose weights can be changed for an experiment: not sharded, and not without data.
    """
    called = {event.name for logged in calls for event in (*logged.norms, *logged.after)}
    found = {}
    for logged in calls:
        # Modules deeper inside, such as the compressors of DeepSeek V4, may need a longer text.
        for attribute, module in logged.owner.named_children():
            name = f"{logged.module}.{attribute}".lstrip(".")
            weights = list(module.parameters(recurse=False))
            if weights and name not in called and is_norm(name, module) and all(map(_is_changeable, weights)):
                found[name] = module
    return found


def _is_changeable(weight: Tensor) -> bool:
    """Return whether a weight is an ordinary tensor of floating-point numbers, which a DTensor is not."""
    return (
        type(weight) is nn.Parameter
        and weight.is_floating_point()
        and not weight.is_meta
        and weight.numel() > 0
    )


def check_silent_norms(
    subject: Subject, tokens: Tensor, base: Tensor, calls: Sequence[LoggedCall]
) -> list[Finding]:
    """Change the weights of norms that were not called, run again, and compare the outputs bit for bit.

    Args:
        subject: The model. Its weights are restored.
        tokens: (batch, n).
        base: The output of the tokens.
        calls: The calls of that pass.

    Returns:
        A warning for each attention layer with such norms, if none of them has an effect.
    """
    silent = find_silent_norms(calls)
    if not silent:
        return []
    with _changed(list(silent.values())):
        if not torch.equal(subject.run(tokens), base):
            return []  # the model reads some of them without calling the module
    findings = []
    for logged in {logged.module: logged for logged in calls}.values():
        prefix = f"{logged.module}." if logged.module else ""
        names = [name for name in silent if name.startswith(prefix)]
        if names:
            message = f"The layer does not call {' and '.join(names)}, and changing its weights does not change the "
            message += "output."
            hint = "Call it where the reference does: q_norm and k_norm on each head, before rotary positions. If "
            hint += "another mode of the model uses it, this is no fault."
            evidence = {"norms": ", ".join(names), "largest change of the output": 0.0}
            findings.append(
                Finding(
                    "weights without effect",
                    "warning",
                    message,
                    logged.module,
                    logged.layer,
                    evidence=evidence,
                    hint=hint,
                )
            )
    return findings


@contextmanager
def _changed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Add 1 to the weights of modules, and restore them."""
    weights = {
        weight: weight.detach().clone() for module in modules for weight in module.parameters(recurse=False)
    }
    try:
        with torch.no_grad():
            for weight in weights:
                weight.add_(1.0)
        yield
    finally:
        with torch.no_grad():
            for weight, original in weights.items():
                weight.copy_(original)


def find_long_tables(subject: Subject) -> dict[str, nn.Embedding]:
    """Return the position tables that have a few more rows than the configuration has positions, by name.

    Args:
        subject: The model.
    """
    modules = dict(subject.model.named_modules())
    found = {}
    for name, module in modules.items():
        if is_position_table(name, module):
            parts = name.split(".")
            around = [modules[".".join(parts[:depth])] for depth in range(len(parts) - 1, -1, -1)]
            limits = [
                getattr(getattr(one, "config", None), "max_position_embeddings", None) for one in around
            ]
            limit = next((limit for limit in limits if isinstance(limit, int)), 0)
            if limit and 0 < module.num_embeddings - limit <= MAX_EXTRA_ROWS:
                found[name] = module
    return found


def check_position_tables(subject: Subject, tokens: Tensor) -> list[Finding]:
    """Check that a position table with rows for an offset, as in OPT and BART, is not read from its first row.

    Args:
        subject: The model.
        tokens: (1, n), at least two, without padding.

    Returns:
        The findings.
    """
    tables, rows = find_long_tables(subject), dict[str, list[int]]()
    if not tables:
        return []

    def log_rows(name: str) -> Any:
        def find_rows(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.shape[-1] == module.embedding_dim:
                first = output.detach().reshape(-1, module.embedding_dim)[:2]
                equal = (first[:, None] == module.weight.detach()).all(-1)
                # A row that occurs twice, such as zeros, does not tell its position.
                rows[name] = equal.int().argmax(1).tolist() if bool((equal.sum(1) == 1).all()) else []

        return find_rows

    handles = [module.register_forward_hook(log_rows(name)) for name, module in tables.items()]
    try:
        subject.run(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return [
        Finding(
            "position table offset",
            "error",
            f"The first token reads row 0 of a table that has {tables[name].num_embeddings} rows: the offset of its "
            "positions was forgotten.",
            name,
            evidence={
                "rows": tables[name].num_embeddings,
                "rows read by the first tokens": ", ".join(map(str, found)),
            },
            hint="Add the offset to the positions, 2 in OPT and BART; the rows before it are for padding.",
        )
        for name, found in rows.items()
        if found == [0, 1]
    ]
