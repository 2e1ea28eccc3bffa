"""Run a model on the inputs of an intervention, and metrics of its output."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.lens.recording import Recording
from regard.lens.watch import watch
from regard.models.loaded_model import call_model

# Relative difference up to which runs agree, by the bytes of a number. Models of float64 have norms that compute in
# float32.
TOLERANCES = {2: 3e-2, 4: 1e-4, 8: 1e-4}


def find_tolerance(model: nn.Module) -> float:
    """Return the relative difference up to which two runs of a model agree."""
    sizes = [parameter.element_size() for parameter in model.parameters() if parameter.is_floating_point()]
    return TOLERANCES[max(min(sizes, default=4), 2)]


def copy_cache(inputs: Mapping[str, Any], operation: str) -> dict[str, Any]:
    """Return keyword arguments with a copy of their cache: a run extends it, and the next one needs it as it was."""
    cached = {name: inputs[name] for name in ("past_key_values", "cache_params") if name in inputs}
    try:
        return {**inputs, **copy.deepcopy(cached)}
    except RuntimeError:
        raise ArgumentError(
            operation,
            received=f"inputs with {', '.join(cached)} that were computed with gradients",
            expected="a cache without gradients, which is copied for each run",
            hint="Fill it under torch.no_grad().",
        ) from None


def run_model(
    model: nn.Module,
    inputs: Any,
    operation: str,
    *,
    num_logits: int | None = None,
    require_grad: bool = False,
) -> Any:
    """Run a model, without a cache if it has one."""
    is_mapping = isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs)
    if not is_mapping and not isinstance(inputs, torch.Tensor):
        raise ArgumentTypeError(
            operation,
            received=f"inputs as {describe_argument(inputs)}",
            expected="a tensor, or a mapping with the keyword arguments of the model",
            hint='With a tokenizer: tokenizer(text, return_tensors="pt").',
        )

    def prepare(value: Any, name: str = "") -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and "mask" not in name
        # A clone, since a model may not write into a leaf of the graph.
        return value.detach().requires_grad_().clone() if require_grad and is_float else value

    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False, "logits_to_keep": num_logits}
    options = {name: option for name, option in options.items() if name in parameters and option is not None}
    if isinstance(inputs, torch.Tensor):
        return call_model(model, operation, [prepare(inputs)], options)
    given = {name: prepare(value, name) for name, value in copy_cache(inputs, operation).items()}
    return call_model(model, operation, [], options | given)


Tensor = Any  # the types of torch are not followed
Metric = Callable[[Any], Tensor]


def check_metric(metric: Any, operation: str) -> None:
    """Refuse a metric that is not a function."""
    if not callable(metric):
        raise ArgumentTypeError(
            operation,
            received=f"metric as {describe_argument(metric)}",
            expected="a function that maps the model's output to one number for each batch entry",
            hint="For example metric=lambda output: output.logits[:, -1, answer].",
        )


def record_run(model: nn.Module, run: Callable[[], Any], **options: Any) -> tuple[Any, Recording]:
    """Call a function that runs a model; return its result, and the recording of this thread's run."""
    watching = watch(model, **options)
    watching.binds_context = True
    with watching as recording:
        return run(), recording


def logit_difference(answer: Any, wrong: Any = None, position: int = -1) -> Metric:
    """Return the metric logit(answer) − logit(wrong) at one position; without `wrong`, log-probability of the answer.

    Args:
        answer: Token id of the answer, or one for each batch entry: (batch,).
        wrong: Token id of a wrong answer, in the same forms.
        position: Position of the token that predicts the answer; −1 is the last.

    Returns:
        A function that maps the output of a model (logits, or an object with `.logits`) to a tensor (batch,).

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
    """Return the logits of a model's output, (batch, n, vocabulary)."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        raise ArgumentTypeError(
            "logit_difference",
            received=f"an output of {describe_argument(output)}",
            expected="logits (batch, n, vocabulary), or an output with the attribute .logits",
            hint="Load the model with its head, as AutoModelForCausalLM does, or write your own metric.",
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
