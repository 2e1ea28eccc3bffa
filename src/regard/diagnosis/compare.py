"""`compare`: find the first layer or module where two runs diverge, and what kind of difference it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from regard.capture.call import Call
from regard.diagnosis.call_comparison import (
    CallComparison,
    compare_calls,
    describe_moved_masks,
    find_common_tokens,
    find_setting_differences,
)
from regard.diagnosis.module_differences import (
    EventPair,
    ModuleDifference,
    TraceComparison,
    build_module_difference,
    find_fused_order,
)
from regard.diagnosis.tensor_relation import limit_rounding, relate
from regard.errors import ArgumentError, ArgumentTypeError, NotCapturedError, describe_argument
from regard.findings import Finding, Findings
from regard.lens.recording import Recording
from regard.lens.table import Table
from regard.lens.token_rows import as_token_lists
from regard.lens.watch import watch
from regard.render.table import Alignment, format_table

NUMBERS = ("query", "key", "value", "weights", "output")
# Kinds of layers that do not differ in effect.
AGREEING = ("no difference", "rounding", "equivalent")
PRINTED_LAYERS = 40


@dataclass(frozen=True, repr=False)
class Comparison:
    """Where two runs diverge, and the differences of all layers.

    Args:
        findings: The differences that do not follow from an earlier one, in layer order.
        layers: A table with one row for each call: `layer`, `module_a`, `module_b`, `call`, `kind`, the relative
            differences of `query`, `key`, `value` and `output`, and `weights`, the mean share of weight that moved. NaN
            means not recorded or not comparable.
        notes: Remarks on what was compared, such as lengths that differ.
        output: Relative difference of the output of the model; NaN if it was not compared.
        missing_output: Why the output of the model was not compared; empty if it was.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> recordings = []
    >>> for _ in range(2):
    ...     with regard.watch(layer) as recording:
    ...         output = layer(torch.ones(1, 3, 8))
    ...     recordings.append(recording)
    >>> comparison = regard.compare(*recordings)
    >>> comparison.kind, comparison.first
    ('no difference', None)
    """

    findings: Findings
    layers: Table
    notes: tuple[str, ...] = ()
    output: float = math.nan
    missing_output: str = ""

    @property
    def first(self) -> Finding | None:
        """The first difference; None if the runs agree up to rounding."""
        return self.findings[0] if self.findings else None

    @property
    def kind(self) -> str:
        """The kind of the first difference, or "no difference", "rounding" or "equivalent"."""
        if self.first is not None:
            return self.first.kind
        kinds = set(self.layers.column("kind")) | ({"rounding"} if self.output > 0 else set())
        return next((kind for kind in reversed(AGREEING) if kind in kinds), "no difference")

    @property
    def agrees(self) -> bool:
        """Whether the runs agree up to rounding."""
        return self.first is None

    @property
    def summary(self) -> str:
        """The result in one line."""
        count = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        if self.first is not None:
            layer = self.first.layer
            place = f"layer {layer}" if layer >= 0 else self.first.module or "the output"
            if self.first.kind in ("module", "NaN or inf") and self.first.module:
                place = self.first.module
            return f"The runs diverge in {place}: {self.kind}."
        rest = f"; {self.missing_output}" if self.missing_output else ""
        count += "" if self.missing_output else " and the output"
        if self.kind == "no difference":
            return f"No difference in {count}{rest}."
        sizes = [row[name] for row in self.layers for name in ("query", "key", "value", "output")]
        largest = max((size for size in (*sizes, self.output) if not math.isnan(size)), default=0.0)
        if self.kind == "rounding":
            return f"Only rounding differences in {count}, at most {largest:.1g} of a row's norm{rest}."
        return f"No effective difference in {count}: queries and keys differ, but their scores agree{rest}."

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values, for JSON."""
        return {
            "kind": self.kind,
            "agrees": self.agrees,
            "first": None if self.first is None else self.first.as_dict(),
            "findings": [finding.as_dict() for finding in self.findings],
            "notes": list(self.notes),
            "output": None if math.isnan(self.output) else self.output,
            "layers": [dict(row) for row in self.layers],
        }

    def table_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the table as texts: the names of its columns, and its rows.

        Empty columns are omitted, and so are modules of run B if they have the same names as in run A.
        """
        rows = self.layers
        same = all(row["module_a"] == row["module_b"] for row in rows)
        columns = ["layer", "module_a", *([] if same else ["module_b"])]
        columns += ["call"] if any(rows.column("call")) else []
        numbers = [name for name in NUMBERS if not all(math.isnan(row[name]) for row in rows)]
        texts = [
            [str(row[name]) for name in columns]
            + [row["kind"]]
            + [_format_size(row[name]) for name in numbers]
            for row in rows
        ]
        headers = ["module" if same and name == "module_a" else name for name in columns]
        return [*headers, "kind", *numbers], texts

    def __repr__(self) -> str:
        parts = [self.summary, *self.notes]
        blocks = ["\n".join(parts), *map(str, self.findings[:1])]
        headers, rows = self.table_rows()
        if rows:
            align: list[Alignment] = [
                "left" if name in ("module", "module_a", "module_b", "kind") else "right" for name in headers
            ]
            text = format_table(rows[:PRINTED_LAYERS], headers, align=align)
            more = len(rows) - PRINTED_LAYERS
            blocks.append(f"{text}\n… and {more:,} more layers" if more > 0 else text)
        others = self.findings[1:]
        if others:
            lines = [f"  {finding.where}: {finding.kind}. {finding.message}" for finding in others[:8]]
            more_text = [f"  … and {len(others) - 8} more"] if len(others) > 8 else []
            blocks.append("\n".join(["More differences:", *lines, *more_text]))
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        from regard.render import notebook

        headers, rows = self.table_rows()
        is_text = [name in ("module", "module_a", "module_b", "kind") for name in headers]
        items = [finding._item() for finding in self.findings[: notebook.MAX_ROWS]]
        findings = notebook.render_findings(" ".join([self.summary, *self.notes]), items)
        more = len(rows) - notebook.MAX_ROWS
        closing = f"… and {more:,} more layers" if more > 0 else ""
        return findings + notebook.render_table("", headers, rows[: notebook.MAX_ROWS], is_text, closing)


def _format_size(size: float) -> str:
    """Format a relative difference: two digits, "0" if there is none, a dash if it is unknown."""
    if math.isnan(size):
        return "–"
    return "0" if size == 0 else f"{size:.1e}" if size < 0.01 else f"{size:.2g}"


__all__ = ["compare"]

# If rounding has grown to this share of a vector, a difference may be no more than that.
GROWN_ROUNDING = 0.1
# Kinds of a layer's difference: something before may be the cause; it is if the input of the layer differs; it is not.
GENERIC = ("projection", "output", "weights")
VECTORS = ("scale", "rotary positions")
SETTINGS = ("mask", "bias", "softcap", "sinks", "dropout")


def compare(
    a: Recording | nn.Module,
    b: Recording | nn.Module,
    inputs: Any = None,
    *,
    inputs_b: Any = None,
    tokens_a: Any = None,
    tokens_b: Any = None,
) -> Comparison:
    """Compare two runs: find the first difference, its kind and likely cause, and list all attention layers.

    The runs may differ in the model (such as a port), the dtype, the library versions, or the use of a cache.
    `compare(model, port, inputs)` runs two models; recordings of runs are compared with `compare(recording_a,
    recording_b)`. Layers are matched by name, or in order if the names differ. Kinds of difference:

    - settings: "mask", "bias", "softcap", "sinks", "dropout", "scale";
    - vectors: "rotary positions", "position ids", "heads permuted", "kv heads reordered", "view or transpose",
      "projection";
    - modules: "module", the first module with equal inputs and different outputs, or the code between two modules: a
      norm, a feed-forward layer, an activation, the embedding, the unembedding;
    - "NaN or inf" in only one run, with the module where it began; reported before anything else;
    - data: "other tokens", "encoder states", "cache";
    - other: "output" (although everything before it agrees), "weights" (of a layer that computes its own softmax),
      "shape", "layers missing", "measures".

    If the runs agree, the kind is "no difference" (bit-identical), "rounding", or "equivalent": queries and keys
    differ, but not their scores. A difference counts as rounding if it is within twice the error rule's tolerance for
    the less precise dtype, relative to the norm of the rows, plus twice the difference in the previous layer. Padding
    is not compared.

    After the first difference, later layers differ because of it (kind "inherited"), so only differences in settings
    are reported. Record with `watch(values=True)` to compare values, the output of the model, and its modules. Such a
    recording holds the inputs and outputs of each module in the first pass, for at most 32 tokens. Modules inside
    torch's own `nn.MultiheadAttention` and `nn.Transformer…` layers are not recorded.

    Args:
        a: The reference run, if one is known to be correct: a recording, or a model.
        b: The other run.
        inputs: Inputs of the models: a tensor, or a mapping with their keyword arguments.
        inputs_b: Inputs of model B, if it needs different inputs.
        tokens_a: Tokens of run A, (n,) or (batch, n); rows from the first differing token onwards are not compared.
        tokens_b: Tokens of run B.

    Returns:
        The comparison: `first`, `kind`, `layers` (a table), `findings`, `notes`; `print` shows it.

    Raises:
        ArgumentTypeError: If an argument is neither a recording nor a model, or there are no inputs for a model.
        ArgumentError: If a recording is empty.

    >>> import regard, torch
    >>> def run(**options):
    ...     layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    ...     x = torch.linspace(-1, 1, 24).reshape(1, 3, 8)
    ...     torch.manual_seed(0)
    ...     layer._reset_parameters()
    ...     with torch.no_grad(), regard.watch(torch.nn.ModuleDict({"attn": layer})) as recording:
    ...         layer(x, x, x, need_weights=False, **options)
    ...     return recording
    >>> causal = {"attn_mask": torch.ones(3, 3).triu(1).bool(), "is_causal": True}
    >>> print(regard.compare(run(**causal), run()))
    The runs diverge in layer 0: mask.
    ...
    """
    inputs_b = inputs if inputs_b is None else inputs_b
    recordings = [_record(run, own) for run, own in ((a, inputs), (b, inputs_b))]
    for recording in recordings:
        if not len(recording):
            failures = [f": {failure.reason}" for failure in recording._uncaptured.values()]
            raise ArgumentError(
                "compare",
                received="an empty recording" + "".join(failures[:1]),
                expected="recordings of two runs",
                hint="Run the model inside the with block.",
            )
    models = [run if isinstance(run, nn.Module) else None for run in (a, b)]
    return _Comparer(recordings, models, tokens_a, tokens_b).run()


def _record(run: Any, inputs: Any) -> Recording:
    """Return a recording, or record a model on its inputs."""
    if isinstance(run, Recording):
        return run
    is_mapping = isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs)
    if not isinstance(run, nn.Module) or not (is_mapping or isinstance(inputs, torch.Tensor)):
        received = describe_argument(run)
        if isinstance(run, nn.Module):
            received = f"a model, and inputs as {describe_argument(inputs)}"
        raise ArgumentTypeError(
            "compare",
            received=received,
            expected="two recordings, or models with their inputs: a tensor, or a mapping of keyword arguments",
            hint="Call regard.compare(model_a, model_b, inputs), or record a run by `with regard.watch(model, "
            "values=True) as recording`; regard.load_recording reads one from a file.",
        )
    watching = watch(run, values=True)
    recording = watching._recording
    try:
        with torch.no_grad(), watching:
            run(**inputs) if is_mapping else run(inputs)
    except NotCapturedError:
        if not len(recording):  # otherwise compare reports the layers that are missing
            raise
    return recording


class _Comparer:
    """The state of a comparison: the findings so far, and what the last layer allows for rounding."""

    def __init__(self, recordings: Any, models: Any, tokens_a: Any, tokens_b: Any) -> None:
        self.a, self.b = recordings
        self.models = models
        self.token_flags: dict[int, Any] = {}  # (batch, n) by n: the rows of both runs that are not padding
        self.heads = 0
        self.trace: TraceComparison | None = None
        self.table, self.findings = Table(), list[Finding]()
        self.notes: list[str] = []
        self.previous = 0.0
        self.diverged = False
        self.is_causal = True
        self.scale_ratio = 0.0
        self.rows = self._count_common_tokens(tokens_a, tokens_b)

    def _count_common_tokens(self, tokens_a: Any, tokens_b: Any) -> int | None:
        """Return the number of first tokens that both runs share; None if all are, or the tokens are unknown."""
        if tokens_a is None or tokens_b is None:
            return None
        lists_a, lists_b = as_token_lists(tokens_a, "compare"), as_token_lists(tokens_b, "compare")
        if lists_a == lists_b:
            return None
        common = len(lists_a[0])
        for row_a, row_b in zip(lists_a, lists_b, strict=False):
            pairs = enumerate(zip(row_a, row_b, strict=False))
            common = min(common, next((i for i, (x, y) in pairs if x != y), min(len(row_a), len(row_b))))
        self.notes.append(
            f"The tokens differ from position {common} on; only the first {common} are compared."
            if common
            else "The first tokens already differ, so only settings are compared."
        )
        return common

    def run(self) -> Comparison:
        pairs, only_a, only_b = match_layers(list(self.a), list(self.b))
        renamed = [pair for pair in pairs if pair[0] != pair[1]]
        if renamed:
            self.notes.append(
                f"{len(renamed)} of {len(pairs)} layers have different names and are matched in order."
            )
        for layer, (name_a, name_b) in enumerate(pairs):
            self._compare_layer(layer, name_a, name_b)
        for names, word in ((only_a, "A"), (only_b, "B")):
            for name in names:
                self._report_missing(name, word)
        if self.rows is not None and all(finding.kind == "layers missing" for finding in self.findings):
            self._report_tokens()
        missing = [finding for finding in self.findings if finding.kind == "layers missing"]
        self.findings = [finding for finding in self.findings if finding.kind != "layers missing"]
        self._name_moved_masks(pairs)
        self._compare_modules(pairs)
        self._put_not_finite_first()
        findings = Findings([], f"{len(self.table)} layers")
        findings.extend([*self.findings, *missing])
        outputs = [] if self.trace is None else self.trace.outputs
        sizes = [pair.output_size for pair in outputs if not math.isnan(pair.output_size)]
        return Comparison(
            findings,
            self.table,
            tuple(self.notes),
            max(sizes, default=math.nan),
            self._explain_missing_output(),
        )

    def _compare_layer(self, layer: int, name_a: str, name_b: str) -> None:
        calls_a, calls_b = list(self.a.calls(name_a)), list(self.b.calls(name_b))
        fault = self._find_cache_fault(name_a, name_b, calls_a, calls_b)
        if fault is not None and not self.diverged:
            self._add(
                layer, 0, name_a, name_b, CallComparison((fault,), dict.fromkeys(NUMBERS, float("nan")))
            )
            return
        calls_a, calls_b = drop_repeated_calls(calls_a, calls_b)
        for index, (a, b) in enumerate(zip(calls_a, calls_b, strict=False)):
            self._compare_call(layer, index, name_a, name_b, a, b)
        if len(calls_a) != len(calls_b) and not self.diverged:
            message = f"The layer was called {len(calls_b)} times instead of {len(calls_a)}."
            hint = "Run both models equally often, on the same inputs."
            finding = Finding("shape", "error", message, hint=hint)
            self.findings.append(_locate(finding, layer, name_a, name_b))
            self.diverged = True

    def _compare_call(self, layer: int, index: int, name_a: str, name_b: str, a: Call, b: Call) -> None:
        lengths = [call.shape[-2:] for call in (a, b)]
        rows = self.rows if self.is_causal else 0
        self.heads = a.shape[-3]
        if lengths[0] == lengths[1] and a.query is not None and b.query is not None:
            flags = find_common_tokens(a, b, *lengths[0])[0].cpu()
            known = self.token_flags.get(flags.shape[1])
            if known is None or known.shape == flags.shape:
                self.token_flags[flags.shape[1]] = flags if known is None else known & flags
        found = compare_calls(a, b, layer=layer, previous=self.previous, rows=rows, diverged=self.diverged)
        ratio = b.scale / a.scale if a.scale else math.inf
        if self.diverged and math.isclose(ratio, self.scale_ratio, rel_tol=1e-5):
            # The first layer has the same ratio, as a cause of its own or made up for by the query.
            kept = tuple(difference for difference in found.differences if difference.kind != "scale")
            found = replace(found, differences=kept)
        self.scale_ratio = self.scale_ratio or ratio
        if any(finding.kind == "NaN or inf" for finding in self.findings):  # they spread
            kept = tuple(difference for difference in found.differences if difference.kind != "NaN or inf")
            found = replace(found, differences=kept)
        differs = lengths[0] != lengths[1] and bool(found.relations)
        if (
            differs
            and rows is None
            and not self.diverged
            and all(r.kind not in ("layout", "shape") for r in found.relations.values())
        ):
            found = self._limit_to_common_rows(layer, a, b, found)
        elif not self.diverged and layer == 0 and found.kind in ("projection", "other tokens"):
            found = self._check_positions(found)
        self._add(layer, index, name_a, name_b, found, whole=a.shape == b.shape)
        # Later tokens change the first rows of the next layer if this one is not causal.
        if self.rows and not is_causal(a, b, self.rows):
            self.is_causal = False

    def _limit_to_common_rows(self, layer: int, a: Call, b: Call, found: CallComparison) -> CallComparison:
        """Compare the first tokens only, if the lengths differ: as many as agree in the first layer."""
        shortest = min(a.shape[-2], b.shape[-2])
        relation = next(iter(found.relations.values()))  # of the queries, or the weights
        agree = shortest if relation.agrees else min(relation.rows, default=0)
        text = f"{b.shape[-2]:,} queries instead of {a.shape[-2]:,}"
        if a.query_offset != b.query_offset or layer:
            agree = 0
        self.rows = agree
        self.notes.append(
            f"B has {text}; the first {agree:,} rows are compared." if agree
            else f"B has {text}, and the first rows differ, so only settings are compared."
        )  # fmt: skip
        return compare_calls(a, b, layer=layer, previous=self.previous, rows=agree)

    def _check_positions(self, found: CallComparison) -> CallComparison:
        """Name another lookup of position embeddings as the cause, if there is one."""
        first, second = (_join_positions(recording) for recording in (self.a, self.b))
        if first is None or second is None or first.shape[-1] != second.shape[-1]:
            return found
        first, second = torch.broadcast_tensors(first, second)
        changed = (first != second).nonzero()
        if not len(changed):
            return found
        entry, row = int(changed[0, 0]), int(changed[0, 1])
        values = int(first[entry, row]), int(second[entry, row])
        place = f"token {row} of batch entry {entry}"
        message = f"The positions differ: {values[1]} instead of {values[0]} at {place}."
        hint = "Pass position_ids that do not count padding, and continue after the cached tokens."
        cause = replace(found.differences[0], kind="position ids", message=message, hint=hint)
        return replace(found, differences=(cause, *found.differences[1:]))

    def _find_cache_fault(
        self, name_a: str, name_b: str, calls_a: list[Call], calls_b: list[Call]
    ) -> Finding | None:
        """Find a cache that lost keys in one run, or calls that share a cache in one run only."""
        hint = "Append each step's keys and values to the cache of the same layer; see recording.diagnose()."
        pairs = ((self.a, name_a), (self.b, name_b))
        faults = [list(recording._cache_faults.get(name, ())) for recording, name in pairs]
        if bool(faults[0]) != bool(faults[1]):
            fault, word = (faults[0][0], "A") if faults[0] else (faults[1][0], "B")
            message = f"The cache of {word} is broken at call {fault.call}: {fault.kind}."
            evidence = {"tokens": fault.tokens, "added": fault.added}
            return Finding("cache", "error", message, hint=hint, evidence=evidence)
        joined = [recording._joined_calls[name] for recording, name in pairs]
        evicted = [
            sum(keys.shape[-2] for group in groups for keys in group.evicted_keys) for groups in joined
        ]
        calls_a, calls_b = drop_repeated_calls(calls_a, calls_b)
        if bool(evicted[0]) != bool(evicted[1]) and not _have_same_masks(calls_a, calls_b):
            word = "A" if evicted[0] else "B"
            message = f"The cache of {word} evicts {max(evicted)} keys that the other run keeps."
            return Finding("cache", "error", message, hint=hint, evidence={"evicted": max(evicted)})
        rows = [sum(call.shape[-2] for call in calls) for calls in (calls_a, calls_b)]
        steps = [max(call.steps for call in calls) for calls in (calls_a, calls_b)]
        if len(calls_a) != len(calls_b) and rows[0] == rows[1] and steps[0] != steps[1]:
            turned = _find_turned_cache(calls_a, calls_b)
            if turned is not None:
                return turned
            word = "A" if steps[0] > steps[1] else "B"
            message = f"The calls of {word} share one cache, but the calls of the other run do not."
            hint = "Start each sequence with an empty cache, and extend it in every step of the sequence."
            return Finding("cache", "error", message, hint=hint, evidence={"steps": max(steps)})
        return None

    def _add(
        self, layer: int, index: int, name_a: str, name_b: str, found: CallComparison, whole: bool = False
    ) -> None:
        """Add the row of a call, and its differences; `whole` states that all rows were compared."""
        differences, vectors = found.differences, found.relations.values()
        if differences:
            kind = found.kind
        elif self.diverged and (not whole or any(not relation.agrees for relation in vectors)):
            kind = "inherited"
        elif self.rows is not None and not vectors:
            kind = "other tokens"
        elif found.equivalent:
            kind = "equivalent"
        else:
            kind = "rounding" if found.largest > 0 else "no difference"
        # If the runs agree again, an earlier difference has no effect, as heads permuted with their projection.
        if not differences and kind in ("no difference", "rounding"):
            self.diverged = False
            self.previous = found.largest
        if differences and not self.diverged and self.previous > GROWN_ROUNDING:
            self.notes.append(
                f"Rounding differences reach {self.previous:.2g} before layer {layer} and may explain this finding. To "
                "rule that out, compare in a wider dtype."
            )
        if found.equivalent and found.equivalent not in self.notes:
            self.notes.append(found.equivalent)
        self.findings += [_locate(difference, layer, name_a, name_b) for difference in differences]
        self.diverged = self.diverged or bool(differences)
        row = {"layer": layer, "module_a": name_a, "module_b": name_b, "call": index, "kind": kind}
        self.table.append(row | {name: found.sizes.get(name, float("nan")) for name in NUMBERS})

    def _name_moved_masks(self, pairs: list[tuple[str, str]]) -> None:
        """Say so in the first finding if each layer of B has the mask of another layer of A."""
        if not self.findings or self.findings[0].kind != "mask":
            return
        masks = [
            [recording.calls(names[run])[0].compact_mask for names in pairs]
            for run, recording in enumerate((self.a, self.b))
        ]
        hint = describe_moved_masks(*masks)
        if hint:
            self.findings[0] = replace(self.findings[0], hint=hint)

    def _compare_modules(self, pairs: list[tuple[str, str]]) -> None:
        """Compare what modules returned, and name the first that differs if no better cause is known."""
        traces = self.a._trace, self.b._trace
        if not traces[0].events or not traces[1].events or self.rows == 0:
            return
        calls = [
            (x, y)
            for names in pairs
            for x, y in zip(self.a.calls(names[0]), self.b.calls(names[1]), strict=False)
            if x.query is not None and y.query is not None
        ]
        causal = all(is_causal(x, y, min(x.shape[-2], y.shape[-2])) for x, y in calls)
        self.trace = trace = TraceComparison(*traces, self.token_flags, self.rows, causal)
        first = self.findings[0] if self.findings else None
        if first is None:
            found = trace.find_first() if trace.differs else None
            self.findings += [] if found is None else [self._describe_module(found, -1)]
            return
        if first.rows and min(first.rows) >= trace.length and trace.differs:
            # Later passes read what the first one generated.
            found = trace.find_first()
            assert found is not None
            self.findings.insert(0, self._describe_module(found, -1))
            return
        span = trace.find_span(next(row["module_a"] for row in self.table if row["layer"] == first.layer))
        found = None if span is None else trace.find_first(span[1])
        if found is None or span is None:
            return
        position, start = found.pair.position, trace.pairs[span[0]]
        is_before = position < span[0] or (position == span[0] and not found.is_inside)
        reads_same = found.is_inside and not found.pair.reads_other_ids and found.pair.a.has_input
        if is_before and (
            first.kind in GENERIC
            or (first.kind in VECTORS and start.reads_others)
            or (first.kind == "other tokens" and reads_same)
        ):
            self.findings[0] = self._describe_module(found, first.layer)
            for row in self.table:
                if row["layer"] == first.layer and row["kind"] not in (
                    "no difference",
                    "rounding",
                    "inherited",
                ):
                    row["kind"] = self.findings[0].kind
        elif is_before and first.kind in SETTINGS and start.reads_others:
            self.findings.insert(0, self._describe_module(found, first.layer))
        elif first.kind == "projection" and not is_before:
            self.findings[0] = self._describe_projection(first, found)

    def _describe_module(self, found: ModuleDifference, layer: int) -> Finding:
        return build_module_difference(found, self._compare_weights(found.pair), layer, self.heads)

    def _describe_projection(self, finding: Finding, found: ModuleDifference) -> Finding:
        """Name the module of a projection that differs, whose input agrees."""
        pair, before = found.pair, found.before
        weights = self._compare_weights(pair) or "Compare its weights."
        hint = f"{pair.name} ({pair.class_name}) is the first module whose output differs. {weights}"
        if not found.is_inside:
            start = "" if before is None else f"the output of {before.name} agrees, but "
            hint = f"Compare the code before {pair.name}: {start}its input differs."
        hint = find_fused_order(pair, self.heads) or self._find_missing_modules(pair) or hint
        message = finding.message.replace(
            ", and the cause is before the attention of this layer.", ", but the input of the layer agrees."
        )
        return replace(finding, message=message, hint=hint)

    def _find_missing_modules(self, pair: EventPair) -> str:
        """Say which modules beside one ran in one run only, if modules are matched by name; else an empty text."""
        if self.trace is None or self.trace.matched_by != "name":
            return ""
        parent = pair.a.name.rpartition(".")[0]
        names = [
            {event.name for event in recording._trace.events if event.name.rpartition(".")[0] == parent}
            for recording in (self.a, self.b)
        ]
        for word, missing in (("A", names[0] - names[1]), ("B", names[1] - names[0])):
            if missing:
                return f"{', '.join(sorted(missing))} ran in {word} only."
        return ""

    def _compare_weights(self, pair: EventPair) -> str:
        """Say which weights of a module differ, if both models are known; else an empty text."""
        if None in self.models:
            return ""
        events = (pair.a, pair.b)
        modules = [model.get_submodule(event.name) for model, event in zip(self.models, events, strict=True)]
        first, second = (dict(module.state_dict()) for module in modules)
        names = [
            name
            for name in first
            if name not in second
            or first[name].shape != second[name].shape
            or not torch.allclose(first[name].double().cpu(), second[name].double().cpu(), 1e-2, 1e-6)
        ]
        names += [name for name in second if name not in first]
        if not names:
            return "Its weights agree: compare its settings and code." if first or second else ""
        return f"Its weights differ: {', '.join(names[:4])}{' …' * (len(names) > 4)}."

    def _put_not_finite_first(self) -> None:
        """Report NaN and inf that one run has before anything else, with the module in which they began."""
        finding = next((finding for finding in self.findings if finding.kind == "NaN or inf"), None)
        origins = [recording._trace.find_not_finite() for recording in (self.a, self.b)]
        places = [origin and (origin.event.name, origin.event.index) for origin in origins]
        sizes = [] if self.trace is None else [pair.output_size for pair in self.trace.outputs]
        if finding is None and (places[0] == places[1] or math.inf not in sizes):
            return  # none, the same in both, or in padding
        first = self.findings[0] if self.findings else None
        if first is not None and first.kind == "mask" and first.evidence.get("rows without a key"):
            self.findings = [x for x in self.findings if x.kind != "NaN or inf"]
            return  # the mask is why: softmax gives NaN for rows without a key
        layer = -1 if finding is None else finding.layer
        run = 0 if places[1] is None or (finding is not None and "unlike A's" in finding.message) else 1
        origin = origins[run]
        if origin is not None and places[0] != places[1]:
            elsewhere = origins[1 - run]
            other = (
                "" if elsewhere is None else f" In the other run they first appear {elsewhere.describe()}."
            )
            state = "whose input is finite" if origin.is_inside else "outside any module"
            message = f"{'AB'[run]} has NaN or inf, which first appear {origin.describe()}, {state}.{other}"
            known = f" {finding.message}" if finding is not None and "unknown" in finding.message else ""
            hint = "Check its weights and the size of its activations: float16 overflows above 65,504."
            if not origin.is_inside:
                hint = (
                    "Check the code between them, such as scores and softmax: float16 overflows above 65,504."
                )
            finding = Finding("NaN or inf", "error", message + known, origin.module, layer, hint=hint)
        assert finding is not None
        later = [
            x
            for x in self.findings
            if x.kind != "NaN or inf" and 0 <= x.layer < (layer if layer >= 0 else math.inf)
        ]
        self.findings = [finding, *(x for x in later if x.kind != "module")]

    def _explain_missing_output(self) -> str:
        """Say why the output of the model was not compared; empty if it was."""
        if self.trace is None:
            if not self.a._trace.events or not self.b._trace.events:
                return "the output of the model was not recorded: watch(values=True)"
            return "the output of the model was not compared, since the tokens differ"
        if self.trace.outputs:
            return ""
        roots = [[event for event in x._trace.events if not event.name] for x in (self.a, self.b)]
        if not roots[0] or not roots[1]:
            return "the model itself was not called, so its output was not recorded"
        return "the outputs of the models have different shapes and were not compared"

    def _report_missing(self, name: str, word: str) -> None:
        other = "B" if word == "A" else "A"
        message = f"{name!r} ran in {word} only."
        hint = f"{other} has fewer layers, or watch(layers=…) does not select this one."
        failure = (self.b if word == "A" else self.a)._uncaptured.get(name)
        if failure is not None:
            message, hint = f"{name!r} was not captured in {other}: {failure.reason}.", failure.hint
        self.findings.append(Finding("layers missing", "error", message, name, len(self.table), hint=hint))

    def _report_tokens(self) -> None:
        row = self.table[0]
        rows = "no rows" if not self.rows else f"only the first {self.rows:,} rows"
        message = f"The tokens of the runs differ from position {self.rows:,} on; {rows} can be compared."
        hint = "Run both models on the same tokens to compare all rows."
        difference = Finding("other tokens", "error", message, hint=hint)
        self.findings.append(_locate(difference, 0, row["module_a"], row["module_b"]))


def _join_positions(recording: Recording) -> Any:
    """Return the positions that were looked up in tables, of all passes, (batch or 1, n); None if there are none."""
    tables = [lookup for lookup in recording._module_hints.lookups if lookup.is_table]
    batch = {len(lookup.positions) for lookup in tables} - {1}
    if not tables or len(batch) > 1:
        return None
    size = max(batch, default=1)
    return torch.cat([lookup.positions.cpu().expand(size, -1) for lookup in tables], -1)


def _locate(finding: Finding, layer: int, name_a: str, name_b: str) -> Finding:
    """Return a finding about a call with the layer and the module of both runs."""
    module = name_a if name_a == name_b else " / ".join(filter(None, (name_a, name_b)))
    return replace(finding, module=module, layer=layer)


def match_layers(
    names_a: list[str], names_b: list[str]
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Match the layers of two runs: by name if most names of the shorter run are in the other, else in order.

    >>> match_layers(["h.0", "h.1"], ["layers.0", "layers.1", "layers.2"])
    ([('h.0', 'layers.0'), ('h.1', 'layers.1')], [], ['layers.2'])
    """
    common = [name for name in names_a if name in set(names_b)]
    if 2 * len(common) > min(len(names_a), len(names_b)):
        rest = set(common)
        pairs = [(name, name) for name in common]
        return pairs, [n for n in names_a if n not in rest], [n for n in names_b if n not in rest]
    count = min(len(names_a), len(names_b))
    return list(zip(names_a, names_b, strict=False)), names_a[count:], names_b[count:]


def drop_repeated_calls(calls_a: list[Call], calls_b: list[Call]) -> tuple[list[Call], list[Call]]:
    """Keep the last call of a run without a cache, which reads the whole sequence again at every step."""

    def is_repeated(calls: list[Call]) -> bool:
        lengths = [call.shape[-2:] for call in calls]
        grows = all(later[0] > earlier[0] for earlier, later in pairwise(lengths))
        return len(calls) > 1 and grows and all(q_len == kv_len for q_len, kv_len in lengths)

    keeps_a = len(calls_b) == 1 and is_repeated(calls_a)
    keeps_b = len(calls_a) == 1 and is_repeated(calls_b)
    return calls_a[-1:] if keeps_a else calls_a, calls_b[-1:] if keeps_b else calls_b


def _have_same_masks(calls_a: list[Call], calls_b: list[Call]) -> bool:
    """Return whether two runs attend to the same keys: a window masks what a cache has evicted."""
    if [call.shape for call in calls_a] != [call.shape for call in calls_b]:
        return False
    for a, b in zip(calls_a, calls_b, strict=True):
        q_len, kv_len = a.shape[-2:]
        tokens = find_common_tokens(a, b, q_len, kv_len)[0]
        if any(x.kind == "mask" for x in find_setting_differences(a, b, q_len, kv_len, tokens)):
            return False
    return True


def _find_turned_cache(calls_a: list[Call], calls_b: list[Call]) -> Finding | None:
    """Find cached keys that a run rotates again in each step, so that its calls share no cache."""
    joined, last = calls_a[0], calls_b[-1]
    if len(calls_a) != 1 or joined.key is None or last.key is None or joined.key.shape != last.key.shape:
        return None
    dtypes = {str(call.key.dtype).removeprefix("torch.") for call in (joined, last)}
    first, second = (call.key.reshape(-1, *call.key.shape[-3:]) for call in (joined, last))
    key = relate(first, second, limit_rounding(dtypes, 0.0))
    if key.kind != "turned":
        return None
    message = f"In the last step, the cached key of B {key.detail}."
    hint = "Cache keys after they are rotated, or rotate cached keys by their own positions in every step."
    return Finding("rotary positions", "error", message, hint=hint, rows=key.rows, evidence={"key": key.size})


def is_causal(a: Call, b: Call, rows: int) -> bool:
    """Return whether the first rows of two calls attend to no later key, so that later tokens cannot change them."""
    for call in (a, b):
        mask = call.compact_mask
        own = torch.arange(1, rows + 1).numpy() + call.query_offset
        if mask.dense_mask is not None or bool((mask.stop[..., :rows] > own).any()):
            return False
    return True
