"""Alarms: rules that are checked in every monitored step, and name the layer and head that they concern."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from regard.errors import RegardError
from regard.monitor.history import RECENT_STEPS, FloatArray, History, Snapshot

# Powers of a factor are limited to this, so that a float can hold them.
MAX_TIMES = 100.0


class Alarm(NamedTuple):
    """An alarm that a rule raised in a monitored step.

    Args:
        kind: Name of the rule, such as "score growth".
        step: The monitored step.
        module: Name of the layer.
        layer: Number of the layer, from 0.
        head: The head, from 0.
        value: The number that crossed the limit.
        limit: The limit.
        message: What was measured.
        hint: What it usually means, and what to do.
    """

    kind: str
    step: int
    module: str
    layer: int
    head: int
    value: float
    limit: float
    message: str
    hint: str

    @property
    def place(self) -> tuple[str, str, int]:
        """Kind, layer and head: an alarm is repeated only if its condition has ceased in between."""
        return self.kind, self.module, self.head

    def __str__(self) -> str:
        return f"step {self.step}, {self.module}, head {self.head}: {self.kind}: {self.message}. {self.hint}"


class AlarmWarning(UserWarning):
    """The warning with which `Monitor(on_alarm="warn")` reports an alarm."""


class AlarmError(RegardError, RuntimeError):
    """The error with which `Monitor(on_alarm="raise")` stops a run; `alarms` has all alarms of the step."""

    alarms: tuple[Alarm, ...] = ()

    @classmethod
    def from_alarms(cls, alarms: Sequence[Alarm]) -> AlarmError:
        """Return the error that names the first of the alarms.

        Args:
            alarms: The alarms of a step, at least one.
        """
        first, more = alarms[0], len(alarms) - 1
        error = AlarmError(
            "Monitor",
            received=f"{first.kind} in {first.module!r}, head {first.head}, at step {first.step}"
            + (f" (and {more} more)" if more else ""),
            expected="no alarm",
            hint=f"{first.message}. {first.hint}",
        )
        error.alarms = tuple(alarms)
        return error

    def __reduce__(self) -> Any:
        """Pickle the alarms as well."""
        return (*super().__reduce__(), {"alarms": self.alarms})


class AlarmRule(Protocol):
    """A rule: an object with a method `check`."""

    def check(self, heads: Snapshot, history: History) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step.

        Args:
            heads: The numbers of the step; `heads["entropy"]` has one number for each head.
            history: The monitored steps so far, this one included. `history.first("entropy")` and
                `history.recent("entropy", 4)` have one number for each head of `heads`.
        """


def build_alarm(
    kind: str, heads: Snapshot, index: int, value: float, limit: float, message: str, hint: str
) -> Alarm:
    """Return the alarm for one head of a step.

    Args:
        kind: Name of the rule.
        heads: The numbers of the step.
        index: Index of the head in `heads`.
        value: The number that crossed the limit.
        limit: The limit.
        message: What was measured.
        hint: What it usually means, and what to do.
    """
    module, layer, head = heads.places[index]
    return Alarm(kind, heads.step, module, layer, head, float(value), float(limit), message, hint)


def _find_earlier(heads: Snapshot, history: History, steps: int) -> tuple[FloatArray, FloatArray]:
    """Return the mean of each row's largest score at least `steps` steps earlier, and how many times `steps` that is.

    Both are (heads,), and of the last such step that measured the head; NaN and 1 if there is none.
    """
    start, times = np.full(len(heads), np.nan), np.ones(len(heads))
    means = history.recent("max_score_mean", RECENT_STEPS)
    for mean, number in zip(means[::-1], history.steps[: -len(means) - 1 : -1], strict=True):
        if heads.step - number >= steps:
            is_new = np.isnan(start) & ~np.isnan(mean)
            start[is_new], times[is_new] = mean[is_new], (heads.step - number) / steps
            if not np.isnan(start).any():
                break
    return start, np.minimum(times, MAX_TIMES)


@dataclass(frozen=True)
class ScoreGrowth:
    """Alarm if the largest score of a head is large, or if the largest scores of its rows are large and grow fast.

    Scores that grow without bound precede divergence (Dehghani et al., 2302.05442; Wortsman et al., 2309.14322).
    MuonClip limits them to 100 (Kimi K2, 2507.20534), the default of `value`. The other defaults were tuned on small
    models, whose scores also grow fast while they learn to attend, but not above `floor`.

    Args:
        value: Alarm above this largest score.
        factor: Alarm if the mean over the rows of each row's largest score grows by more than this factor in each
            `steps` steps.
        steps: The growth is that since the last monitored step that is at least this much earlier.
        floor: Growth below this mean is ignored.
    """

    value: float = 100.0
    factor: float = 1.35
    steps: int = 10
    floor: float = 22.0

    def check(self, heads: Snapshot, history: History) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step."""
        hint = (
            "Scores that grow without bound precede divergence: lower the learning rate, normalise query and key "
            "(QK-norm), or rescale them (QK-clip)."
        )
        largest, means = heads["max_score"], heads["max_score_mean"]
        start, times = _find_earlier(heads, history, self.steps)
        limits = np.maximum(self.factor**times * np.abs(start), self.floor)
        for i in np.flatnonzero((largest > self.value) | (means > limits)).tolist():
            if largest[i] > self.value:
                numbers, message = (largest[i], self.value), f"the largest score is {largest[i]:.1f}"
            else:
                numbers = means[i], limits[i]
                message = (
                    f"the mean of each row's largest score rose from {start[i]:.1f} to {means[i]:.1f} in "
                    f"{times[i] * self.steps:.0f} steps"
                )
            yield build_alarm("score growth", heads, i, *numbers, message, hint)


@dataclass(frozen=True)
class LostAttention:
    """Alarm if the scores of a head that has learned to attend fall so fast that its rows become nearly uniform.

    A learning rate that is too high for a layer destroys what its heads have learned, often without a large score.

    Args:
        factor: Alarm if the mean over the rows of each row's largest score falls by more than this factor in each
            `steps` steps.
        steps: The fall is that since the last monitored step that is at least this much earlier.
        floor: Ignore heads whose mean was below this.
    """

    factor: float = 2.0
    steps: int = 10
    floor: float = 1.75

    def check(self, heads: Snapshot, history: History) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step."""
        means = heads["max_score_mean"]
        start, times = _find_earlier(heads, history, self.steps)
        limits = start / self.factor**times
        for i in np.flatnonzero((start > self.floor) & (means < limits)).tolist():
            yield build_alarm(
                "lost attention",
                heads,
                i,
                means[i],
                limits[i],
                f"the mean of each row's largest score fell from {start[i]:.1f} to {means[i]:.1f} in "
                f"{times[i] * self.steps:.0f} steps",
                "The head forgets which keys it attends to: the learning rate of its layer may be too high, or a "
                "gradient wrong.",
            )


@dataclass(frozen=True)
class EntropyCollapse:
    """Alarm if the mean entropy of a head falls below a share of its first value, while its scores are large.

    Entropy collapse accompanies unstable training (Zhai et al., 2303.06296). A head that attends to one token, such as
    the previous one, also has low entropy, but moderate scores.

    Args:
        share: Alarm below this share of the entropy in the first monitored step that has one.
        min_score: Ignore heads whose largest score is below this.
    """

    share: float = 0.1
    min_score: float = 90.0

    def check(self, heads: Snapshot, history: History) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step."""
        entropy, scores, start = heads["entropy"], heads["max_score"], history.first("entropy")
        limits = self.share * start
        for i in np.flatnonzero((entropy < limits) & (scores > self.min_score)).tolist():
            yield build_alarm(
                "entropy collapse",
                heads,
                i,
                entropy[i],
                limits[i],
                f"the mean entropy fell from {start[i]:.3f} to {entropy[i]:.3f} nats, with scores up to "
                f"{scores[i]:.1f}",
                "Rows that attend to a single key pass little gradient to query and key: lower the learning rate, "
                "or limit the scores (QK-norm, QK-clip, softcap).",
            )


@dataclass(frozen=True)
class SaturatedHead:
    """Alarm if almost all rows of a head have one weight above 0.99, while its scores are large.

    Args:
        share: Alarm above this share of the rows.
        min_score: Ignore heads whose largest score is below this.
    """

    share: float = 0.9
    min_score: float = 90.0

    def check(self, heads: Snapshot, history: History) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step."""
        saturated = heads["saturated"]
        for i in np.flatnonzero((saturated > self.share) & (heads["max_score"] > self.min_score)).tolist():
            yield build_alarm(
                "saturated head",
                heads,
                i,
                saturated[i],
                self.share,
                f"{saturated[i]:.1%} of the rows have a weight above 0.99",
                "The gradient of a saturated softmax vanishes, so the head hardly learns which keys to attend to. "
                "Limit its scores, or check its scale.",
            )


@dataclass(frozen=True)
class DeadHead:
    """Alarm if almost all weight of a head is on the first token.

    Heads use the first token as a sink if they have nothing to read (Xiao et al., 2309.17453; Gu et al., 2410.10781
    call a share above 0.3 a sink). Sinks are normal, but a head that always attends to the sink only adds a constant.

    Args:
        share: Alarm above this mean weight on the first token.
    """

    share: float = 0.995

    def check(self, heads: Snapshot, history: History) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step."""
        first = heads["first"]
        for i in np.flatnonzero(first > self.share).tolist():
            yield build_alarm(
                "dead head",
                heads,
                i,
                first[i],
                self.share,
                f"{first[i]:.2%} of the weight is on the first token",
                "The head adds the same vector to every token. It may be pruned; if many heads die early, lower "
                "the learning rate or lengthen the warm-up.",
            )


@dataclass(frozen=True)
class NonFinite:
    """Alarm if rows of a head have NaN or inf; only the first affected layer of a step is named."""

    def check(self, heads: Snapshot, history: History) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step."""
        nonfinite, rows = heads["nonfinite"], heads["rows"]
        bad = np.flatnonzero(nonfinite > 0).tolist()
        for i in bad:
            if heads.places[i][0] == heads.places[bad[0]][0]:
                yield build_alarm(
                    "NaN or inf",
                    heads,
                    i,
                    nonfinite[i],
                    0.0,
                    f"{nonfinite[i]:,.0f} of {rows[i]:,.0f} rows have NaN or inf",
                    "This is the first layer with NaN or inf, in execution order: its weights or the previous "
                    "layer produced them.",
                )


DEFAULT_ALARMS: tuple[AlarmRule, ...] = (
    ScoreGrowth(),
    LostAttention(),
    EntropyCollapse(),
    SaturatedHead(),
    DeadHead(),
    NonFinite(),
)
