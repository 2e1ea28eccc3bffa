"""`CachePolicy`: for each key/value head of a model all keys, or a window of the latest and some of the first."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from regard.errors import ArgumentError, describe_argument
from regard.lens.table import Table
from regard.policy.file_format import read_policy, write_policy
from regard.policy.window_sizes import FULL
from regard.render.table import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache

    from regard.jobs.worker_process import TextMeasurer
    from regard.models import LoadedModel
    from regard.policy.verification import Verification

# The context length of the printed table, in tokens.
PRINTED_LENGTH = 8192


@dataclass(frozen=True, eq=False)
class CachePolicy:
    """The keys that each key/value head of a model keeps.

    A head keeps every key, or its first `sinks` and its latest `windows` keys, the current token's included: the keys
    that `causal() & (first(sinks) | sliding_window(window))` allows.

    >>> policy = CachePolicy([[2, FULL]], [[1, 0]], ["layers.0"], {"head_dim": 64, "bytes_per_number": 2})
    >>> print(policy)
    1 layer × 2 kv heads: 1 full, 1 with a window; at 8,192 tokens 2.1 MB instead of 4.19 MB (50.0 % saved)
    layer  module    windows  sinks  bytes at 8,192  saved
        0  layers.0  2 full   1 0            2.1 MB  50.0 %

    Attributes:
        windows: Number of latest keys kept, or FULL, (num_layers, num_kv_heads).
        sinks: Number of first keys kept, (num_layers, num_kv_heads). A head that is FULL has none.
        layers: Names of the attention layers, as in recordings.
        about: Facts about the policy that JSON can hold. `num_bytes` needs `head_dim` and `bytes_per_number`, and uses
            `value_dim` if it is there; `num_heads` is the number of query heads of a layer.

    Raises:
        ArgumentError: If shapes do not agree, or a number is not allowed.
    """

    windows: NDArray[np.int64]
    sinks: NDArray[np.int64]
    layers: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = tuple(self.layers)
        windows = _as_counts(self.windows, "windows", len(layers))
        sinks = _as_counts(self.sinks, "sinks", len(layers))
        if windows.shape != sinks.shape:
            raise _build_error(
                f"windows of shape {windows.shape} and sinks of shape {sinks.shape}", "one shape"
            )
        sinks = np.where(windows == FULL, 0, sinks)
        if ((windows < 1) & (windows != FULL)).any():
            raise _build_error(
                f"a window of {windows[(windows < 1) & (windows != FULL)][0]}", "1 or more, or FULL"
            )
        if (sinks < 0).any():
            raise _build_error(f"{sinks.min()} sinks", "0 or more")
        if not all(isinstance(name, str) for name in layers):
            raise _build_error("a layer whose name is not a string", "names of layers")
        for name, array in (("windows", windows), ("sinks", sinks)):
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "about", dict(self.about))

    @property
    def num_layers(self) -> int:
        """Number of attention layers."""
        return int(self.windows.shape[0])

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads of each layer."""
        return int(self.windows.shape[1])

    @property
    def num_heads(self) -> int:
        """Number of query heads of each layer; as many as key/value heads if `about` does not say."""
        return int(self.about.get("num_heads", self.num_kv_heads))

    def keys(self, context_length: int) -> NDArray[np.int64]:
        """Return the number of keys that each head keeps.

        Args:
            context_length: Number of tokens.

        Returns:
            Counts, (num_layers, num_kv_heads).
        """
        _check_length(context_length)
        kept = np.minimum(self.windows + self.sinks, context_length)
        return np.where(self.windows == FULL, context_length, kept)

    def num_bytes(self, context_length: int) -> int:
        """Return the size of the cache.

        Args:
            context_length: Number of tokens.

        Returns:
            Bytes of all keys and values of one sequence.

        Raises:
            ArgumentError: If `about` does not hold `head_dim` and `bytes_per_number`.
        """
        return int(self.keys(context_length).sum()) * self._bytes_per_key

    def savings(self, context_length: int) -> float:
        """Return the share of the cache that the policy saves, 0 to 1.

        Args:
            context_length: Number of tokens.

        Returns:
            The share of the keys that are evicted.
        """
        return 1 - float(self.keys(context_length).mean()) / max(context_length, 1)

    @property
    def _bytes_per_key(self) -> int:
        missing = [name for name in ("head_dim", "bytes_per_number") if name not in self.about]
        if missing:
            raise ArgumentError(
                "policy.num_bytes",
                received=f"a policy whose about has no {missing[0]}",
                expected="about with head_dim and bytes_per_number",
                hint='Pass them to CachePolicy: about={"head_dim": 64, "bytes_per_number": 2}.',
            )
        head_dim = int(self.about["head_dim"])
        return (head_dim + int(self.about.get("value_dim", head_dim))) * int(self.about["bytes_per_number"])

    def table(self, context_length: int = PRINTED_LENGTH) -> Table:
        """Return the policy as a table with one row for each layer.

        Args:
            context_length: Number of tokens that the sizes are given for.

        Returns:
            A table with `layer`, `module`, `windows`, `sinks`, the bytes of the layer if `about` allows, and the share
            that is saved.
        """
        keys = self.keys(context_length)
        has_size = {"head_dim", "bytes_per_number"} <= self.about.keys()
        return Table(
            {
                "layer": layer,
                "module": name,
                "windows": " ".join(_format_window(window) for window in self.windows[layer]),
                "sinks": " ".join(map(str, self.sinks[layer])),
                **(
                    {
                        f"bytes at {context_length:,}": format_bytes(
                            int(keys[layer].sum()) * self._bytes_per_key
                        )
                    }
                    if has_size
                    else {}
                ),
                "saved": f"{100 * (1 - keys[layer].mean() / max(context_length, 1)):.1f} %",
            }
            for layer, name in enumerate(self.layers)
        )

    def plot(self, *, ax: Any = None, **style: Any) -> Any:
        """Draw the windows as an image, layers down and key/value heads across.

        Args:
            ax: Axes to draw on. Default: a new figure.
            **style: Arguments of `regard.plot.heads`, such as `numbers=False` or `vmax=1024`.

        Returns:
            The Axes.
        """
        from regard.plot import heads

        rows = [
            {"layer": layer, "head": head, "window": float("nan") if window == FULL else float(window)}
            for (layer, head), window in np.ndenumerate(self.windows)
        ]
        ax = heads(rows, "window", ax=ax, **style)
        ax.set(xlabel="kv head; hatched: every key" if (self.windows == FULL).any() else "kv head")
        return ax

    def verify(
        self,
        model: str | Path | LoadedModel | TextMeasurer,
        corpus: str | Path,
        out: str | Path | None = None,
        *,
        bound: float = 0.01,
        effects: bool = False,
        **options: Any,
    ) -> Verification:
        """Run documents with the policy and without, and compare the predictions.

        The policy is applied as masks, so the model keeps its fused kernels. Pass other documents than those of the
        survey. Synthetic tests, to copy a block of random tokens and to find a needle in a haystack, count if the model
        passes them without the policy.

        Args:
            model: A folder, a name on the Hub, `module:function`, or the result of `regard.models.load`.
            corpus: A file, a directory or a pattern of text files, JSON lines or Parquet.
            out: A directory in which the run can be resumed after an interruption, like that of a survey. Default: a
                temporary one.
            bound: Largest mean KL divergence of the predictions that is accepted, in nats per token.
            effects: Attribute the divergence to the heads, by four more forward and backward passes.
            **options: `max_tokens`, `workers`, `executor`, `text_field`, `name_field`, `shard_size`, `timeout`,
                `max_bytes`, `device`, `dtype`, `threads`, `trust_remote_code` and `progress`, as in
                `regard.survey.run`.

        Returns:
            The verification.

        Raises:
            ArgumentError: If an argument is invalid, or the model has other layers or heads than the policy.
            SurveyError: If the run cannot continue: the model does not run, `out` is locked, or the disk is full.
        """
        from regard.policy.verification import verify_policy

        return verify_policy(self, model, corpus, out, bound=bound, effects=effects, **options)

    def tighten(
        self,
        bound: float,
        model: str | Path | LoadedModel | TextMeasurer,
        corpus: str | Path,
        out: str | Path | None = None,
        *,
        max_rounds: int = 16,
        **options: Any,
    ) -> CachePolicy:
        """Widen the heads that are responsible until the policy holds.

        Each round verifies the policy and attributes the divergence to the heads by integrated gradients, which add up
        to it. The heads with the largest effects get the fewest more keys that recover nine tenths of the weight that
        they lose, or all keys. A head without an effect is not changed.

        Args:
            bound: Largest mean KL divergence that is accepted, in nats per token.
            model: The model, as in `verify`.
            corpus: The documents, as in `verify`.
            out: A directory in which the rounds can be resumed. Default: a temporary one.
            max_rounds: Number of times that heads are widened.
            **options: Options of `verify`.

        Returns:
            The policy that holds; `about["tightened"]` lists the changes.

        Raises:
            ArgumentError: If the bound does not hold after `max_rounds`.
        """
        from regard.policy.tightening import tighten_policy

        return tighten_policy(self, bound, model, corpus, out, max_rounds, options)

    def save(self, path: str | Path) -> Path:
        """Write the policy to a JSON file.

        Args:
            path: The file.

        Returns:
            The path of the file.
        """
        windows = [[None if window == FULL else int(window) for window in row] for row in self.windows]
        return write_policy(Path(path).expanduser(), self.layers, windows, self.sinks.tolist(), self.about)

    @classmethod
    def load(cls, path: str | Path) -> CachePolicy:
        """Read a policy from a file that `save` wrote.

        Args:
            path: The file.

        Returns:
            The policy.

        Raises:
            ArgumentError: If the file is not a policy, is damaged or has another version.
            FileNotFoundError: If there is no such file.
        """
        layers, windows, sinks, about = read_policy(Path(path).expanduser())
        full = [[FULL if window is None else window for window in row] for row in windows]
        return cls(np.array(full, np.int64), np.array(sinks, np.int64), tuple(layers), about)

    def cache(self, model: PreTrainedModel) -> Cache:
        """Return an empty transformers cache that stores the keys of the policy and no others.

        Pass it as `past_key_values` to the model or to `generate()`. If the configuration of the model says what the
        policy says, it is a `DynamicCache` of transformers. Otherwise each kv head stores its own sinks and window, and
        the attention implementation of the model is set to "regard_policy", which computes the outputs of "sdpa" with
        other caches.

        Args:
            model: A decoder of transformers.

        Returns:
            The cache, for one sequence or batch.

        Raises:
            ArgumentError: If the policy has another number of layers or heads, or the family cannot be served.
            ArgumentTypeError: If the model is none of transformers.
            ImportError: If torch or a current release of transformers is not installed.
        """
        try:
            from regard.policy.cache import build_cache
        except ImportError as error:
            hint = "It needs torch and a current release of transformers: pip install -U 'regard[hf]'"
            raise ImportError(f"policy.cache: {error}. {hint}") from error

        return build_cache(self, model)

    def export(
        self,
        path: str | Path,
        format: Literal["duo_attention", "transformers", "json"],
        *,
        config: PreTrainedConfig | None = None,
        widen: bool = False,
    ) -> Path:
        """Write the policy in the format of another tool.

        Args:
            path: The folder to write, or for "json" the file.
            format: "duo_attention" writes `full_attention_heads.tsv` and `config.json`, which DuoAttention reads.
                "transformers" writes a `config.json` with a window for each layer. "json" is that of `save`.
            config: Configuration of the model, for "transformers".
            widen: Give every windowed head the largest window and the most sinks of any, for "duo_attention".

        Returns:
            The path that was written.

        Raises:
            ArgumentError: If the format cannot say what the policy says.
            ArgumentTypeError: If "transformers" gets no configuration.
        """
        from regard.policy.export import export_policy

        return export_policy(self, path, format, config=config, widen=widen)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CachePolicy):
            return NotImplemented
        same = np.array_equal(self.windows, other.windows) and np.array_equal(self.sinks, other.sinks)
        return same and self.layers == other.layers and self.about == other.about

    __hash__ = None  # type: ignore[assignment]

    def summary(self, context_length: int = PRINTED_LENGTH) -> str:
        """Return the policy as a sentence.

        Args:
            context_length: Number of tokens that the sizes are given for.
        """
        full = int((self.windows == FULL).sum())
        layers = f"{self.num_layers} layer{'s' if self.num_layers != 1 else ''}"
        size = ""
        if {"head_dim", "bytes_per_number"} <= self.about.keys():
            whole = self.windows.size * context_length * self._bytes_per_key
            size = f" {format_bytes(self.num_bytes(context_length))} instead of {format_bytes(whole)}"
        return (
            f"{layers} × {self.num_kv_heads} kv heads: {full} full, {self.windows.size - full} with a window; "
            f"at {context_length:,} tokens{size} ({100 * self.savings(context_length):.1f} % saved)"
        )

    def __str__(self) -> str:
        return f"{self.summary()}\n{self.table()!r}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from regard.render import notebook

        table = self.table()
        rows = [list(map(str, row.values())) for row in table[: notebook.MAX_ROWS]]
        is_text = [isinstance(value, str) for value in table[0].values()] if table else []
        more = len(table) - notebook.MAX_ROWS
        closing = f"… and {more:,} more rows" if more > 0 else ""
        return notebook.render_table(self.summary(), table.columns, rows, is_text, closing)


def _format_window(window: int) -> str:
    return "full" if window == FULL else f"{window}"


def _as_counts(values: Any, name: str, num_layers: int) -> NDArray[np.int64]:
    """Return a copy of the counts as int64, (num_layers, num_kv_heads)."""
    try:
        array = np.array(values)
    except ValueError:  # rows of several lengths
        array = np.array(None)
    if array.ndim != 2 or array.dtype.kind not in "iu" or not array.size or len(array) != num_layers:
        raise _build_error(
            f"{name}, {describe_argument(array)}, for {num_layers} layers",
            "whole numbers of shape (num_layers, num_kv_heads)",
        )
    return array.astype(np.int64)


def _check_length(context_length: int) -> None:
    if context_length < 0:
        raise ArgumentError(
            "policy.num_bytes",
            received=f"context_length {context_length}",
            expected="0 or more",
            hint="Pass the number of tokens in the cache.",
        )


def _build_error(received: str, expected: str) -> ArgumentError:
    hint = "A policy has one row of windows and of sinks for each layer, and one column for each kv head."
    return ArgumentError("CachePolicy", received=received, expected=expected, hint=hint)
