"""`SpanMass`: the weight of each generated token on named parts of the prompt, for every layer and head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from regard.errors import ArgumentError, IndexOutOfRangeError
from regard.lens.layer_spans import LayerSpans, mean_defined
from regard.lens.table import Table
from regard.types import Array, IntArray

if TYPE_CHECKING:
    from regard.pages.html import Page

__all__ = ["LayerSpans", "SpanMass"]


class SpanMass(Mapping[str, Array]):
    """The share of each token's attention on named parts of the prompt; `Recording.span_mass` computes it.

    `mass[module]` is an array (batch, heads, tokens, names) for each layer. In a recording of `generate()`, the tokens
    are those that were generated, and the attention of a token is that of the row that produced it: the query of the
    token before. In a recording of one pass, the tokens are all tokens, each with its own row.

    Attention says where a head reads. It does not say what the answer depends on: `regard.intervene` tests that.

    Attributes:
        names: Names of the last axis: the spans, then "other", the rest of the prompt, then "generated" if tokens were
            generated. Shares of a row add up to 1, less the share of a learnt sink.
        positions: Position of each token in the sequence, (tokens,).
        prompt: Number of tokens of the prompt, padding included; None for a recording of one pass.
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

        It is C / (C + G), where C is the mean weight of a token of the prompt and G that of a token generated so far
        (Chuang et al., 2407.07071). It is NaN for the first generated token, and without generated tokens.
        """
        return {layer.module: layer.lookback for layer in self.layers}

    @property
    def plan(self) -> str:
        """How the masses of each layer were computed, equal layers on one line."""
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
            tokens: Texts of the whole sequence, prompt included, for a column `token`.
            batch: The batch entry.

        Returns:
            Columns `position`, `token` if texts were given, one for each of `names`, and `lookback`.

        Raises:
            IndexOutOfRangeError: If there is no such batch entry.
            ArgumentError: If there are fewer texts than tokens.
        """
        self.check_batch(batch, "mass.tokens")
        self.check_tokens(tokens, "mass.tokens")
        masses = np.concatenate([layer.mass[batch] for layer in self.layers]).mean(0)
        lookback = mean_defined(np.concatenate([layer.lookback[batch] for layer in self.layers]), 0)
        table = Table()
        for position, row, ratio in zip(self.positions.tolist(), masses, lookback, strict=True):
            text = {} if tokens is None else {"token": tokens[position]}
            table.append({"position": position} | text | self._name(row) | {"lookback": float(ratio)})
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

        Each token has the colour of the span that got most of its attention, stronger the larger the share. Layer and
        head are chosen on the page, or means over them. A chosen token shows its shares, and those of every layer.

        Args:
            tokens: Texts of the whole sequence, prompt and answer.
            batch: The batch entry.
            title: Title of the page.
            max_bytes: If the masses of all heads would make the page larger, it holds the means of layers.

        Returns:
            The page: `page.save(path)` writes it, and a notebook shows it.

        Raises:
            IndexOutOfRangeError: If there is no such batch entry.
            ArgumentError: If there are fewer texts than tokens.
        """
        from regard.lens.answer_page import build_page

        self.check_batch(batch, "mass.page")
        self.check_tokens(tokens, "mass.page")
        return build_page(
            self.layers,
            self.names,
            self.positions,
            self.prompt,
            self.labels[batch if len(self.labels) > 1 else 0],
            [str(token) for token in tokens],
            batch=batch,
            title=title,
            max_bytes=max_bytes,
        )

    def check_batch(self, batch: int, operation: str) -> None:
        """Refuse a batch entry that does not exist.

        Args:
            batch: Number of the batch entry.
            operation: Name of the call, for the message.

        Raises:
            IndexOutOfRangeError: If there is no such batch entry.
        """
        size = len(self.layers[0].mass)
        if not -size <= batch < size:
            raise IndexOutOfRangeError(
                operation,
                received=f"batch={batch}",
                expected=f"one of {size} batch entries" if size > 1 else "batch=0: there is one batch entry",
                hint="Batch entries are counted from 0.",
            )

    def check_tokens(self, tokens: Sequence[str] | None, operation: str) -> None:
        """Refuse texts that do not reach the last token.

        Args:
            tokens: Texts of the tokens.
            operation: Name of the call, for the message.

        Raises:
            ArgumentError: If there are too few.
        """
        needed = int(self.positions.max(initial=-1)) + 1
        if tokens is not None and len(tokens) < needed:
            raise ArgumentError(
                operation,
                received=f"{len(tokens)} tokens",
                expected=f"at least {needed}: every token of the prompt and of the answer",
                hint="tokenizer.convert_ids_to_tokens(output_ids[batch]) has them, padding included.",
            )

    def __repr__(self) -> str:
        layers = "1 layer" if len(self) == 1 else f"{len(self)} layers"
        what = "tokens" if self.prompt is None else "generated tokens"
        return f"SpanMass({', '.join(self.names)}; {len(self.positions)} {what}, {layers})"
