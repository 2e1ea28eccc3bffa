"""`CachePolicy`: for each key/value head all keys, or a window of the latest and some of the first; and what it costs.

`CachePolicy.verify` runs held-out documents with the policy and without, and returns a `Verification`.
`CachePolicy.tighten` widens the heads that are responsible for the cost, until a bound holds.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from regard.errors import ArgumentError, describe_argument
from regard.jobs.corpus import Corpus
from regard.jobs.driver import Progress, require_package, run_job
from regard.jobs.manifest import MANIFEST_FILE, SETTINGS_FILE, read_manifest, read_settings
from regard.jobs.model_runner import TextMeasurer, as_source
from regard.jobs.options import RunKeywords, RunOptions
from regard.jobs.shards import EVICTION_WINDOWS, RowBatch, column_to_numpy
from regard.lens.table import Table
from regard.models import LoadedModel
from regard.pages.html import Page, build_page, shorten, shorten_path
from regard.policy.files import change_config, find_wrong_size, read_policy, write_duo_attention, write_policy
from regard.policy.masking import FULL, build_edits, count_affected_rows
from regard.policy.model_runner import COLUMNS, DOCUMENT_COLUMNS, WIDENED_SINKS, PolicySpec
from regard.render.table import format_bytes, format_table
from regard.render.text import escape_unprintable
from regard.types import Array

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache

    from regard.interventions import Edit

OPERATION = PolicySpec.operation
# Documents that `Verification.worst` lists by default.
WORST = 10
# `tighten` widens a head whose effect is at least this share of the largest in the same round.
SHARE = 0.5
# A widened head loses at most this share of the weight that it lost before; otherwise it keeps every key.
REMAINING = 0.1
# The numbers of a head on the page of a verification.
PAGE_MEASURES = {
    "window": "Number of latest keys that the head keeps; – if it keeps all.",
    "lost": "Share of the weight on evicted keys, among tokens that have some, measured without the policy.",
    "predicted": "The lost share that the survey predicts.",
    "effect": "The head's share of the KL divergence, in nats per token; shares add up. 0 if not measured.",
}
# The context length of the printed table, in tokens.
PRINTED_LENGTH = 8192


@dataclass(frozen=True, eq=False)
class CachePolicy:
    """The keys that each key/value head of a model keeps.

    A head keeps every key, or its first `sinks` keys and its latest `windows` keys, including the current token: the
    keys that `causal() & (first(sinks) | sliding_window(window))` allows.

    >>> policy = CachePolicy([[2, FULL]], [[1, 0]], ["layers.0"], {"head_dim": 64, "bytes_per_number": 2})
    >>> print(policy)
    1 layer × 2 kv heads: 1 full, 1 with a window; at 8,192 tokens 2.1 MB instead of 4.19 MB (50.0 % saved)
    layer  module    windows  sinks  bytes at 8,192  saved
        0  layers.0  2 full   1 0            2.1 MB  50.0 %

    Attributes:
        windows: Number of latest keys kept, or FULL, (num_layers, num_kv_heads).
        sinks: Number of first keys kept, (num_layers, num_kv_heads). A head that is FULL has none.
        layers: Names of the attention layers, as in recordings.
        about: Facts about the policy, as JSON values. `num_bytes` needs `head_dim` and `bytes_per_number`, and uses
            `value_dim` if present; `num_heads` is the number of query heads of a layer.

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
        if fault := find_wrong_size(self.about, windows.shape[1]):
            raise _build_error(
                f"about with {fault}", "sizes of the model: a multiple of the kv heads as num_heads"
            )
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
        """Number of query heads of each layer; by default, the number of key/value heads."""
        return int(self.about.get("num_heads", self.num_kv_heads))

    @property
    def groups(self) -> int:
        """Number of query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    def keys(self, context_length: int) -> NDArray[np.int64]:
        """Return the number of keys that each head keeps.

        Args:
            context_length: Number of tokens.

        Returns:
            Counts, (num_layers, num_kv_heads).
        """
        if context_length < 0:
            raise ArgumentError(
                "policy",
                received=f"context_length {context_length}",
                expected="0 or more",
                hint="Pass the number of tokens in the cache.",
            )
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
    def _missing_sizes(self) -> list[str]:
        return [name for name in ("head_dim", "bytes_per_number") if name not in self.about]

    @property
    def _bytes_per_key(self) -> int:
        missing = self._missing_sizes
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
            context_length: Number of tokens for which sizes are given.

        Returns:
            A table with `layer`, `module`, `windows`, `sinks`, the bytes of the layer if `about` allows, and the share
            that is saved.
        """
        keys = self.keys(context_length)
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
                    if not self._missing_sizes
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

    def edits(self) -> list[Edit]:
        """Return edits for `regard.intervene` that restrict each head to the keys it keeps.

        Heads of a layer that keep the same keys share an edit, and heads that keep every key have none.

        Returns:
            The edits, as returned by `regard.interventions.restrict`.

        >>> CachePolicy([[2, FULL]], [[0, 0]], ["layers.0"]).edits()
        [restrict(layers='layers.0', heads=[0], mask=sliding_window(2))]
        """
        return build_edits(self)

    def verify(
        self,
        model: str | Path | LoadedModel | TextMeasurer,
        corpus: str | Path,
        out: str | Path | None = None,
        *,
        bound: float = 0.01,
        effects: bool = False,
        progress: Callable[[Progress], None] | None = None,
        **options: Unpack[RunKeywords],
    ) -> Verification:
        """Run documents with the policy and without, and compare the predictions.

        The policy is applied as masks, so the model keeps its fused kernels. Pass documents that were not in the
        survey. Two synthetic tests, copying a block of random tokens and finding a needle in a haystack, count if the
        model passes them without the policy.

        Args:
            model: A folder, a name on the Hub, `module:function`, or the result of `regard.models.load`.
            corpus: A file, a directory or a pattern of text files, JSON lines or Parquet.
            out: A directory from which an interrupted run can be resumed, as for a survey. Default: a temporary
                directory.
            bound: Largest mean KL divergence of the predictions that is accepted, in nats per token.
            effects: Attribute the divergence to the heads, by four more forward and backward passes.
            progress: Called with a `regard.survey.Progress`, at most ten times a second and after every shard.
            **options: How the model is run: the fields of `regard.survey.RunOptions`, such as `max_tokens`.

        Returns:
            The verification.

        Raises:
            ArgumentError: If an argument is invalid, or the model has other layers or heads than the policy.
            SurveyError: If the run cannot continue: the model does not run, `out` is locked, or the disk is full.
        """
        require_package(OPERATION, "pyarrow")
        if not bound > 0:
            raise ArgumentError(
                OPERATION,
                received=f"bound {bound}",
                expected="a KL divergence above 0, in nats per token",
                hint="For example 0.01, which changes few predictions.",
            )
        kept = [self.layers, self.windows.tolist(), self.sinks.tolist(), self.num_heads]
        digest = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
        run = RunOptions(**options)
        spec = PolicySpec(as_source(model, OPERATION), self, effects, options=run)
        documents = Corpus(str(corpus), *run.corpus_fields, operation=OPERATION)
        settings = {
            "policy": {"sha256": digest},
            "max_tokens": run.max_tokens,
            "dtype": run.dtype,
            "effects": effects,
        }
        with tempfile.TemporaryDirectory(prefix="regard-policy-") as temporary:
            folder = Path(out or temporary).expanduser().absolute()
            run_job(spec, documents, folder, COLUMNS, settings, progress)
            return open_verification(self, folder, bound)

    def tighten(
        self,
        bound: float,
        model: str | Path | LoadedModel | TextMeasurer,
        corpus: str | Path,
        out: str | Path | None = None,
        *,
        max_rounds: int = 16,
        progress: Callable[[Progress], None] | None = None,
        **options: Unpack[RunKeywords],
    ) -> CachePolicy:
        """Widen the responsible heads until the policy meets the bound.

        Each round verifies the policy and attributes the divergence to the heads by integrated gradients, which sum to
        it. The heads with the largest effects keep as many more keys as needed to recover 90 % of their lost weight, or
        all keys. A head without an effect is not changed.

        Args:
            bound: Largest mean KL divergence that is accepted, in nats per token.
            model: The model, as in `verify`.
            corpus: The documents, as in `verify`.
            out: A directory in which the rounds can be resumed. Default: a temporary one.
            max_rounds: Number of times that heads are widened.
            progress: As in `verify`.
            **options: How the model is run, as in `verify`.

        Returns:
            The policy that meets the bound; `about["tightened"]` lists the changes.

        Raises:
            ArgumentError: If the bound is not met after `max_rounds`.
        """
        policy = self
        history: list[dict[str, Any]] = []
        for number in range(max_rounds + 1):
            folder = None if out is None else Path(out).expanduser() / f"round-{number:02}"
            verification = policy.verify(
                model, corpus, folder, bound=bound, effects=True, progress=progress, **options
            )
            if verification.holds:
                tightened = {"bound": bound, "kl": verification.kl, "changes": history}
                return replace(policy, about=policy.about | {"tightened": tightened})
            if number < max_rounds:
                policy, changes = widen_heads(verification)
                history += [{"round": number, **change} for change in changes]
        raise ArgumentError(
            "policy.tighten",
            received=f"a policy that still fails after {max_rounds} rounds: {verification.verdict}",
            expected="a bound that holds",
            hint="Pass a larger bound, or more rounds: max_rounds=64."
            + (" Finished rounds are not run again." if out is not None else ""),
        )

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
        """Return an empty transformers cache that stores only the keys that the policy keeps.

        Pass it as `past_key_values` to the model or to `generate()`. If the configuration of the model already
        expresses the policy, it is a `DynamicCache` of transformers. Otherwise each kv head stores its own sinks and
        window, and the attention implementation of the model is set to "regard_policy", which computes the same outputs
        as "sdpa" for other caches.

        Args:
            model: A decoder of transformers.

        Returns:
            The cache, for one sequence or batch.

        Raises:
            ArgumentError: If the numbers of layers or heads differ, or the model family is not supported.
            ArgumentTypeError: If the model is not a transformers model.
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
                "transformers" writes a `config.json` with a window for each layer. "json" is the format of `save`.
            config: Configuration of the model, for "transformers".
            widen: For "duo_attention", give every windowed head the largest window and number of sinks.

        Returns:
            The path that was written.

        Raises:
            ArgumentError: If the format cannot express the policy.
            ArgumentTypeError: If `config` is missing for "transformers".
        """
        folder = Path(path).expanduser()
        if format == "json":
            return self.save(folder)
        if format == "duo_attention":
            model = self.about.get("model")
            return write_duo_attention(
                self, folder, widen, model.get("name") if isinstance(model, dict) else model
            )
        if format == "transformers":
            change_config(self, config).save_pretrained(folder)
            return folder
        raise ArgumentError(
            "policy.export",
            received=f"format={format!r}",
            expected='"duo_attention", "transformers" or "json"',
            hint="Check the name.",
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CachePolicy):
            return NotImplemented
        same = np.array_equal(self.windows, other.windows) and np.array_equal(self.sinks, other.sinks)
        return same and self.layers == other.layers and self.about == other.about

    __hash__ = None  # type: ignore[assignment]

    def summary(self, context_length: int = PRINTED_LENGTH) -> str:
        """Return the policy as a sentence.

        Args:
            context_length: Number of tokens for which sizes are given.
        """
        full = int((self.windows == FULL).sum())
        layers = f"{self.num_layers} layer{'s' if self.num_layers != 1 else ''}"
        size = ""
        if not self._missing_sizes:
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
            "integers of shape (num_layers, num_kv_heads)",
        )
    return array.astype(np.int64)


def _build_error(received: str, expected: str) -> ArgumentError:
    hint = "A policy has one row of windows and of sinks for each layer, and one column for each kv head."
    return ArgumentError("CachePolicy", received=received, expected=expected, hint=hint)


def open_verification(policy: CachePolicy, path: Path, bound: float) -> Verification:
    """Read the committed rows of a verification."""
    settings = read_settings(path / SETTINGS_FILE, OPERATION)
    committed = read_manifest(path / MANIFEST_FILE)[0]
    entries = [committed[shard] for shard in sorted(committed)]
    quarantined = [document for entry in entries for document in entry["quarantined"]]
    documents = _read_rows([path / entry["file"] for entry in entries], policy)
    return build_verification(policy, bound, settings, documents, quarantined)


def _read_rows(files: list[Path], policy: CachePolicy) -> Iterator[RowBatch]:
    """Yield the rows of each document, file by file."""
    from pyarrow import parquet

    heads = policy.num_layers * policy.num_heads
    for path in files:
        table = parquet.read_table(path)
        columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        numbers = {name: column_to_numpy(columns[name]) for name in COLUMNS}
        for row in range(0, len(table), heads):
            own = {name: values[row : row + heads] for name, values in numbers.items()}
            own["tokens"] = columns["tokens"][row].as_py()
            yield RowBatch(columns["document"][row].as_py(), columns["name"][row].as_py(), own)


def build_verification(
    policy: CachePolicy,
    bound: float,
    settings: dict[str, Any],
    documents: Iterable[RowBatch],
    quarantined: list[dict[str, str]],
) -> Verification:
    """Build a verification from the rows of its documents, one at a time."""
    table: list[dict[str, Any]] = []
    sums: dict[str, Any] = dict.fromkeys((name for name in COLUMNS if name not in DOCUMENT_COLUMNS), 0.0)
    affected: Array = np.zeros(policy.windows.shape)
    for document in documents:
        columns = document.columns
        tokens = int(columns["tokens"])
        values = {name: float(columns[name][0]) for name in DOCUMENT_COLUMNS}
        table.append({"document": document.document, "name": document.name, "tokens": tokens, **values})
        for name in sums:
            sums[name] = sums[name] + tokens * np.asarray(columns[name], float)
        affected = affected + count_affected_rows(policy, tokens)
    return Verification(policy, bound, settings, table, sums, affected, quarantined)


class Verification:
    """The cost of a policy on held-out documents; `CachePolicy.verify` returns it.

    Args:
        sums: Sums over tokens of each measured column of the heads.
        affected: Number of tokens with evicted keys, (num_layers, num_kv_heads).

    Attributes:
        policy: The policy.
        bound: Largest mean KL divergence that is accepted, in nats per token.
        settings: Settings of the run.
        documents: For each document its number of tokens, the mean and the largest KL divergence of a prediction,
            top-1 agreement, and the loss without and with the policy, in nats per token.
        tests: Results of the synthetic tests; only tests that the model passes without the policy count.
        quarantined: Documents that could not be run, with the reason.
    """

    def __init__(
        self,
        policy: CachePolicy,
        bound: float,
        settings: dict[str, Any],
        documents: list[dict[str, Any]],
        sums: dict[str, Any],
        affected: Array,
        quarantined: list[dict[str, str]],
    ) -> None:
        self.policy, self.bound, self.settings = policy, bound, settings
        self.documents, self.quarantined = Table(documents), quarantined
        self.tests = Table(settings.get("tests", []))
        self._sums, self._affected = sums, affected
        if not documents:
            raise ArgumentError(
                OPERATION,
                received="a corpus without any document that the model can run on",
                expected="at least one",
                hint=f"{len(quarantined)} are quarantined: {quarantined[:1]}"
                if quarantined
                else "It is empty.",
            )

    def _average(self, column: str, shift: int = 0) -> float:
        """Average a column of the documents over tokens; `shift` is 1 for predictions of a next token."""
        values = np.array(self.documents.column(column))
        weights = np.array(self.documents.column("tokens"), float) - shift
        defined = ~np.isnan(values)
        return float((values * weights)[defined].sum() / max(weights[defined].sum(), 1))

    @property
    def tokens(self) -> int:
        """Number of tokens of the documents."""
        return sum(self.documents.column("tokens"))

    @property
    def kl(self) -> float:
        """Mean KL divergence of the predictions, in nats per token."""
        return self._average("kl")

    @property
    def agreement(self) -> float:
        """Share of tokens whose most likely prediction does not change."""
        return self._average("agreement")

    @property
    def perplexity(self) -> tuple[float, float]:
        """Perplexity without and with the policy."""
        return math.exp(self._average("loss", 1)), math.exp(self._average("policy_loss", 1))

    @property
    def failed_tests(self) -> Table:
        """Synthetic tests that the model passes without the policy but fails with it."""
        return Table(test for test in self.tests if test["able"] and not test["passed"])

    @property
    def holds(self) -> bool:
        """Whether the mean KL divergence is within the bound and no synthetic test fails because of the policy."""
        return self.kl <= self.bound and not self.failed_tests

    @property
    def verdict(self) -> str:
        """The result as a sentence."""
        if self.holds:
            return f"The policy holds: KL {self.kl:.2g} nats per token is within the bound of {self.bound:g}."
        lost = ", ".join(f"{test['test']} over {test['length']:,} tokens" for test in self.failed_tests)
        if self.kl <= self.bound:
            return f"The policy fails: the model no longer passes {lost}. KL {self.kl:.2g} is within {self.bound:g}."
        also = f", and the model no longer passes {lost}" if lost else ""
        return f"The policy fails: KL {self.kl:.2g} nats per token exceeds the bound of {self.bound:g}{also}."

    @cached_property
    def effects(self) -> Array:
        """The share of each query head in the mean KL divergence, (num_layers, num_heads); zeros if not measured."""
        shape = self.policy.num_layers, self.policy.num_heads
        return np.asarray(self._sums["effect"] / self.tokens).reshape(shape)

    @property
    def lost(self) -> Array:
        """Share of the weight that each query head loses, among tokens with evicted keys: (num_layers, num_heads).

        It is measured without the policy, as the survey predicts it. NaN if no token has evicted keys.
        """
        return self._divide(self._sums["lost"])

    @property
    def predicted_lost(self) -> Array | None:
        """The `lost` that the survey predicts; None if the policy was not made from a survey."""
        predicted = self.policy.about.get("predicted", {}).get("lost")
        return None if predicted is None else np.array(predicted)

    @property
    def prediction_error(self) -> float:
        """Relative difference of predicted and measured lost weight, over all heads with a window; NaN if unknown."""
        if self.predicted_lost is None:
            return math.nan
        counted = np.isfinite(self.lost)
        measured = float(self.lost[counted].sum())
        return float(self.predicted_lost[counted].sum()) / measured - 1 if measured else math.nan

    def _divide(self, sums: Array) -> Array:
        """Divide sums over tokens of each query head by its number of tokens with evicted keys."""
        rows = np.repeat(self._affected, self.policy.groups, 1)
        sums = np.asarray(sums).reshape(*rows.shape, *np.shape(sums)[1:])
        rows = rows.reshape(*rows.shape, *[1] * (sums.ndim - 2))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(rows > 0, sums / rows, np.nan)

    @property
    def heads(self) -> Table:
        """One row for each query head: layer, module, head, kv_head, window, sinks, lost, predicted lost and effect."""
        group, predicted = self.policy.groups, self.predicted_lost
        rows = []
        for (layer, head), lost in np.ndenumerate(self.lost):
            window = int(self.policy.windows[layer, head // group])
            rows.append(
                {
                    "layer": layer,
                    "module": self.policy.layers[layer],
                    "head": head,
                    "kv_head": head // group,
                    "window": "full" if window == FULL else str(window),
                    "sinks": int(self.policy.sinks[layer, head // group]),
                    "lost": float(lost),
                    "predicted": math.nan if predicted is None else float(predicted[layer, head]),
                    "effect": float(self.effects[layer, head]),
                }
            )
        return Table(rows)

    def worst(self, count: int = WORST) -> Table:
        """Return the documents with the largest mean KL divergence.

        Args:
            count: Number of documents.

        Returns:
            Their rows, largest first.
        """
        return self.documents.sort("kl")[:count]

    @property
    def summary(self) -> dict[str, Any]:
        """The result as a dictionary for JSON."""
        plain, limited = self.perplexity
        error = self.prediction_error
        return {
            "holds": self.holds,
            "verdict": self.verdict,
            "bound": self.bound,
            "documents": len(self.documents),
            "tokens": self.tokens,
            "quarantined": len(self.quarantined),
            "kl": self.kl,
            "agreement": self.agreement,
            "perplexity": plain,
            "policy_perplexity": limited,
            "prediction_error": None if math.isnan(error) else error,
            "saved": self.policy.savings(int(self.settings["max_tokens"])),
            "tests": [{name: test[name] for name in test if name != "effects"} for test in self.tests],
            "worst": [dict(row) for row in self.worst()],
        }

    def page(self, title: str | None = None) -> Page:
        """Build the report: the verdict, every head with its window, lost weight and effect, and the worst documents.

        Args:
            title: Title of the page; the model by default.

        Returns:
            The page, one HTML file that needs no network.
        """
        if title is None:
            title = f"Cache policy of {shorten_path(self.settings['model']['name'])}"
        columns = {name: self.heads.column(name) for name in self.heads.columns}
        columns["window"] = [None if window == "full" else int(window) for window in columns["window"]]
        record = {
            "title": escape_unprintable(title),
            "verdict": escape_unprintable(self.verdict),
            "holds": self.holds,
            "facts": [list(map(escape_unprintable, fact)) for fact in self.facts],
            "modules": [escape_unprintable(name) for name in self.policy.layers],
            "layers": columns["layer"],
            "heads": columns["head"],
            "measures": [
                {
                    "name": name,
                    "caption": caption,
                    "means": [None if value != value else value for value in columns[name]],
                }
                for name, caption in PAGE_MEASURES.items()
            ],
            "documents": [
                [
                    shorten(str(row["name"] or row["document"])),
                    int(row["tokens"]),
                    *(float(row[name]) for name in ("kl", "agreement", "loss", "policy_loss")),
                ]
                for row in self.worst()
            ],
        }
        return build_page(escape_unprintable(title), "policyPage", record)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Names and values of the result, as text."""
        plain, limited = self.perplexity
        length = int(self.settings["max_tokens"])
        counts = f"{self.tokens:,} tokens, {len(self.quarantined)} quarantined"
        facts = [
            ("documents", f"{len(self.documents):,} ({counts})"),
            ("cache saved", f"{100 * self.policy.savings(length):.1f} % at {length:,} tokens"),
            ("KL divergence", f"{self.kl:.4g} nats per token"),
            ("top-1 agreement", f"{100 * self.agreement:.2f} %"),
            ("perplexity", f"{plain:.4g} without the policy, {limited:.4g} with it"),
        ]
        if not math.isnan(self.prediction_error):
            off = f"{100 * self.prediction_error:+.1f} % off"
            facts.append(("lost weight", f"the prediction of the survey is {off}"))
        for test in self.tests:
            result = f"{test['policy']:.0%} with it" if test["able"] else "too rarely to count"
            value = f"{test['plain']:.0%} right without the policy, {result}"
            facts.append((f"{test['test']}, {test['length']:,} tokens", value))
        return facts

    def __str__(self) -> str:
        table = format_table(self.facts, align="left")
        return f"{self.verdict}\n\n{table}\n\nWorst documents\n{self.worst(3)!r}"

    __repr__ = __str__


def widen_heads(verification: Verification) -> tuple[CachePolicy, list[dict[str, Any]]]:
    """Widen the heads with the largest measured effect, until their effects cover what exceeds the bound."""
    policy = verification.policy
    effects, excess = _sum_by_kv_head(policy, verification.effects), verification.kl - verification.bound
    if excess <= 0:  # a synthetic test fails: its own effects count
        failed = verification.failed_tests
        effects = sum(_sum_by_kv_head(policy, np.array(test["effects"])) for test in failed)
        excess = sum(test["kl"] for test in failed)
    effects = np.where(policy.windows == FULL, -np.inf, effects)
    order = np.argsort(effects, axis=None)[::-1]
    windows, sinks = policy.windows.copy(), policy.sinks.copy()
    changes: list[dict[str, Any]] = []
    covered, largest = 0.0, float(effects.max())
    for place in order:
        layer, head = (int(number) for number in np.unravel_index(place, effects.shape))
        effect = float(effects[layer, head])
        if changes and (effect < SHARE * largest or covered >= excess):
            break
        window, count = choose_wider(verification, layer, head)
        changes.append(
            {
                "layer": layer,
                "kv_head": head,
                "effect": effect,
                "before": [int(windows[layer, head]), int(sinks[layer, head])],
                "after": [window, count],
            }
        )
        windows[layer, head], sinks[layer, head] = window, count
        covered += effect
    about = dict(policy.about)
    about.pop("predicted", None)  # it was predicted for other windows
    return replace(policy, windows=windows, sinks=sinks, about=about), changes


def choose_wider(verification: Verification, layer: int, kv_head: int) -> tuple[int, int]:
    """Choose the fewest keys with which a head loses a tenth of the weight that it loses now, on the same documents."""
    policy = verification.policy
    heads = slice(kv_head * policy.groups, (kv_head + 1) * policy.groups)

    def sum_over_heads(name: str) -> Array:
        total = np.asarray(verification._sums[name])
        return total.reshape(policy.num_layers, policy.num_heads, *total.shape[1:])[layer, heads].sum(0)

    window, sinks = int(policy.windows[layer, kv_head]), int(policy.sinks[layer, kv_head])
    limit = REMAINING * float(sum_over_heads("lost"))
    longest = max(verification.documents.column("tokens"))
    more = max(sinks, WIDENED_SINKS)
    candidates = [
        (int(size) + count, int(size), count, float(lost))
        for name, count in (("evicted", sinks), ("evicted_widened", more))
        for size, lost in zip(EVICTION_WINDOWS, sum_over_heads(name), strict=True)
        if size >= window and (size, count) != (window, sinks) and size + count < longest
    ]
    for _, size, count, lost in sorted(candidates):
        if lost <= limit:
            return size, count
    return FULL, 0


def _sum_by_kv_head(policy: CachePolicy, effects: Array) -> Array:
    return effects.reshape(policy.num_layers, policy.num_kv_heads, policy.groups).sum(-1)
