"""Compare a random run with eager attention in float64, under the error rule."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

import regard
import regard.transformers  # registers the implementation
from regard.testing.tolerance import ErrorBound, epsilon
from tests.helpers.drawn_edits import DrawnEdit, draw_edits
from tests.helpers.eager_history import EagerRun, ExpectedState, LayerCall, Token
from tests.helpers.random_runs import FAMILIES, MODES, Run, Tensors, build_inputs

EPSILON = epsilon("float32")
ATTEMPTS = 5


class Reference(NamedTuple):
    """The same run with eager attention, in float64 and in float32.

    Args:
        exact: What the run returned in float64.
        naive: What it returned in float32.
        exact_run: Its calls in float64.
        naive_error: The largest error of a weight in float32.
        edits: The edits.
        seed: The seed of inputs and chance.
    """

    exact: Tensors
    naive: Tensors
    exact_run: EagerRun
    naive_error: float
    edits: list[DrawnEdit]
    seed: int


def check_run(run: Run) -> None:
    """Check one run.

    Raises:
        AssertionError: If weights, tokens or logits differ from eager attention by more than the error rule allows.
    """
    with torch.no_grad():
        reference = find_reference(run)
        {"watch": check_recording, "edit": check_edits, "implementation": check_implementation}[run.check](
            run, reference
        )


def find_reference(run: Run) -> Reference:
    """Run with eager attention; draw again if rounding decides which tokens are generated."""
    for attempt in range(ATTEMPTS):
        seed = run.seed + attempt
        edits = draw_run_edits(run, seed) if run.check == "edit" else []
        exact, exact_run = run_eagerly(run, seed, edits, torch.float64)
        naive, naive_run = run_eagerly(run, seed, edits, torch.float32)
        if have_same_tokens(exact, naive):
            error = compute_naive_error(exact_run, naive_run)
            return Reference(exact, naive, exact_run, error, edits, seed)
    raise AssertionError(f"{run}: float32 and float64 generate different tokens in {ATTEMPTS} draws")


def decode(run: Run, model: Any, seed: int, *, source: bool = False) -> Tensors:
    """Run a model; with `source`, a single call on other inputs, from which patches are taken."""
    inputs = build_other_inputs(run, seed) if source else build_inputs(run, seed)
    dtype = next(model.parameters()).dtype
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    return MODES["forward" if source else run.mode].decode(model, cast, random.Random(seed))


def build_other_inputs(run: Run, seed: int) -> dict[str, Any]:
    """Build the inputs of the run that patches are taken from: other tokens, and the same padding."""
    inputs = build_inputs(run, seed)
    for name in ("input_ids", "pixel_values", "input_features"):
        if name in inputs:
            inputs[name] = (
                (inputs[name] % 50 + 3) * inputs["attention_mask"] if name == "input_ids" else -inputs[name]
            )
    return inputs


def run_eagerly(run: Run, seed: int, edits: list[DrawnEdit], dtype: torch.dtype) -> tuple[Tensors, EagerRun]:
    family = FAMILIES[run.family]
    own_softmax = [family.own_softmax] if family.own_softmax else []
    if any(edit.kind == "patch" for edit in edits):
        source = EagerRun(family.build("eager", dtype), (), own_softmax)
        with source.follow():
            decode(run, source.model, seed, source=True)
        edits = [replace(edit, source=source) for edit in edits]
    eager = EagerRun(family.build("eager", dtype), edits, own_softmax)
    with eager.follow():
        return decode(run, eager.model, seed), eager


def draw_run_edits(run: Run, seed: int) -> list[DrawnEdit]:
    """Draw the edits of a run; of the positions drawn, some may be those of tokens that it does not read."""
    family, inputs = FAMILIES[run.family], build_inputs(run, seed)
    tokens = inputs.get("input_ids")
    keys = {"pixels": 10, "audio": 11}.get(family.kind) or tokens.shape[1]
    rows = 7 if family.kind in ("pairs", "audio") else keys + (0 if run.mode == "forward" else 4)
    changes_batch = MODES[run.mode].changes_batch
    return draw_edits(
        random.Random(seed),
        family.list_layers(),
        family.heads,
        rows,
        keys,
        0 if changes_batch else run.batch,
        own_softmax=bool(family.own_softmax),
        patches=not family.own_softmax and not changes_batch,
        real=inputs.get("attention_mask"),
        has_mean=run.mode == "forward",
    )


def have_same_tokens(a: Tensors, b: Tensors) -> bool:
    return all(
        x.shape == y.shape and (x.is_floating_point() or torch.equal(x, y)) for x, y in zip(a, b, strict=True)
    )


def compute_naive_error(exact: EagerRun, naive: EagerRun) -> float:
    """Return the largest error of a weight that eager attention in float32 computes."""
    pairs: list[tuple[LayerCall, LayerCall]] = []
    for a, b in zip(exact.calls, naive.calls, strict=True):
        pairs += [(a.layers[name], b.layers[name]) for name in a.layers]
    for name, calls in exact.encoder_calls.items():
        pairs += zip(calls, naive.encoder_calls[name], strict=True)
    return max(float((a.weights - b.weights).abs().max()) for a, b in pairs)


# -- Comparisons


def check_outputs(run: Run, outputs: Tensors, reference: Reference) -> None:
    """Check tokens, which must be equal, and logits, whose error may be twice the largest of eager attention."""
    assert len(outputs) == len(reference.exact), (
        f"{run}: {len(outputs)} outputs, expected {len(reference.exact)}"
    )
    floats = [(a, b) for a, b in zip(reference.exact, reference.naive, strict=True) if a.is_floating_point()]
    finite = [(a[a.isfinite()], b[a.isfinite()]) for a, b in floats]
    naive_error = max(float((a - b).abs().max()) for a, b in finite)
    largest = max(float(a.abs().max()) for a, _ in finite)
    # The unit of rounding covers runs in which eager attention happens to be exact.
    allowed = 2 * naive_error + 4 * EPSILON * largest
    for n, (ours, exact) in enumerate(zip(outputs, reference.exact, strict=True)):
        assert ours.shape == exact.shape, (
            f"{run}: output {n} has shape {tuple(ours.shape)}, expected {tuple(exact.shape)}"
        )
        if not exact.is_floating_point():
            assert torch.equal(ours, exact), f"{run}: tokens\n{ours}\nexpected\n{exact}\n{reference.edits}"
            continue
        assert torch.equal(ours.isfinite(), exact.isfinite()), f"{run}: output {n} has other infinities"
        error = float((ours.double() - exact)[exact.isfinite()].abs().max())
        assert error <= allowed, (
            f"{run}: error {error:.2e} of output {n}, allowed {allowed:.2e}, eager {naive_error:.2e}; {reference.edits}"
        )


def check_recording(run: Run, reference: Reference) -> None:
    """Check what `watch` records, and that it leaves outputs bit-identical."""
    model = FAMILIES[run.family].build(FAMILIES[run.family].implementation)
    plain = decode(run, model, reference.seed)
    with regard.watch(model) as recording:
        outputs = decode(run, model, reference.seed)
    assert all(map(torch.equal, plain, outputs)), f"{run}: watch changed the outputs"
    check_outputs(run, outputs, reference)
    check_weights(run, recording, reference)


def check_edits(run: Run, reference: Reference) -> None:
    """Check what an edited model returns, and what its recording shows."""
    model = FAMILIES[run.family].build(FAMILIES[run.family].implementation)
    source = None
    if any(edit.kind == "patch" for edit in reference.edits):
        with regard.watch(model, values=True) as source:
            decode(run, model, reference.seed, source=True)
    with regard.intervene(
        model, [edit.build(source) for edit in reference.edits], record=True
    ) as intervention:
        outputs = decode(run, model, reference.seed)
    check_outputs(run, outputs, reference)
    check_weights(run, intervention.recording, reference)


def check_weights(run: Run, recording: Any, reference: Reference) -> None:
    """Check that the calls of a recording are states of the cache, in order, and leave no token out."""
    eager = reference.exact_run
    assert list(recording) == eager.layers, f"{run}: layers {list(recording)}, expected {eager.layers}"
    for name in eager.layers:
        calls, fitting = recording.calls(name), []
        for index, call in enumerate(calls):
            what = f"{run}, {name}, call {index} of {len(calls)}, {call.steps} steps, shape {call.shape}"
            weights = call.matrix.to_dense()
            fitting.append(find_states(what, weights, run, eager, name, reference.naive_error))
        required = eager.list_tokens(name)
        missing = required.difference(*(tokens for states in fitting for tokens in states.values()))
        assert not missing, f"{run}, {name}: {len(missing)} tokens have no row, the first {min(missing)}"
        # Several states may have the same weights, such as all on one key: any choice may be the right one.
        assert can_show(required, fitting), (
            f"{run}, {name}: calls show the model after its calls {list(map(list, fitting))}; they are not in order, "
            "or leave a token out"
        )


def can_show(
    required: set[Token],
    fitting: list[dict[int, set[Token]]],
    shown: frozenset[Token] = frozenset(),
    last: Token = Token(-1, 0, 0),  # noqa: B008
) -> bool:
    """Return whether states can be chosen for the calls of a recording that show all tokens, in order.

    Args:
        required: Tokens that must have a row.
        fitting: The states that each call may show: their tokens.
        shown: Tokens of the calls before.
        last: The first token that the call before was the first to show; calls are in the order of these.
    """
    if not fitting:
        return required <= shown
    for tokens in fitting[0].values():
        new = tokens - shown
        if new and min(new) > last and can_show(required, fitting[1:], shown | new, min(new)):
            return True
    return False


def find_states(
    what: str, weights: torch.Tensor, run: Run, eager: EagerRun, name: str, naive_error: float
) -> dict[int, set[Token]]:
    """Find the states of the cache, at the end of some call of the model, whose last rows a matrix shows.

    Keys are those of the state, unless a rolling cache evicted some, or a static one has room for more.

    Returns:
        The tokens of the rows by the number of the call, the last call first.

    Raises:
        AssertionError: If there is none within the error rule.
    """
    batch, heads, rows, columns = weights.shape
    most = 10**9 if FAMILIES[run.family].window else columns
    fewest = 1 if MODES[run.mode].is_static else columns
    found = {}
    best, closest = np.inf, "no state of the cache has this shape"
    for number, shape in reversed(eager.list_states(name)):
        if shape[:2] != (batch, heads) or shape[2] < rows or not fewest <= shape[3] <= most:
            continue
        state = eager.build_state(name, number)
        bound, actual = compute_bound(state, weights, naive_error, what)
        share = bound.compute_share(actual)
        if share <= 1:
            bound.check(actual)
            found[number] = {token for tokens in state.tokens for token in tokens[len(tokens) - rows :]}
        elif share < best:
            best = share
            error = np.abs(np.asarray(actual) - bound.definition)
            at = tuple(map(int, np.unravel_index(np.argmax(error), error.shape)))
            closest = (
                f"the state after call {number} of the model is closest, with an error of {error.max():.2e} at {at}, "
                f"{share:.1f} times what the error rule allows"
            )
    assert found, f"{what}: {closest}"
    return found


def compute_bound(
    state: ExpectedState, weights: torch.Tensor, naive_error: float, what: str
) -> tuple[ErrorBound, torch.Tensor]:
    """Compute the bound for a matrix that shows the last rows of a state, and the matrix where it attends to a key."""
    rows, columns = weights.shape[-2:]
    total = state.weights.shape[-1]
    expected = state.weights[:, :, -rows:]
    if columns <= total:  # a rolling cache holds the last keys
        expected = expected[..., total - columns :]
    else:  # a static cache has room for more
        expected = torch.nn.functional.pad(expected, (0, columns - total))
    return compute_weight_bound(expected, state.largest_score[:, :, -rows:], weights, naive_error, what)


def compute_weight_bound(
    expected: torch.Tensor, largest_score: torch.Tensor, weights: torch.Tensor, naive_error: float, what: str
) -> tuple[ErrorBound, torch.Tensor]:
    """Compute the bound of weights, and set those to 0 whose row attends to nothing, as padding does."""
    live = expected.sum(-1, keepdim=True) > 0
    score_error = (4 * EPSILON * (1 + largest_score[..., None])).numpy()
    bound = ErrorBound.compute(expected, expected, dtype="float32", score_error=score_error, what=what)
    return replace(bound, limit=bound.limit + 2 * naive_error), torch.where(live, weights, 0.0)


def check_implementation(run: Run, reference: Reference) -> None:
    """Check the weights that every call of a model with `attn_implementation="regard"` returns."""
    model = FAMILIES[run.family].build("regard")
    outputs, returned = decode_with_attentions(run, model, reference.seed)
    check_outputs(run, outputs, reference)
    calls = reference.exact_run.calls
    assert len(returned) == len(calls), f"{run}: {len(returned)} calls, expected {len(calls)}"
    for number, (attentions, call) in enumerate(zip(returned, calls, strict=True)):
        assert len(attentions) == len(call.layers), (
            f"{run}: weights of {len(attentions)} layers in call {number}"
        )
        for lazy, (name, layer) in zip(attentions, call.layers.items(), strict=True):
            what, weights = f"{run}, {name}, call {number}", lazy.to_dense()
            assert weights.shape == layer.weights.shape, (
                f"{what}: {weights.shape}, expected {layer.weights.shape}"
            )
            bound, actual = compute_weight_bound(
                layer.weights, layer.largest_score, weights, reference.naive_error, what
            )
            bound.check(actual)


def decode_with_attentions(run: Run, model: Any, seed: int) -> tuple[Tensors, list[list[Any]]]:
    """Run a model, and return the weights that each call of it returns as well, in the order of the layers."""
    returned: list[list[Any]] = []

    def list_attentions(module: Any, args: Any, output: Any) -> None:
        if getattr(output, "decoder_attentions", None) is None:
            returned.append(list(output.attentions))
        else:
            pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
            returned.append([weights for pair in pairs for weights in pair])

    hooks = [
        model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "output_attentions": True}), with_kwargs=True
        ),
        model.register_forward_hook(list_attentions),
    ]
    try:
        return decode(run, model, seed), returned
    finally:
        for hook in hooks:
            hook.remove()
