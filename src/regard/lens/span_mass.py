"""`SpanMass`: the weight of each generated token on named parts of the prompt, for every layer and head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from regard.capture.call import Call, LayerCall
from regard.errors import ArgumentError, IndexOutOfRangeError
from regard.lens.find import check_batch, select_layers
from regard.lens.spans import GENERATED, OTHER, Spans
from regard.lens.table import Table
from regard.lens.token_rows import TokenRows
from regard.lens.weight_measures import GroupMass
from regard.pages.encoding import encode_array
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable
from regard.types import Array, IntArray

__all__ = ["LayerSpans", "SpanMass", "mean_defined"]


@dataclass(frozen=True)
class LayerSpans:
    """The attention masses of one layer.

    Args:
        module: Name of the module.
        layer: Number of the layer, from 0, in the order in which the layers ran.
        mass: (batch, heads, tokens, names).
        lookback: Lookback ratio, (batch, heads, tokens); NaN where nothing was generated yet.
        plan: How the masses were computed, in the words of `AttentionMatrix.plan`.
    """

    module: str
    layer: int
    mass: Array
    lookback: Array
    plan: str


def mean_defined(values: Array, axis: int | tuple[int, ...]) -> Array:
    """Compute the mean of the values that are not NaN; NaN if all are."""
    defined = ~np.isnan(values)
    count = defined.sum(axis)
    return np.where(count > 0, np.where(defined, values, 0.0).sum(axis) / np.maximum(count, 1), np.nan)


class SpanMass(Mapping[str, Array]):
    """The share of each token's attention on named parts of the prompt; `Recording.span_mass` computes it.

    `mass[module]` is an array (batch, heads, tokens, names) for each layer. In a recording of `generate()`, the tokens
    are the generated tokens, and each has the row that produced it: the query of the previous token. In a recording of
    one pass, every token has its own row.

    Attention shows where a head reads, not what the answer depends on; test that with `regard.intervene`.

    Attributes:
        names: Names of the last axis: the spans, then "other", the rest of the prompt, then "generated" if tokens were
            generated. Shares of a row add up to 1, minus the share of a learned sink.
        positions: Position of each token in the sequence, (tokens,).
        prompt: Number of tokens of the prompt, including padding; None for a recording of one pass.
        layers: The masses of each layer, as `LayerSpans`.
        labels: For each token of the prompt, the index of its name, (batch or 1, prompt); −1 for padding.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer, spans={"first half": (0, 2)}) as recording:
    ...     _ = layer(torch.zeros(1, 4, 8))
    >>> mass = recording.span_mass()
    >>> mass["self_attn"].shape, mass.names
    ((1, 2, 4, 2), ('first half', 'other'))
    >>> print(mass.heads())
    module     layer  head  first half  other  lookback
    self_attn      0     0       0.500  0.500         –
    self_attn      0     1       0.500  0.500         –
    """

    def __init__(
        self,
        names: tuple[str, ...],
        positions: IntArray,
        prompt: int | None,
        layers: Sequence[LayerSpans],
        labels: IntArray,
    ) -> None:
        self.names, self.positions, self.prompt = names, positions, prompt
        self.layers, self.labels = tuple(layers), labels

    def __getitem__(self, module: str) -> Array:
        """Return the masses of a layer, (batch, heads, tokens, names)."""
        return self._by_module[module].mass

    @cached_property
    def _by_module(self) -> dict[str, LayerSpans]:
        return {layer.module: layer for layer in self.layers}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_module)

    def __len__(self) -> int:
        return len(self._by_module)

    @property
    def lookback(self) -> dict[str, Array]:
        """The lookback ratio of each layer, (batch, heads, tokens), by module name.

        It is C / (C + G), where C is the mean weight on a token of the prompt and G the mean weight on a token
        generated so far (Chuang et al., 2407.07071). It is NaN for the first generated token, and everywhere if no
        token was generated.
        """
        return {layer.module: layer.lookback for layer in self.layers}

    @property
    def plan(self) -> str:
        """How the masses of each layer were computed; layers with equal plans share a line."""
        plans: dict[str, list[str]] = {}
        for layer in self.layers:
            plans.setdefault(layer.plan, []).append(layer.module)
        return "\n".join(
            f"{modules[0]}{f' and {len(modules) - 1} more' if len(modules) > 1 else ''}: {plan}"
            for plan, modules in plans.items()
        )

    def heads(self) -> Table:
        """Return a table with one row for each layer and head: means over the tokens and the batch.

        Returns:
            Columns `module`, `layer`, `head`, one for each of `names`, and `lookback`.
        """
        table = Table()
        for layer in self.layers:
            means, lookback = layer.mass.mean((0, 2)), mean_defined(layer.lookback, (0, 2))
            for head, row in enumerate(means):
                place = {"module": layer.module, "layer": layer.layer, "head": head}
                table.append(place | self._name(row) | {"lookback": float(lookback[head])})
        return table

    def tokens(self, tokens: Sequence[str] | None = None, *, batch: int = 0) -> Table:
        """Return a table with one row for each token: means over all layers and heads.

        Args:
            tokens: Texts of the whole sequence, including the prompt, for a column `token`.
            batch: The batch entry.

        Returns:
            Columns `position`, `token` if texts were given, one for each of `names`, and `lookback`.

        Raises:
            IndexOutOfRangeError: If there is no such batch entry.
            ArgumentError: If there are fewer texts than tokens.
        """
        check_batch(batch, len(self.layers[0].mass), "mass.tokens")
        self._check_tokens(tokens, "mass.tokens")
        masses = np.concatenate([layer.mass[batch] for layer in self.layers]).mean(0)
        lookback = mean_defined(np.concatenate([layer.lookback[batch] for layer in self.layers]), 0)
        table = Table()
        for position, row, ratio in zip(self.positions.tolist(), masses, lookback, strict=True):
            text = {} if tokens is None else {"token": tokens[position]}
            table.append({"position": position} | text | self._name(row) | {"lookback": float(ratio)})
        return table

    def spans(self) -> Table:
        """Return a table with one row for each span, for spans of different lengths: means over tokens and heads.

        A long span has a large share even if attention is spread evenly. `per_token` is the share divided by the number
        of tokens, and `lift` is the share divided by the share under attention that is uniform over all tokens: of the
        prompt without padding, and generated before. A lift of 1 means no preference. In one pass of a causal model,
        tokens before a span cannot attend to it, which lowers its lift.

        Returns:
            Columns `span`, `tokens` (mean number), `share`, `per_token` and `lift`; NaN for a span without tokens.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer, spans={"first token": (0, 1)}) as recording:
        ...     _ = layer(torch.zeros(1, 4, 8))
        >>> print(recording.span_mass().spans())
        span         tokens  share  per_token   lift
        first token   1.000  0.250      0.250  1.000
        other         3.000  0.750      0.250  1.000
        """
        shares = np.concatenate([layer.mass for layer in self.layers], axis=1).mean(1, dtype=np.float64)
        counts = np.zeros(shares.shape)  # (batch, tokens, names)
        in_prompt = [name for name in self.names if name != GENERATED]
        for index in range(len(in_prompt)):
            counts[..., index] = (self.labels == index).sum(-1)[:, None]
        if self.prompt is not None:
            counts[..., len(in_prompt) :] = np.maximum(self.positions - self.prompt, 0)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            per_token = np.where(counts > 0, shares / counts, np.nan)
        lift = per_token * counts.sum(-1, keepdims=True)
        table = Table()
        for index, name in enumerate(self.names):
            row = {
                "tokens": float(counts[..., index].mean()),
                "share": float(shares[..., index].mean()),
                "per_token": float(mean_defined(per_token[..., index], (0, 1))),
                "lift": float(mean_defined(lift[..., index], (0, 1))),
            }
            table.append({"span": name} | row)
        return table

    def _name(self, row: Array) -> dict[str, float]:
        return dict(zip(self.names, row.tolist(), strict=True))

    def page(
        self,
        tokens: Sequence[str],
        *,
        batch: int = 0,
        title: str | None = None,
        max_bytes: int = 10_000_000,
    ) -> Page:
        """Build a page that colours the answer by what it attended to: one HTML file that needs no network.

        Each token has the colour of the span with the largest share of its attention; a stronger colour is a larger
        share. On the page, select a layer and a head, or the means over layers and heads. A selected token shows its
        shares in every layer.

        Args:
            tokens: Texts of the whole sequence, prompt and answer.
            batch: The batch entry.
            title: Title of the page.
            max_bytes: If the page with all heads would exceed this size, it holds only the means of layers.

        Returns:
            The page: `page.save(path)` writes it, and a notebook shows it.

        Raises:
            IndexOutOfRangeError: If there is no such batch entry.
            ArgumentError: If there are fewer texts than tokens.
        """
        check_batch(batch, len(self.layers[0].mass), "mass.page")
        self._check_tokens(tokens, "mass.page")
        return _build_page(self, [str(token) for token in tokens], batch, title, max_bytes)

    def _check_tokens(self, tokens: Sequence[str] | None, operation: str) -> None:
        """Refuse texts that do not reach the last token."""
        needed = int(self.positions.max(initial=-1)) + 1
        if tokens is not None and len(tokens) < needed:
            raise ArgumentError(
                operation,
                received=f"{len(tokens)} tokens",
                expected=f"at least {needed}: every token of the prompt and of the answer",
                hint="Pass tokenizer.convert_ids_to_tokens(output_ids[batch]), including padding.",
            )

    def __repr__(self) -> str:
        layers = "1 layer" if len(self) == 1 else f"{len(self)} layers"
        what = "tokens" if self.prompt is None else "generated tokens"
        return f"SpanMass({', '.join(self.names)}; {len(self.positions)} {what}, {layers})"


OPERATION = "recording.span_mass"


def select_call(
    recording: Mapping[str, object], layer_calls: Sequence[LayerCall], call: int | None
) -> list[LayerCall]:
    """Select one call of each layer of a recording."""
    selected = []
    for name in recording:
        calls = [entry for entry in layer_calls if entry.module == name]
        if call is None and len(calls) > 1:
            recording[name]  # raises, and says why
        if not -len(calls) <= (call or 0) < len(calls):
            raise IndexOutOfRangeError(
                OPERATION,
                received=f"call={call}",
                expected=f"one of {len(calls)} calls of {name!r}",
                hint="Calls are counted from 0, and -1 is the last. Calls that share a cache count as one.",
            )
        selected.append(calls[call or 0])
    return selected


def compute_span_mass(
    layer_calls: Sequence[LayerCall],
    spans: Spans,
    prompt: int | None,
    layers: str | Sequence[str] | None,
) -> SpanMass:
    """Compute the masses of every layer."""
    calls = [entry for entry in select_layers(layer_calls, layers, OPERATION) if math.prod(entry.call.shape)]
    if not calls:
        raise ArgumentError(
            OPERATION,
            received="an empty recording" if layers is None else f"layers={layers!r}, which matches no layer",
            expected="a layer that ran",
            hint="list(recording) lists the names. Run the model inside the with block.",
        )
    rows = [TokenRows.from_call(entry.call) for entry in calls]
    if any(own.query_offset is None for own in rows):
        # An encoder-decoder model reads its prompt by cross-attention.
        pairs = [pair for pair in zip(calls, rows, strict=True) if pair[1].query_offset is None]
        calls, rows = [entry for entry, _ in pairs], [own for _, own in pairs]
    sequences = {_find_sequence(entry.call, own, prompt) for entry, own in zip(calls, rows, strict=True)}
    if len(sequences) > 1:
        shapes = ", ".join(f"{entry.module} {entry.call.shape[-2:]}" for entry in (calls[0], calls[-1]))
        raise ArgumentError(
            OPERATION,
            received=f"layers over different sequences: {shapes}",
            expected="layers that read the same tokens",
            hint="Choose some: recording.span_mass(layers='decoder.*').",
        )
    (sequence,) = sequences
    names = (*spans.names, OTHER) if sequence.generated_from is None else (*spans.names, OTHER, GENERATED)
    labels = _label_keys(spans, calls[0].call, sequence)
    results = [
        _measure_layer(entry, own, sequence, labels, len(names))
        for entry, own in zip(calls, rows, strict=True)
    ]
    positions = np.arange(sequence.first_position, sequence.first_position + results[0].mass.shape[2])
    is_token = rows[0].keys.reshape(-1, rows[0].keys.shape[-1])[:, : sequence.context]
    own = np.where(is_token, labels[:, : sequence.context], -1)
    return SpanMass(names, positions, sequence.prompt, results, own)


@dataclass(frozen=True)
class _Sequence:
    """Which rows and keys of a layer are counted.

    Args:
        first_row: First row of the matrix that is counted.
        first_position: Position of the token that it belongs to.
        context: Number of keys that spans may lie in.
        generated_from: First key that was generated; None if there is none.
        prompt: Number of tokens of the prompt; None for one pass.
    """

    first_row: int
    first_position: int
    context: int
    generated_from: int | None
    prompt: int | None


def _find_sequence(call: Call, rows: TokenRows, prompt: int | None) -> _Sequence:
    q_len, kv_len = call.shape[-2:]
    offset = rows.query_offset
    if prompt is not None and not 1 <= prompt <= (offset or 0) + q_len:
        raise IndexOutOfRangeError(
            OPERATION,
            received=f"prompt={prompt}",
            expected=f"a number of tokens from 1 to {(offset or 0) + q_len}",
            hint="It counts the tokens before the first generated token, including padding.",
        )
    if prompt is None and call.prompt_len:
        prompt = (offset or 0) + call.prompt_len
    first_row = 0 if prompt is None else max(0, prompt - 1 - (offset or 0))
    # The row of a token of the prompt belongs to the token itself, that of a generated one to the token before it.
    first_position = first_row + (offset or 0) + (prompt is not None)
    if offset is None:
        return _Sequence(first_row, first_position, kv_len, None, prompt)
    return _Sequence(first_row, first_position, kv_len if prompt is None else prompt, prompt, prompt)


def _label_keys(spans: Spans, call: Call, sequence: _Sequence) -> IntArray:
    """Return the index of the name of each key, (batch or 1, kv_len)."""
    *lead, _, kv_len = call.shape
    what = "the sequence" if sequence.generated_from is None else "the prompt"
    own = spans.label_keys(math.prod(lead[:-1]), sequence.context, what, OPERATION)
    labels = np.full((len(own), kv_len), len(spans.names) + 1, np.int64)
    labels[:, : sequence.context] = own
    return labels


def _measure_layer(
    entry: LayerCall, rows: TokenRows, sequence: _Sequence, labels: IntArray, groups: int
) -> LayerSpans:
    call, matrix = entry.call, entry.call.matrix
    *lead, _, kv_len = call.shape
    if sequence.first_row:
        matrix = matrix.lazy[..., sequence.first_row :, :]
    # The axis of batch entries; a matrix without batch has none.
    shaped = labels.reshape(
        *(lead[:-1] if len(labels) > 1 else (1,) * len(lead[:-1])), *(1,) * bool(lead), -1
    )
    measure = GroupMass(shaped, groups)
    plan = matrix.plan(spans=measure)
    mass = matrix.measure(spans=measure).spans
    dtype = np.float64 if "float64" in str(call.query.dtype) else np.float32
    mass = mass.detach().cpu().numpy() if hasattr(mass, "detach") else np.asarray(mass)
    mass = mass.reshape(math.prod(lead[:-1]), lead[-1] if lead else 1, -1, groups).astype(dtype)
    lookback = np.full(mass.shape[:-1], np.nan, dtype)
    if sequence.generated_from is not None:
        keys = rows.keys.reshape(-1, kv_len)[:, : sequence.context].sum(-1)[:, None, None]
        counts = np.arange(mass.shape[2]) + sequence.first_position - sequence.generated_from
        lookback = compute_lookback(mass, keys, counts)
    return LayerSpans(entry.module, entry.layer, mass, lookback, plan)


def compute_lookback(mass: Array, prompt: int | Array, generated: IntArray) -> Array:
    """Compute the lookback ratio of each row, (batch, heads, rows); NaN where nothing was generated yet.

    Args:
        mass: (batch, heads, rows, names); the last name is "generated".
        prompt: Number of tokens of the prompt, which broadcasts against (batch, heads, rows).
        generated: Number of tokens that were generated before each row, (rows,).
    """
    context = mass[..., :-1].sum(-1, dtype=np.float64) / np.maximum(prompt, 1)
    later = mass[..., -1] / np.maximum(generated, 1)
    total = np.where((generated > 0) & (context + later > 0), context + later, np.nan)
    return np.asarray(context / total, mass.dtype)


# The page

# Bytes of a number in the page: two, and a third more as text.
NUMBER_BYTES = 8 / 3


def _build_page(mass: SpanMass, tokens: Sequence[str], batch: int, title: str | None, max_bytes: int) -> Page:
    """Build the page of an answer: its tokens, coloured by the part of the prompt that got most of their attention."""
    per_row = len(mass.positions) * (len(mass.names) + 1) * NUMBER_BYTES
    rows, masses, lookback, note = _reduce_rows(mass.layers, batch, max_bytes / max(per_row, 1))
    first, last = int(mass.positions[0]), int(mass.positions[-1])
    labels = mass.labels[batch if len(mass.labels) > 1 else 0]
    title = escape_unprintable(title or "What the answer read")
    record = {
        "title": title,
        "names": [escape_unprintable(name) for name in mass.names],
        "spans": sum(name not in (OTHER, GENERATED) for name in mass.names),
        "tokens": [escape_token(token) for token in tokens[first : last + 1]],
        "first": first,
        "prompt": mass.prompt,
        "runs": [
            {"name": int(label), "text": join_tokens([escape_token(tokens[i]) for i in run])}
            for label, run in groupby(range(len(labels)), key=lambda i: labels[i])
        ],
        "rows": [{"layer": layer, "head": head} for layer, head in rows],
        "masses": encode_array(masses.astype(np.float16), early=True),
        "lookback": encode_array(lookback.astype(np.float16), early=True),
        "note": note,
    }
    return build_page(title, "answerPage", record)


def _reduce_rows(
    layers: Sequence[LayerSpans], batch: int, max_rows: float
) -> tuple[list[tuple[int | None, int | None]], Array, Array, str]:
    """Return the masses of every head, of every layer if they are too many, or else their mean.

    The first result names layer and head of each row of the masses, None for a mean over them.
    """
    heads = [(layer.layer, head) for layer in layers for head in range(layer.mass.shape[1])]
    if len(heads) <= max_rows:
        masses = np.concatenate([layer.mass[batch] for layer in layers])
        return [*heads], masses, np.concatenate([layer.lookback[batch] for layer in layers]), ""
    masses = np.stack([layer.mass[batch].mean(0) for layer in layers])
    lookback = np.stack([mean_defined(layer.lookback[batch], 0) for layer in layers])
    if len(layers) <= max_rows:
        note = f"Means over the heads of each layer; {len(heads):,} heads would not fit."
        return [(layer.layer, None) for layer in layers], masses, lookback, note
    note = f"Means over {len(layers):,} layers of {len(heads):,} heads, which would not fit."
    return [(None, None)], masses.mean(0)[None], mean_defined(lookback, 0)[None], note


def escape_token(token: object) -> str:
    """Return the text of a token on one line; one that is empty is shown as a dot."""
    return escape_unprintable(str(token)) or "·"


def join_tokens(tokens: Sequence[str]) -> str:
    """Join tokens as running text; a mark of a word start, or its absence before ##, sets the spaces.

    >>> join_tokens(["Ġthe", "Ġcat", "s"]), join_tokens(["the", "cat", "##s"])
    (' the cats', 'the cats')
    """
    if any(token.startswith(("Ġ", "▁")) for token in tokens):
        return "".join(f" {token[1:]}" if token[0] in "Ġ▁" else token for token in tokens)
    if any(token.startswith(" ") for token in tokens):
        return "".join(tokens)
    words = (token[2:] if token.startswith("##") else f" {token}" for token in tokens)
    return "".join(words).removeprefix(" ")
