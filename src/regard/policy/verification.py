"""Verify a cache policy: run held-out documents with the policy and without, and compare the predictions."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.errors import ArgumentError, RegardError
from regard.jobs.corpus import Corpus
from regard.jobs.driver import CorpusJob, check_run, run_job
from regard.jobs.executors import EXECUTORS
from regard.jobs.manifest import MANIFEST_FILE, SETTINGS_FILE, read_manifest
from regard.jobs.progress import Progress
from regard.jobs.row_schema import RowBatch, column_to_numpy
from regard.jobs.worker_process import ModelInfo, PickledModel, TextMeasurer
from regard.lens.table import Table
from regard.policy.masking import count_affected_rows
from regard.policy.model_runner import COLUMNS, DOCUMENT_COLUMNS, VerificationSpec
from regard.policy.window_sizes import FULL
from regard.render.table import format_table
from regard.types import Array

if TYPE_CHECKING:
    from regard.models import LoadedModel
    from regard.pages.html import Page
    from regard.policy.policy import CachePolicy

OPERATION = "policy.verify"
# Documents that `Verification.worst` lists by default.
WORST = 10


def verify_policy(
    policy: CachePolicy,
    model: str | Path | LoadedModel | TextMeasurer,
    corpus: str | Path,
    out: str | Path | None,
    *,
    bound: float,
    effects: bool,
    max_tokens: int = 1024,
    workers: int = 1,
    executor: Literal["local", "ray"] = "local",
    text_field: str = "text",
    name_field: str | None = None,
    shard_size: int = 64,
    timeout: float = 600.0,
    max_bytes: int = 1 << 24,
    device: str | None = None,
    dtype: str = "float32",
    threads: int = 1,
    trust_remote_code: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Verification:
    """Run a verification, or what is left of it; see `CachePolicy.verify`."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{OPERATION}: pyarrow is not installed. pip install 'regard[survey]'") from error
    if not bound > 0:
        raise ArgumentError(
            OPERATION,
            received=f"bound {bound}",
            expected="a KL divergence above 0, in nats per token",
            hint="0.01 changes few predictions.",
        )
    try:
        source = str(model) if isinstance(model, str | Path) else PickledModel.dump(model)
        spec = VerificationSpec(
            source, policy, max_tokens, device, threads, dtype, trust_remote_code, effects
        )
        documents = Corpus(str(corpus), text_field, name_field, shard_size, max_bytes, None)
        digest = compute_digest(policy)

        def build_settings(info: ModelInfo) -> dict[str, Any]:
            own = {"policy": {"sha256": digest}, "max_tokens": max_tokens, "dtype": dtype, "effects": effects}
            return own | ({"tests": info["tests"]["results"]} if "tests" in info else {})

        with tempfile.TemporaryDirectory(prefix="regard-policy-") as temporary:
            folder = Path(out or temporary).expanduser().absolute()
            check_run(
                OPERATION,
                documents,
                folder,
                executor,
                max_tokens=max_tokens,
                workers=workers,
                shard_size=shard_size,
                threads=threads,
            )
            job = CorpusJob(spec, documents, folder, COLUMNS, build_settings)
            run_job(job, EXECUTORS[executor](workers), timeout, progress)
            return open_verification(policy, folder, bound)
    except RegardError as error:
        if error.operation != "survey.run":
            raise
        raise type(error)(
            OPERATION, received=error.received, expected=error.expected, hint=error.hint
        ) from None


def compute_digest(policy: CachePolicy) -> str:
    """Return the sha256 of what a policy keeps; facts about it do not count."""
    parts = [policy.layers, policy.windows.tolist(), policy.sinks.tolist(), policy.num_heads]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def open_verification(policy: CachePolicy, path: Path, bound: float) -> Verification:
    """Read the committed rows of a verification.

    Args:
        policy: The policy.
        path: The output directory.
        bound: The bound of the verdict.
    """
    settings = json.loads((path / SETTINGS_FILE).read_text())
    committed = read_manifest(path / MANIFEST_FILE)[0]
    entries = [committed[shard] for shard in sorted(committed)]
    quarantined = [document for entry in entries for document in entry["quarantined"]]
    documents = _iter_documents([path / entry["file"] for entry in entries], policy)
    return build_verification(policy, bound, settings, documents, quarantined)


def _iter_documents(files: list[Path], policy: CachePolicy) -> Iterator[RowBatch]:
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
    """Build a verification from the rows of its documents, one at a time.

    Args:
        policy: The policy.
        bound: The bound of the verdict.
        settings: Settings of the run.
        documents: The rows of each document, as `PolicyRunner.measure` returns them.
        quarantined: Documents that could not be run.
    """
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
    """What a policy costs on held-out documents; `CachePolicy.verify` returns it.

    Args:
        sums: Sums over tokens of each measured column of the heads.
        affected: Number of tokens with evicted keys, (num_layers, num_kv_heads).

    Attributes:
        policy: The policy.
        bound: Largest mean KL divergence that is accepted, in nats per token.
        settings: Settings of the run.
        documents: For each document its number of tokens, the mean and the largest KL divergence of a prediction,
            top-1 agreement, and the loss without and with the policy, in nats per token.
        tests: Results of the synthetic tests; only those that the model can do without the policy count.
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
                received="a corpus without a document that the model runs on",
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
        """Synthetic tests that the model passes without the policy and not with it."""
        return Table(test for test in self.tests if test["able"] and not test["passed"])

    @property
    def holds(self) -> bool:
        """Whether the mean KL divergence is within the bound and no synthetic test is lost."""
        return self.kl <= self.bound and not self.failed_tests

    @property
    def verdict(self) -> str:
        """The result as a sentence."""
        if self.holds:
            return f"The policy holds: KL {self.kl:.2g} nats per token, the bound is {self.bound:g}."
        lost = ", ".join(f"{test['test']} over {test['length']:,} tokens" for test in self.failed_tests)
        if self.kl <= self.bound:
            return f"The policy fails: it loses {lost}, though KL {self.kl:.2g} is within {self.bound:g}."
        also = f", and it loses {lost}" if lost else ""
        return f"The policy fails: KL {self.kl:.2g} nats per token exceeds {self.bound:g}{also}."

    @cached_property
    def effects(self) -> Array:
        """The part of each query head in the mean KL divergence, (num_layers, num_heads); zeros if not measured."""
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
        group = self.policy.num_heads // self.policy.num_kv_heads
        rows = np.repeat(self._affected, group, 1)
        sums = np.asarray(sums).reshape(*rows.shape, *np.shape(sums)[1:])
        rows = rows.reshape(*rows.shape, *[1] * (sums.ndim - 2))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(rows > 0, sums / rows, np.nan)

    @property
    def heads(self) -> Table:
        """One row for each query head: layer, module, head, kv_head, window, sinks, lost, predicted lost and effect."""
        group, predicted = self.policy.num_heads // self.policy.num_kv_heads, self.predicted_lost
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
        """The result as a dictionary that JSON can hold."""
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
        from regard.policy.report import build_page

        return build_page(self, title)

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
            result = f"{test['policy']:.0%} with it" if test["able"] else "which is too little to count"
            value = f"{test['plain']:.0%} right without the policy, {result}"
            facts.append((f"{test['test']}, {test['length']:,} tokens", value))
        return facts

    def __str__(self) -> str:
        table = format_table(self.facts, align="left")
        return f"{self.verdict}\n\n{table}\n\nWorst documents\n{self.worst(3)!r}"

    __repr__ = __str__
