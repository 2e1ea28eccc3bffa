"""What can be asked of what was seen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.core.matrix import AttentionMatrix
from regard.lens.analysis.finding import Findings
from regard.lens.call import Call
from regard.lens.capture.module_hints import Hints
from regard.lens.table import Table
from regard.pages.html import Page
from regard.types import Array


class Asked(Mapping[str, AttentionMatrix]):
    """The questions that a mapping of layers answers from its calls; `Recording` is the one there is."""

    _hints: Hints
    _runs: dict[str, list[Any]]
    _missed: dict[str, tuple[str, str]]

    def _each(self) -> list[tuple[int, str, int, Call]]:
        """Every call: the number of its layer, its name, which of the layer's calls it is, and the call."""
        each = []
        for number, name in enumerate(self):
            for which, call in enumerate(self.calls(name)):
                if call.trying and call.steps > 1:
                    # Rows of tokens that were taken back are no rows of the text; this raises, and says why.
                    self.__getitem__(name)
                each.append((number, name, which, call))
        return each

    @abstractmethod
    def calls(self, name: str) -> tuple[Call, ...]:
        """The record of each call of a layer."""

    def heads(self, tokens: Any = None, *, windows: Sequence[int] = (16, 128)) -> Table:
        """A table with one row for each layer and head: what the head does, in numbers, from one pass for each layer.

        Rows have `module`, `layer` and `head`, counted from 0, `call` (of a layer that ran several times), and means
        over the tokens of all batch entries, padding left out:

        - `entropy`: −Σⱼ Aᵢⱼ ln Aᵢⱼ, nats (Zhai et al., 2303.06296: near 0 a head has collapsed).
        - `first`: Aᵢₖ at the first token k, the sink (α₁ of Gu et al., 2410.10781; above 0.3 they call it one).
        - `previous`: Aᵢ,ᵢ₋₁, over i ≥ 1 (the previous-token heads of Olsson et al., 2209.11895).
        - `distance`: Σⱼ Aᵢⱼ |i − j| (Vig & Belinkov, 1906.04284).
        - `within_16`, `within_128`: the share on keys less than so far away; `windows` chooses others.
        - `heavy`: the share of Σᵢ Aᵢⱼ that the tenth of the keys with most of it has (H2O, 2306.14048).
        - with `tokens`: `duplicate`, the share on earlier copies of the token itself, and `induction`, on what came
          after earlier copies (prefix matching, Olsson et al.), over the tokens that have one. On s random tokens,
          repeated, these are the scores at offset s and s − 1. `tokens` are ids or text, (n,) or (batch, n).

        What asks for positions is NaN in cross-attention. `pandas.DataFrame(table)` and `polars.DataFrame(table)`
        take it.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer) as recording:
        ...     _ = layer(torch.zeros(1, 4, 8))
        >>> print(recording.heads(windows=[2]))
        module     layer  call  head  entropy  first  previous  distance  within_2  heavy
        self_attn      0     0     0    1.386  0.250     0.250     1.250     0.625  0.250
        self_attn      0     0     1    1.386  0.250     0.250     1.250     0.625  0.250
        """
        from regard.lens.analysis.head_table import heads

        return heads(self._each(), tokens, windows)

    def find(
        self, query: Any, key: Any, tokens: Any = None, *, key_tokens: Any = None, batch: int = 0
    ) -> Table:
        """How much each head lets one token look at another: a table, the largest `weight` first.

        `query` and `key` are texts of tokens, looked up in `tokens`, or positions. One row for each layer and head:
        `module`, `layer`, `call`, `head`, `query`, `key` (positions) and `weight`. Where a text occurs several times,
        every pair of its occurrences is looked at, and a head's row is the pair with the largest weight; positions ask
        for one pair. A mark of tokenizers that a word begins (Ġ, ▁) may be left out. For attention from one sequence to
        another give the tokens of both, `tokens` for the queries and `key_tokens` for the keys.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer) as recording:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> print(recording.find("it", "cat", tokens=["the", "cat", "it"]))
        module     layer  call  head  query  key  weight
        self_attn      0     0     0      2    1   0.333
        self_attn      0     0     1      2    1   0.333
        """
        from regard.lens.analysis.find import find

        return find(self._each(), query, key, tokens, key_tokens, batch)

    def rollout(
        self, token: Any, tokens: Any = None, *, batch: int = 0, layers: str | Sequence[str] | None = None
    ) -> Array:
        """How much of each input token reaches one token through all layers: NumPy, (n,), float64; it sums to 1.

        Attention rollout (Abnar & Zuidema, 2005.00928): the row of ∏ (½ A + ½ I), A the mean of the heads, from the
        last layer down to the first. It is made as a chain of products with a vector, in O(n) memory. `token` is a
        position, or a text that occurs once in `tokens`. `layers` are names or patterns with `*`, all by default; of a
        model with encoder and decoder choose one. It follows the weights, not what the values carry. What a head puts
        on a learnt sink is lost on the way, and the sum is then below 1.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer) as recording:
        ...     _ = layer(torch.zeros(1, 4, 8))
        >>> recording.rollout(-1)
        array([0.125, 0.125, 0.125, 0.625])
        """
        from regard.lens.analysis.find import rollout

        return rollout(self._each(), token, tokens, batch, layers)

    def save(self, path: str | Path) -> None:
        """Write everything that was seen to one file: safetensors, with the rest as JSON in its header; no pickle.

        `regard.load_recording(path)` reads it. Masks and score modifications are written as what they are.
        """
        from regard.lens.serialization import save

        named = {name: causal for name, causal in self._hints.causal.items() if name in self._runs}
        save(self._each(), named, path)

    def diagnose(
        self, tokens: Any = None, attention_mask: Any = None, causal: bool | None = None
    ) -> Findings:
        """What looks wrong: findings with severity, place, evidence in numbers, and the hint; `print` shows them.

        `attention_mask` is what the model was given, (batch, n), 1 = token; without it, padding is known from `tokens`
        such as "[PAD]". `causal=True` says that no token may see later ones; without it, a layer should be causal if
        its module says so (`is_causal`), or if most layers of its stack are.

        Errors: weight on the future, weight on padding, tokens that see nothing, NaN or inf (and where they began), an
        inverted mask, `is_causal` at the wrong corner, dropout while evaluating, positions of cached steps that do not
        go on. Warnings: a scale that is not 1/√head_dim, saturated heads, a slow kernel, layers that gave nothing.
        Notes: uniform heads, sinks. Heads that are extreme may be meant; errors hardly ever are.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer) as recording:
        ...     _ = layer(torch.randn(1, 3, 8))
        >>> recording.diagnose()
        Nothing found in 1 layer, 2 heads.
        """
        from regard.lens.analysis.diagnose import diagnose

        return diagnose(self._each(), self._hints, self._runs, self._missed, tokens, attention_mask, causal)

    def page(
        self,
        tokens: Any = None,
        *,
        key_tokens: Any = None,
        batch: int = 0,
        layers: str | Sequence[str] | None = None,
        heads: Sequence[int] | None = None,
        findings: Findings | None = None,
        title: str | None = None,
        max_bytes: int = 40_000_000,
    ) -> Page:
        """A page with every head of the model, one HTML file that needs no server and no network.

        All heads stand as small maps, in the order of the layers or of any measure of `recording.heads`. One that is
        opened shows every weight: as a map with its tokens, for short texts as lines too, and the largest weights of
        the row that is pointed at. A search tells which head looks from one token to another, as `recording.find` does;
        what `recording.diagnose` finds stands at its heads. The address keeps what is looked at.

        `tokens` name queries and keys, `key_tokens` the keys of attention to another sequence; `batch` chooses the
        entry that is shown. The page carries queries and keys in half precision and works out the weights itself; it
        says by how much they may differ. Heads are carried until the file has `max_bytes`; those left over keep
        their map and measures, and the page says so. `layers` (names or patterns with `*`) and `heads` choose some.
        `findings` are those of `recording.diagnose(tokens)` unless given.

        >>> import regard, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> with regard.watch(layer) as recording:
        ...     _ = layer(torch.zeros(1, 3, 8))
        >>> recording.page(["the", "cat", "it"])
        <page "Where every head looks", ... kB: save(path) writes it>
        """
        from regard.lens.page_data import build_page

        found = self.diagnose(tokens) if findings is None else findings
        return build_page(
            self._each(),
            found,
            tokens=tokens,
            key_tokens=key_tokens,
            batch=batch,
            chosen=layers,
            heads=heads,
            title=title,
            max_bytes=max_bytes,
        )
