"""Alarms: rules that are checked in every monitored step, and name the layer and head that they concern."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from regard.errors import RegardError

Row = dict[str, Any]
HeadHistory = Mapping[tuple[str, int], Sequence[Row]]


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

    def check(self, rows: Sequence[Row], history: HeadHistory) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step.

        Args:
            rows: The rows of this step, one for each layer and head.
            history: The rows of each head, by module and head: all monitored steps including this one, in order.
        """


def _build(kind: str, row: Row, value: float, limit: float, message: str, hint: str) -> Alarm:
    return Alarm(kind, row["step"], row["module"], row["layer"], row["head"], value, limit, message, hint)


def _find_first(values: Iterable[float]) -> float:
    """Return the first value that is known; NaN if there is none."""
    return next((value for value in values if not math.isnan(value)), math.nan)


@dataclass(frozen=True)
class ScoreGrowth:
    """Alarm if the largest score of a head is large, or has grown fast and is still growing.

    Scores that grow without bound precede divergence (Dehghani et al., 2302.05442; Wortsman et al., 2309.14322).
    MuonClip limits them to 100 (Kimi K2, 2507.20534), the default of `value`.

    Args:
        value: Alarm above this largest score.
        factor: Alarm if the largest score is above `floor` and this many times its first value, and has risen in each
            of the last `window` monitored steps.
        window: Number of consecutive rises.
        floor: Trends below this largest score are ignored: a softmax over n keys leaves its linear range at about
            ln n, which is 6 to 12 for 400 to 160,000 keys.
    """

    value: float = 100.0
    factor: float = 10.0
    window: int = 3
    floor: float = 30.0

    def check(self, rows: Sequence[Row], history: HeadHistory) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step."""
        hint = (
            "Scores that grow without bound precede divergence: lower the learning rate, normalise query and key "
            "(QK-norm), or rescale them (QK-clip)."
        )
        for row in rows:
            score = row["max_score"]
            if score > self.value:
                yield _build(
                    "score growth", row, score, self.value, f"the largest score is {score:.1f}", hint
                )
            elif score > self.floor:
                past = [old["max_score"] for old in history[row["module"], row["head"]]]
                start, recent = _find_first(past), past[-1 - self.window :]
                is_rising = len(recent) > self.window and all(a < b for a, b in pairwise(recent))
                limit = self.factor * abs(start)
                if is_rising and score > limit:
                    message = (
                        f"the largest score rose from {start:.1f} to {score:.1f}, including each of the last "
                        f"{self.window} monitored steps"
                    )
                    yield _build("score growth", row, score, limit, message, hint)


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
    min_score: float = 30.0

    def check(self, rows: Sequence[Row], history: HeadHistory) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step."""
        for row in rows:
            start = _find_first(old["entropy"] for old in history[row["module"], row["head"]])
            entropy, limit = row["entropy"], self.share * start
            if entropy < limit and row["max_score"] > self.min_score:
                yield _build(
                    "entropy collapse",
                    row,
                    entropy,
                    limit,
                    f"the mean entropy fell from {start:.3f} to {entropy:.3f} nats, with scores up to "
                    f"{row['max_score']:.1f}",
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
    min_score: float = 30.0

    def check(self, rows: Sequence[Row], history: HeadHistory) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step."""
        for row in rows:
            if row["saturated"] > self.share and row["max_score"] > self.min_score:
                yield _build(
                    "saturated head",
                    row,
                    row["saturated"],
                    self.share,
                    f"{row['saturated']:.1%} of the rows have a weight above 0.99",
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

    def check(self, rows: Sequence[Row], history: HeadHistory) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step."""
        for row in rows:
            if row["first"] > self.share:
                yield _build(
                    "dead head",
                    row,
                    row["first"],
                    self.share,
                    f"{row['first']:.2%} of the weight is on the first token",
                    "The head adds the same vector to every token. It may be pruned; if many heads die early, lower "
                    "the learning rate or lengthen the warm-up.",
                )


@dataclass(frozen=True)
class NonFinite:
    """Alarm if rows of a head have NaN or inf; only the first affected layer of a step is named."""

    def check(self, rows: Sequence[Row], history: HeadHistory) -> Iterator[Alarm]:
        """Yield the alarms of one monitored step."""
        bad = [row for row in rows if row["nonfinite"]]
        for row in bad:
            if row["layer"] == bad[0]["layer"]:
                yield _build(
                    "NaN or inf",
                    row,
                    float(row["nonfinite"]),
                    0.0,
                    f"{row['nonfinite']:,} of {row['rows']:,} rows have NaN or inf",
                    "This is the first layer with NaN or inf, in execution order: its weights or the previous "
                    "layer produced them.",
                )


DEFAULT_ALARMS: tuple[AlarmRule, ...] = (
    ScoreGrowth(),
    EntropyCollapse(),
    SaturatedHead(),
    DeadHead(),
    NonFinite(),
)
