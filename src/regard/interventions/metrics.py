"""Metrics: what a change is worth, one number for each batch entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument

Tensor = Any  # the types of torch are not followed
Metric = Callable[[Any], Tensor]


def logit_difference(answer: Any, wrong: Any = None, position: int = -1) -> Metric:
    """Return the metric logit(answer) − logit(wrong) at one position; without `wrong`, log-probability of the answer.

    Args:
        answer: Token id of the answer, or one for each batch entry: (batch,).
        wrong: Token id of a wrong answer, alike.
        position: Position of the token that predicts the answer; −1 is the last.

    Returns:
        A function from the output of a model (its logits, or an object that has them) to a tensor (batch,).

    >>> import torch
    >>> metric = logit_difference(answer=2, wrong=0)
    >>> metric(torch.tensor([[[0.0, 0.0, 0.0], [1.0, 0.0, 3.0]]]))
    tensor([2.])
    """
    return LogitDifference(
        _as_ids(answer, "answer"), None if wrong is None else _as_ids(wrong, "wrong"), position
    )


@dataclass(frozen=True, eq=False)
class LogitDifference:
    """logit(answer) − logit(wrong), or the log-probability of the answer, at one position."""

    answer: Tensor
    wrong: Tensor | None
    position: int

    @property
    def num_logits(self) -> int | None:
        """How many of the last logits are needed; None if that is not known."""
        return -self.position if self.position < 0 else None

    def __call__(self, output: Any) -> Tensor:
        logits = get_logits(output)[:, self.position]
        batch = len(logits)

        def pick(ids: Tensor) -> Tensor:
            ids = ids.to(logits.device)
            if ids.ndim and (not len(ids) or batch % len(ids)):
                raise ArgumentError(
                    "logit_difference",
                    received=f"{len(ids)} token ids for {batch} batch entries",
                    expected="one token id, or one for each batch entry",
                    hint="Pass as many answers as the inputs have batch entries.",
                )
            index = ids.repeat(batch // len(ids)) if ids.ndim else ids.expand(batch)
            return logits.gather(1, index[:, None])[:, 0]

        if self.wrong is None:
            return pick(self.answer) - logits.logsumexp(-1)
        return pick(self.answer) - pick(self.wrong)

    def __repr__(self) -> str:
        return "log-probability of the answer" if self.wrong is None else "logit(answer) − logit(wrong)"


def get_logits(output: Any) -> Tensor:
    """Return the logits of a model's output, (batch, n, vocabulary).

    Raises:
        ArgumentTypeError: If it has none.
    """
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        raise ArgumentTypeError(
            "logit_difference",
            received=f"an output of {describe_argument(output)}",
            expected="logits (batch, n, vocabulary), or an output that has them as .logits",
            hint="Load the model with its head, as AutoModelForCausalLM does, or write a metric of your own.",
        )
    return logits


def _as_ids(ids: Any, parameter: str) -> Tensor:
    tensor = torch.as_tensor(ids)
    if tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.ndim > 1:
        raise ArgumentError(
            "logit_difference",
            received=f"{parameter}={ids!r}",
            expected="a token id, or one for each batch entry",
            hint="tokenizer.encode(' Paris')[0] is the first token of a word.",
        )
    return tensor
