"""`Recording`: the attention of a model's layers as `watch` captured it, and the analyses of it."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from regard.capture.cache_store import CacheFault, JoinedCalls, RowSteps, find_cache, find_cache_fault
from regard.capture.call import Call, CapturedArgs, LayerCall
from regard.capture.module_hints import ModuleHints
from regard.capture.module_trace import ModuleTrace
from regard.capture.output_projections import OutputProjections
from regard.capture.record import Uncaptured
from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError, NotCapturedError, format_named_shape
from regard.findings import Findings
from regard.images.patch_grid import PatchGrid
from regard.lens.alignment import Alignment, compute_alignment
from regard.lens.diagnose import list_layers, run_checks
from regard.lens.find import compute_rollout, compute_value_norms, find_heads
from regard.lens.head_grid import build_head_grid
from regard.lens.head_table import build_head_table
from regard.lens.layer_checks import CheckedLayer
from regard.lens.model_page import build_model_page
from regard.lens.picture_page import build_image_page, find_layer_images
from regard.lens.serialization import read_calls, write_calls
from regard.lens.span_mass import SpanMass, compute_span_mass, select_call
from regard.lens.spans import SpanRanges, Spans, require_spans
from regard.lens.table import Table
from regard.pages.html import Page
from regard.render import notebook
from regard.types import Array

__all__ = ["EmptyRecordingWarning", "Recording", "load_recording"]


class EmptyRecordingWarning(UserWarning):
    """Warning that a `regard.watch` block captured nothing; the message says what did not run, and what to do.

    >>> import regard, torch, warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     with regard.watch(torch.nn.Linear(2, 2)) as recording:
    ...         pass
    >>> recording, caught[0].category.__name__
    (Recording(empty), 'EmptyRecordingWarning')
    """


def _build_join_error(
    name: str, groups: Sequence[JoinedCalls], faults: Sequence[CacheFault]
) -> ArgumentError:
    """Build the error for a layer whose calls are not the steps of one cache."""
    reason = "keys do not extend the keys of the previous call"
    if any(joined.last.measures is None and not joined.last.compact_mask.is_intervals for joined in groups):
        reason = "masks are not intervals of keys, or whose biases are arrays: these are not joined"
    if faults:
        reason = f"keys do not extend the keys of the previous call (call {faults[0].call}: {faults[0].kind})"
    hint = (
        f"Choose one: recording.calls({name!r})[-1].matrix is the latest. A cache that was cut back or shared by "
        "several continuations has one call for each. If steps do not join (some caches change old keys, broken ones "
        "lose some: see recording.diagnose()), run the model once on the generated sequence and watch that run."
    )
    if _grow_without_cache(groups):
        hint = (
            "Each call reads the whole sequence again (use_cache=False), so the last one has every token: "
            f"recording.calls({name!r})[-1].matrix."
        )
    return ArgumentError(
        f"recording[{name!r}]",
        received=f"{len(groups)} calls whose {reason}: " + _format_shapes(groups),
        expected="one call, or the steps of one cache",
        hint=hint,
    )


def _build_speculative_error(name: str, joined: JoinedCalls) -> ArgumentError:
    """Build the error for a layer whose rows include proposed tokens."""
    return ArgumentError(
        f"recording[{name!r}]",
        received=f"{len(joined.steps)} calls of {joined.speculative_mode}, which discards proposed tokens",
        expected="calls whose rows are the generated tokens",
        hint="Run the model once on the generated sequence and watch that run; "
        f"recording.calls({name!r}) contains the rows as they were proposed.",
    )


def _build_not_captured_error(
    name: object, captured: Mapping[str, object], uncaptured: Mapping[str, Uncaptured]
) -> NotCapturedError:
    """Build the error for a name without a recorded call."""
    if isinstance(name, str) and name in uncaptured:
        failure = uncaptured[name]
        return NotCapturedError(
            f"recording[{name!r}]",
            received=f"a layer that was not captured: {failure.reason}",
            expected="a layer that the lens can capture",
            hint=failure.hint,
        )
    near = difflib.get_close_matches(str(name), captured, n=1, cutoff=0.0)
    return NotCapturedError(
        f"recording[{name!r}]",
        received="a name that no attention layer has" if captured else "an empty recording",
        expected=f"one of {len(captured)}, such as {near[0]!r}" if near else "a layer that ran",
        hint="list(recording) lists all names." if captured else "Run the model inside the with block.",
    )


def _format_shapes(groups: Sequence[JoinedCalls]) -> str:
    """Format the shapes of the calls of a layer; of more than three, the first three and the number of others."""
    shown = [format_named_shape(joined.shape, "q_len", "kv_len") for joined in groups[:3]]
    return ", ".join(shown) + (f" and {len(groups) - 3} more" if len(groups) > 3 else "")


def _grow_without_cache(groups: Sequence[JoinedCalls]) -> bool:
    """Return whether each call has one query and one key more than the last: `generate(use_cache=False)`."""
    lengths = [joined.shape[-2:] for joined in groups]
    first = lengths[0][0]
    return lengths == [(first + i, first + i) for i in range(len(lengths))]


class Recording(Mapping[str, AttentionMatrix]):
    """The attention matrices of a model's layers by module name, in the order in which the layers ran.

    `recording[name]` is a lazy `AttentionMatrix`. If a layer was called several times and each call extends the keys of
    the previous one (prefill and steps of `generate()`), the calls form one matrix with one row for each token.
    Otherwise `recording[name]` raises `ArgumentError`, and `recording.calls(name)` lists the calls.

    `regard.watch` and `regard.load_recording` return recordings.

    >>> import regard, torch
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with regard.watch(torch.nn.ModuleDict({"attn": layer})) as recording:
    ...     _ = layer(*[torch.ones(1, 3, 8)] * 3)
    >>> list(recording), recording["attn"].shape
    (['attn'], (1, 2, 3, 3))
    """

    def __init__(self, spans: Spans | None = None) -> None:
        self._spans = spans
        self._joined_calls: dict[str, list[JoinedCalls]] = {}
        self._uncaptured: dict[str, Uncaptured] = {}
        self._cache_faults: dict[str, list[CacheFault]] = {}
        # What the newest call of each layer belongs to, by thread.
        self._latest: dict[int, dict[str, JoinedCalls]] = {}
        self._preceding: dict[str, str] = {}  # the layer that ran before each layer
        self._module_hints = ModuleHints()
        self._projections = OutputProjections()
        self._trace = ModuleTrace()
        self._dense_bytes = 0  # of the weights of layers that compute their own softmax
        self._lock = threading.Lock()

    def _add(self, call: Call) -> JoinedCalls | None:
        """Add a call; append it to the calls of its cache if there are any, and return these if they are the latest."""
        with self._lock:
            groups = self._joined_calls.setdefault(call.name, [])
            for joined in groups:
                joined.close_rows()
            number = sum(joined.num_calls for joined in groups)
            latest = self._latest.setdefault(threading.get_ident(), {})
            # A layer that ran before in the same pass, such as a decoder's self-attention, knows where rows belong.
            before = latest.get(self._preceding.setdefault(call.name, next(reversed(latest), "")))
            known, extension = None, None
            if call.measures is None:
                known, extension = find_cache(call, groups, before)
            if known is not None and extension is not None:
                joined = known.extend(call, extension)
                if call.num_missing_values and not joined.is_cross_attention:
                    tokens = call.query.shape[-2]
                    missing = CacheFault(number, "values missing", tokens, tokens - call.num_missing_values)
                    self._cache_faults.setdefault(call.name, []).append(missing)
            else:
                fault = None if call.measures is not None else find_cache_fault(groups, call, number)
                if fault is not None:
                    self._cache_faults.setdefault(call.name, []).append(fault)
                joined = JoinedCalls(call)
            if joined is not known:
                groups.append(joined)
            joined.before = before
            latest[call.name] = joined
            return joined if joined is known is groups[-1] else None

    def _follow_rows(
        self, joined: JoinedCalls, call: Call, args: CapturedArgs, passes: Mapping[int, tuple[str, Any, int]]
    ) -> RowSteps | None:
        """Return what collects the steps after a call that was added; see `JoinedCalls.follow_rows`."""
        with self._lock:
            return joined.follow_rows(call, args, passes)

    def _count_weights(self, call: Call, limit: int) -> Uncaptured | None:
        """Count the bytes of weights that a call holds; say why it cannot be recorded if they exceed the limit."""
        if call.weights is None:
            return None
        size, before = int(call.weights.nbytes), self._dense_bytes
        if before + size > limit:
            return Uncaptured(
                f"{call.layer_class} computes its own softmax, and its weights of shape {call.shape} take {size:,} "
                f"bytes after {before:,} of other calls, of at most {limit:,}",
                "Pass watch(max_dense_bytes=…) for more, layers= for fewer layers, or measures= to record results "
                "instead of weights.",
            )
        self._dense_bytes += size
        return None

    def _drop(self, name: str, reason: Uncaptured) -> None:
        """Drop the calls of a layer, and note why."""
        with self._lock:
            self._joined_calls.pop(name, None)
            self._cache_faults.pop(name, None)
            self._uncaptured[name] = reason

    def _layer_calls(self) -> list[LayerCall]:
        """List every call with its layer."""
        layer_calls = []
        for layer, name in enumerate(self):
            for index, call in enumerate(self.calls(name)):
                if call.speculative_mode and call.steps > 1:
                    self.__getitem__(name)  # raises, and says why
                layer_calls.append(LayerCall(layer, name, index, call))
        return layer_calls

    def __getitem__(self, name: str) -> AttentionMatrix[torch.Tensor]:
        """Return the matrix of a layer.

        Raises:
            NotCapturedError: If no layer of this name was captured.
            ArgumentError: If the layer has several calls that cannot be joined, or was recorded with measures only.
        """
        groups = self._joined_calls.get(name)
        if not groups:
            self._raise_not_captured(name)
        if len(groups) > 1:
            raise _build_join_error(name, groups, self._cache_faults.get(name, ()))
        joined = groups[0]
        if joined.speculative_mode:
            raise _build_speculative_error(name, joined)
        return joined.call.matrix

    def calls(self, name: str) -> tuple[Call, ...]:
        """Return the calls of a layer; calls that share a cache are joined to one.

        Args:
            name: Name of the module.

        Returns:
            The calls in order.

        Raises:
            NotCapturedError: If no layer of this name was captured.
        """
        if name not in self._joined_calls:
            self._raise_not_captured(name)
        return tuple(joined.call for joined in self._joined_calls[name])

    def _raise_not_captured(self, name: object) -> NoReturn:
        raise _build_not_captured_error(name, self._joined_calls, self._uncaptured)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._joined_calls))

    def __len__(self) -> int:
        return len(self._joined_calls)

    def __contains__(self, name: object) -> bool:
        return name in self._joined_calls

    @property
    def nbytes(self) -> int:
        """Bytes held: queries, keys, lse, and masks that had to be stored as q_len × kv_len."""
        groups = self._joined_calls.values()
        return sum(joined.nbytes for calls in groups for joined in calls) + count_mask_bytes(
            self._joined_calls
        )

    def __repr__(self) -> str:
        layers = (f"  {name}: {_format_shapes(groups)}" for name, groups in self._joined_calls.items())
        return "\n".join([self._summary(), *layers])

    def _summary(self) -> str:
        if not self._joined_calls:
            return "Recording(empty)"
        layers = "1 layer" if len(self) == 1 else f"{len(self)} layers"
        return f"Recording({layers}, {self.nbytes:,} bytes held)"

    def _repr_html_(self) -> str:
        groups = [joined for calls in self._joined_calls.values() for joined in calls]
        with torch.no_grad():
            rows, caption = build_head_grid([joined.call for joined in groups[: notebook.MAX_ROWS]])
        if not rows:
            return _render_layers(self._summary(), self._joined_calls, list(self._uncaptured))
        more = len(self) - len({row.name for row in rows})
        closing = f"{caption} recording.page(tokens) opens every head. "
        return notebook.render_pictures(
            self._summary(), rows, closing + _describe_omitted(more, list(self._uncaptured))
        )

    def heads(self, tokens: Any = None, *, windows: Sequence[int] = (16, 128)) -> Table:
        """Measure every head in one pass per layer; return a table with one row for each layer and head.

        Rows have `module`, `layer` and `head`, counted from 0, `call` (which call of a layer that ran several times),
        and means over the tokens of all batch entries, excluding padding:

        - `entropy`: −Σⱼ Aᵢⱼ ln Aᵢⱼ, nats (Zhai et al., 2303.06296: a head with a value near 0 has collapsed).
        - `first`: Aᵢₖ at the first token k (α₁ of Gu et al., 2410.10781, who call a value above 0.3 a sink).
        - `previous`: Aᵢ,ᵢ₋₁, over i ≥ 1 (the previous-token heads of Olsson et al., 2209.11895).
        - `distance`: Σⱼ Aᵢⱼ |i − j| (Vig & Belinkov, 1906.04284).
        - `within_16`, `within_128`: the weight on keys less than 16 or 128 tokens away; `windows` sets other sizes.
        - `heavy`: the share of Σᵢ Aᵢⱼ on the 10 % of keys that receive the most weight (H2O, 2306.14048).
        - with `tokens`: `duplicate`, the weight on earlier copies of the token itself, and `induction`, the weight on
          the tokens after earlier copies (prefix matching, Olsson et al.), over the tokens that have a copy. On a text
          of s random tokens that is repeated once, these are the scores at offset s and s − 1.
        - with `watch(values=True)`: `contribution`, ‖oᵢ W_O‖, the norm of what the head adds to the residual stream;
          NaN if its output projection is unknown.

        Measures that need positions are NaN in cross-attention.

        Args:
            tokens: Token ids or texts, (n,) or (batch, n), including special tokens and padding.
            windows: Sizes of the `within_…` columns.

        Returns:
            The table; `pandas.DataFrame(table)` and `polars.DataFrame(table)` accept it.

        Raises:
            ArgumentError: If the number of tokens matches no layer, or the layers were recorded with measures only.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer) as recording:
        ...     _ = layer(torch.zeros(1, 4, 8))
        >>> print(recording.heads(windows=[2]))
        module     layer  call  head  entropy  first  previous  distance  within_2  heavy
        self_attn      0     0     0    1.386  0.250     0.250     1.250     0.625  0.250
        self_attn      0     0     1    1.386  0.250     0.250     1.250     0.625  0.250
        """
        with torch.no_grad():
            return build_head_table(self._layer_calls(), tokens, windows, self._projections)

    def value_norms(self, name: str) -> Array:
        """Compute how large each value is after the output projection: ‖v_j W_O‖ for each head.

        A weight times this norm is the norm of what a key adds to the output of a query (Kobayashi et al., 2004.10102).
        `regard.measures.Contribution` finds the largest contributions of a whole matrix.

        Args:
            name: Name of a module that was recorded with `watch(values=True)`.

        Returns:
            (…, heads, kv_len), a float64 tensor.

        Raises:
            NotCapturedError: If no layer of this name was captured.
            ArgumentError: If the layer has several calls that cannot be joined, its value was not recorded, or no
                linear layer reads its output.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer, values=True) as recording:
        ...     _ = layer(torch.ones(1, 3, 8))
        >>> recording.value_norms("self_attn").shape
        torch.Size([1, 2, 3])
        """
        self[name]  # raises if the calls are not one
        with torch.no_grad():
            return compute_value_norms(self.calls(name)[0], self._projections, "recording.value_norms")

    def grids(self, name: str, *, batch: int = 0) -> list[PatchGrid]:
        """Return where the patches of each image are among the keys of a layer.

        The grids are read from the configuration of the model and its inputs; see `regard.images.read_grids`, which
        lists the supported models.

        Args:
            name: Name of the module.
            batch: The batch entry of the model.

        Returns:
            One grid for each image of the batch entry, in order.

        Raises:
            NotCapturedError: If no layer of this name was captured, or it is not part of a model whose patch grid is
                known.
            ArgumentError: If the grid is unknown, or does not fit the number of keys.
            IndexOutOfRangeError: If there is no such batch entry.
        """
        self.calls(name)  # raises if there are none
        own = [entry for entry in self._layer_calls() if entry.module == name]
        found = find_layer_images(own, self._module_hints.image_passes, batch, f"recording.grids({name!r})")
        return [grid for layer_images in found for grid in layer_images.grids.values()]

    def find(
        self,
        query: Any,
        key: Any,
        tokens: Any = None,
        *,
        query_tokens: Any = None,
        batch: int = 0,
        by: Literal["weight", "contribution"] = "weight",
    ) -> Table:
        """Find the heads that attend from one token to another: a table sorted by `weight`, largest first.

        The table has one row for each layer and head: `module`, `layer`, `call`, `head`, `query`, `key` (positions) and
        `weight`. If a text occurs several times, each row has the pair of occurrences with the largest weight.

        With `by="contribution"`, the table has a column `contribution` and is sorted by it: ‖w v W_O‖, the norm of what
        the key adds to the output of the query (Kobayashi et al., 2004.10102). Contributions of different layers are
        not directly comparable, because the scale of the residual stream differs.

        Args:
            query: Text of the attending token, or its position. The tokenizer's word-start marker (Ġ, ▁) may be
                omitted.
            key: Text or position of the token attended to.
            tokens: Tokens of the keys, (n,) or (batch, n); also used for the queries if both are the same sequence.
            query_tokens: Tokens of the queries of cross-attention. If given, only cross-attention is searched.
            batch: The batch entry.
            by: "weight", or "contribution", which needs a recording with `watch(values=True)`.

        Returns:
            The table.

        Raises:
            ArgumentError: If there is no such token, `tokens` is missing for a text, the number of tokens matches no
                layer, or the data for contributions was not recorded.
            IndexOutOfRangeError: If there is no such position or batch entry.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer) as recording:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> print(recording.find("it", "cat", tokens=["the", "cat", "it"]))
        module     layer  call  head  query  key  weight
        self_attn      0     0     0      2    1   0.333
        self_attn      0     0     1      2    1   0.333
        """
        with torch.no_grad():
            return find_heads(
                self._layer_calls(), query, key, tokens, query_tokens, batch, by, self._projections
            )

    def span_mass(
        self,
        spans: SpanRanges | None = None,
        *,
        prompt: int | None = None,
        call: int | None = None,
        layers: str | Sequence[str] | None = None,
    ) -> SpanMass:
        """Compute how much of each token's attention is on named parts of the prompt, for every layer and head.

        After `generate()`, there is one row for each generated token; after a single pass, one for each token. In
        cross-attention, spans are ranges of the keys. `SpanMass.plan` says how masses were computed.

        Args:
            spans: Ranges of tokens by name, as in `regard.watch`. Default: the spans passed to `watch`.
            prompt: Number of tokens before the first generated token, including padding. Default: the number of
                tokens before the first cached step. Pass it for a run over a finished text, or with a single generated
                token.
            call: Which call of each layer, if the layers ran over several texts.
            layers: Names of modules or patterns with `*`, including their submodules. Default: all.

        Returns:
            The masses, with the lookback ratio, tables and a page.

        Raises:
            ArgumentError: If there are no spans, they overlap or are empty, or layers have several calls.
            IndexOutOfRangeError: If a span, `prompt` or `call` is out of range.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer, spans={"question": slice(1, 3)}) as recording:
        ...     _ = layer(torch.zeros(1, 4, 8))
        >>> recording.span_mass()
        SpanMass(question, other; 4 tokens, 1 layer)
        """
        with torch.no_grad():
            return compute_span_mass(
                select_call(self, self._layer_calls(), call),
                require_spans(spans, self._spans),
                prompt,
                layers,
            )

    def rollout(
        self, query: Any, tokens: Any = None, *, batch: int = 0, layers: str | Sequence[str] | None = None
    ) -> Array:
        """Compute attention rollout: how much of each input token reaches one token through all layers.

        The result is the row of ∏ (½ A + ½ I) from the last layer to the first, where A is the mean of the heads (Abnar
        & Zuidema, 2005.00928), computed as products with a vector in O(n) memory. Rollout uses only the weights and
        ignores the values. Weight on a learned sink is lost, so the sum is then below 1.

        Args:
            query: Position of the token that is reached, or its text if it occurs once in `tokens`.
            tokens: Tokens of the sequence, (n,) or (batch, n).
            batch: The batch entry.
            layers: Names of modules or patterns with `*`, including their submodules. Default: all. Choose one stack
                of an encoder-decoder model.

        Returns:
            A float64 NumPy array, (n,); without a learned sink, it sums to 1.

        Raises:
            ArgumentError: If the layers are not one stack of self-attention, or the text of the token is ambiguous.
            IndexOutOfRangeError: If there is no such position or batch entry.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer) as recording:
        ...     _ = layer(torch.zeros(1, 4, 8))
        >>> recording.rollout(-1)
        array([0.125, 0.125, 0.125, 0.625])
        """
        with torch.no_grad():
            return compute_rollout(self._layer_calls(), query, tokens, batch, layers)

    def align(
        self,
        ids: Any,
        *,
        heads: Sequence[tuple[int | str, int]],
        prompt: int | None = None,
        frames: int | None = None,
        seconds_per_frame: float = 0.02,
        start: float = 0.0,
        filter_width: int = 7,
        batch: int = 0,
        call: int | None = None,
    ) -> Alignment:
        """Find when each token of a transcript was spoken, in a recording of a speech model such as Whisper.

        The weights of the given heads of cross-attention are standardised over the tokens, filtered along the frames,
        averaged, and warped: each token is assigned the frames on the monotonic path with the largest sum. The times
        equal `return_token_timestamps` of transformers, which needs eager attention. The weights are computed one head
        at a time.

        Args:
            ids: Ids of the generated tokens without the prompt, as Whisper's `generate()` returns them, (n,) or
                (batch, n). Padding at the end may be omitted.
            heads: Pairs of decoder layer and head; for Whisper, `model.generation_config.alignment_heads`. A layer is
                given by the number in the name of its module, or by the name of the module.
            prompt: Number of decoder tokens before the transcript. Default: the number of tokens in the first call of
                `generate()`.
            frames: Number of keys that are audio; the remaining keys are padding. Default: all.
            seconds_per_frame: Seconds of audio for each key; 0.02 for Whisper.
            start: Time of the first frame, for a later window of a long recording.
            filter_width: Width of the median filter, odd; `model.config.median_filter_width`.
            batch: The batch entry.
            call: Which call of the decoder, if there are several. Default: the one that fits the tokens.

        Returns:
            The alignment: `alignment.words(tokenizer)` is a table, `alignment.times` an array.

        Raises:
            ArgumentError: If there is no such layer, or the number of tokens or frames does not match.
            ArgumentTypeError: If `heads` are not pairs.
            IndexOutOfRangeError: If there is no such head or batch entry.
        """
        with torch.no_grad():
            return compute_alignment(
                self._layer_calls(),
                ids,
                heads,
                prompt=prompt,
                frames=frames,
                seconds_per_frame=seconds_per_frame,
                start=start,
                filter_width=filter_width,
                batch=batch,
                call=call,
            )

    def diagnose(
        self, tokens: Any = None, attention_mask: Any = None, causal: bool | None = None
    ) -> Findings:
        """Check the attention for common faults.

        Errors:

        - masks: weight on the future or on padding, fully masked tokens, an inverted mask, a mask of 0 and 1, a mask of
          another batch entry, a mask with the batch on the heads axis, a mask without its diagonal, `is_causal`
          aligned to the wrong corner, packed documents that attend to each other;
        - numbers: NaN or inf (and where they began), dropout in eval mode, a softmax over the queries;
        - positions and caches: positions that count padding or are not consecutive in cached steps, a cache that loses
          keys or values, a bias that grows with the distance;
        - configuration: sinks, soft caps and windows that are not as configured;
        - an empty recording.

        Warnings: a scale that is not 1/√head_dim, saturated heads, a slow kernel, layers that were not captured. Notes:
        uniform heads, sinks. Extreme heads may be intended; errors hardly ever are. `regard.doctor` also runs
        experiments.

        Args:
            tokens: Tokens of the sequence, (n,) or (batch, n). Without `attention_mask`, tokens such as "[PAD]" mark
                the padding.
            attention_mask: The mask passed to the model, (batch, n), 1 = token, 0 = padding.
            causal: True if no token may attend to later tokens, False if any may. By default, a layer is expected to be
                causal if its module says so (`is_causal`), or if most layers of its stack are.

        Returns:
            Findings with severity, location, evidence and hint, and lists of the checks that ran and the checks that
            were skipped; `print` shows them.

        Raises:
            ArgumentError: If the shape of `attention_mask` matches no layer, or it has entries other than 0 and 1.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer) as recording:
        ...     _ = layer(torch.randn(1, 3, 8))
        >>> recording.diagnose()
        No problems found in 1 layer, 2 heads.
        <BLANKLINE>
        run      NaN or inf
        not run  cache: keys and values of each step: one pass was recorded, and no steps with a cache
        ...
        """
        with torch.no_grad():
            return run_checks(
                self._layer_calls(),
                self._joined_calls,
                self._module_hints,
                self._uncaptured,
                self._cache_faults,
                tokens=tokens,
                attention_mask=attention_mask,
                causal=causal,
            )

    def _checked_layers(self, causal: bool | None = None) -> list[CheckedLayer]:
        """List the layers as `diagnose` checks them."""
        return list_layers(self._layer_calls(), self._module_hints, causal)

    def page(
        self,
        tokens: Any = None,
        *,
        query_tokens: Any = None,
        image: Any = None,
        grid: PatchGrid | Sequence[PatchGrid] | None = None,
        batch: int = 0,
        layers: str | Sequence[str] | None = None,
        heads: Sequence[int] | None = None,
        findings: Findings | None = None,
        title: str | None = None,
        max_bytes: int | None = None,
    ) -> Page:
        """Build a page with every head of the model: one HTML file that needs neither server nor network.

        All heads are shown as small maps, sorted by layer or by any measure of `heads`. An open head shows every weight
        as a map with its tokens, as running text coloured by the weights of one token and, for short texts, as lines.
        It also lists the largest weights of the row under the pointer. The mean over the heads of a layer can also be
        selected. A search finds the heads that attend from one token to another, as `find` does. The findings of
        `diagnose` are listed and marked at the affected heads. The URL stores the state of the page.

        The page contains queries and keys in half precision, computes the weights from them, and states the error.

        With `image`, the page shows the image instead: select a patch or another token as the query, and the maps of
        the heads are drawn over the image, for every layer that read it.

        Args:
            tokens: Tokens of the keys, (n,) or (batch, n); also used for the queries if both are the same sequence. For
                an encoder-decoder model, the tokens that the encoder reads.
            query_tokens: Tokens of the queries of cross-attention, which the decoder reads. Default: `tokens`, if
                their number fits the queries and not the keys.
            image: The image that the model read: a path, a Pillow image or an array, or a list of all images of the
                batch entry. It is stretched over the patches; if the processor crops images, pass
                `regard.images.undo_normalisation(pixel_values[0], processor)`.
            grid: Positions of the patches, one grid for each image. Default: `recording.grids(name)` of each layer.
            batch: The batch entry to show.
            layers: Names of modules or patterns with `*`, including their submodules. Default: all.
            heads: The heads to show. Default: all.
            findings: Findings to list. Default: `recording.diagnose(tokens)`. Not shown with an image.
            title: Title of the page.
            max_bytes: Limit on the file size. Heads beyond the limit have only their map and measures (with an image,
                only the maps of some queries), and the page says so. Default: 40 MB, or 10 MB with an image.

        Returns:
            The page: `page.save(path)` writes it, and a notebook shows it.

        Raises:
            ArgumentError: If there is no such layer, the number of tokens matches no layer, or the image does not match
                the tokens.
            IndexOutOfRangeError: If there is no such head or batch entry.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer) as recording:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> recording.page(["the", "cat", "it"])
        <page "All attention heads", ... kB: save(path) writes it>
        """
        chosen: dict[str, Any] = {"batch": batch, "layers": layers, "heads": heads, "title": title}
        with torch.no_grad():
            if image is not None:
                passes = self._module_hints.image_passes
                return build_image_page(
                    self._layer_calls(),
                    passes,
                    image=image,
                    grid=grid,
                    tokens=tokens,
                    query_tokens=query_tokens,
                    max_bytes=max_bytes,
                    **chosen,
                )
            return build_model_page(
                self._layer_calls(),
                self.diagnose(tokens) if findings is None else findings,
                tokens=tokens,
                query_tokens=query_tokens,
                max_bytes=40_000_000 if max_bytes is None else max_bytes,
                **chosen,
            )

    def save(self, path: str | Path) -> None:
        """Write the recording to a safetensors file, with metadata as JSON in its header; nothing is pickled.

        `regard.load_recording(path)` reads it.

        Args:
            path: The file to write.

        Raises:
            ArgumentError: If a score modification or a measure's result cannot be written.
            ImportError: If safetensors is not installed.
        """
        causal = {name: flag for name, flag in self._module_hints.causal.items() if name in self}
        calls = [entry.call for entry in self._layer_calls()]
        hints = self._module_hints
        write_calls(
            path,
            calls,
            causal,
            self._cache_faults,
            hints.image_runs,
            hints.image_passes,
            self._trace.events,
        )


def load_recording(path: str | Path) -> Recording:
    """Read a recording that `Recording.save` wrote.

    Args:
        path: A safetensors file written by `recording.save(path)`.

    Returns:
        The recording: all methods, such as `recording[name]` and `recording.heads()`, work as on the original.

    Raises:
        ArgumentError: If the file is not a saved recording.

    >>> import regard, tempfile, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     _ = layer(torch.ones(1, 3, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recording.save(f"{folder}/recording.safetensors")
    ...     again = regard.load_recording(f"{folder}/recording.safetensors")
    >>> again
    Recording(1 layer, 216 bytes held)
      self_attn: (batch 1, heads 2, q_len 3, kv_len 3)
    """
    saved = read_calls(path)
    recording = Recording()
    recording._cache_faults = saved.cache_faults
    recording._module_hints.causal = saved.causal
    recording._module_hints.image_runs = saved.image_runs
    recording._module_hints.image_passes = saved.image_passes
    recording._trace.events = saved.events
    for call in saved.calls:
        # JoinedCalls derives it for a single call, which is wrong for joined ones.
        query_offset = call.query_offset
        recording._joined_calls.setdefault(call.name, []).append(JoinedCalls(call))
        call.query_offset = query_offset
    return recording


def count_mask_bytes(joined_calls: Mapping[str, list[JoinedCalls]]) -> int:
    """Count the bytes of masks and biases stored as arrays; those that layers share count once."""
    sizes = {
        array.data_ptr(): int(array.nbytes)
        for calls in joined_calls.values()
        for joined in calls
        for array in joined.last.compact_mask.stored_arrays
    }
    return sum(sizes.values())


def _render_layers(
    summary: str, joined_calls: Mapping[str, list[JoinedCalls]], uncaptured: Sequence[str]
) -> str:
    """Render the layers as a table for a notebook, below a line of summary."""
    shown = list(joined_calls.items())[: notebook.MAX_ROWS]
    rows = [
        [
            str(number),
            name,
            _format_shapes(groups),
            groups[-1].last.kernel,
            f"{sum(joined.nbytes for joined in groups):,}",
        ]
        for number, (name, groups) in enumerate(shown)
    ]
    more = len(joined_calls) - len(shown)
    columns = ["layer", "module", "shape", "kernel", "bytes"]
    closing = _describe_omitted(more, uncaptured)
    return notebook.render_table(summary, columns, rows, [False, True, True, True, False], closing)


def _describe_omitted(more: int, uncaptured: Sequence[str]) -> str:
    """Say how many layers a notebook does not show, and which were not captured."""
    text = f"… and {more:,} more layer{'s' * (more != 1)}. " if more else ""
    if uncaptured:
        text += f"Not captured: {', '.join(uncaptured[:8])}{' …' if len(uncaptured) > 8 else ''}."
    return text
