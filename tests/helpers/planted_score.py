"""Print what `diagnose`, `doctor` and `compare` say about each planted bug, and how many they name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

import regard
from regard import doctor
from tests.helpers.planted_bugs import PLANTED_BUGS, PlantedBug
from tests.helpers.port_bugs import PORT_BUGS


def diagnose_run(bug: PlantedBug) -> set[str]:
    """Return the kinds of findings about one run of a planted bug, as its user watches it."""
    model = bug.build()
    watching = regard.watch(model)
    try:
        with watching:
            bug.run(model)
    except regard.NotCapturedError:
        pass
    found = watching._recording.diagnose(attention_mask=bug.inputs().get("attention_mask"), causal=bug.causal)
    return {finding.kind for finding in found}


def run_doctor(bug: PlantedBug, *, is_told: bool = True, clean: bool = False) -> Any:
    """Return the findings of doctor; `is_told` passes causal= and cached= where the user of the bug knows them."""
    model = bug.build_clean() if clean else bug.build()
    inputs = (bug.clean_inputs or bug.inputs)() if clean else bug.inputs()
    if not is_told:
        return doctor(model, inputs)
    cached = model.decode if getattr(model, "is_decoder", False) else None
    return doctor(model, inputs, causal=bug.causal, cached=cached)


def record(bug: PlantedBug, *, clean: bool) -> Any:
    """Return a recording of the faulty or the clean model, as its user runs it."""
    model = bug.build_clean() if clean else bug.build()
    with regard.watch(model, values=True) as recording:
        bug.run(model, clean)
    return recording


def run_compare(bug: PlantedBug) -> Any:
    """Return the comparison of a faulty model with its clean twin."""
    return regard.compare(record(bug, clean=True), record(bug, clean=False))


def find_wrong_kinds(bug: PlantedBug, findings: Any) -> list[str]:
    """Return the kinds of errors of doctor that the fault does not explain."""
    explained = {*bug.kinds, *bug.consequences}
    return sorted({finding.kind for finding in findings if finding.severity == "error"} - explained)


@dataclass(frozen=True)
class Score:
    """What was said about one planted bug.

    Args:
        bug: The fault.
        told: Kinds of doctor, with causal= and cached=.
        untold: Kinds of doctor on the model and its inputs alone.
        wrong: Kinds of errors of doctor that the fault does not explain, in either run.
        difference: Kind of compare.
        layer: The layer that compare names; −1 for none.
        texts: What doctor (on the model alone) and compare print.
    """

    bug: PlantedBug
    told: tuple[str, ...]
    untold: tuple[str, ...]
    wrong: tuple[str, ...]
    difference: str
    layer: int
    texts: tuple[str, str]

    @property
    def is_named(self) -> bool:
        """Whether doctor names the cause with causal= and cached=."""
        return bool({*self.told} & {*self.bug.kinds})

    @property
    def is_named_untold(self) -> bool:
        """Whether doctor names the cause from the model and its inputs alone."""
        return bool({*self.untold} & {*self.bug.kinds})

    @property
    def is_compared(self) -> bool:
        """Whether compare names the kind and the layer of the difference."""
        return (self.difference, self.layer) == (self.bug.difference, self.bug.layer)


def measure(bug: PlantedBug) -> Score:
    """Run doctor twice and compare once on a planted bug."""
    findings, alone = run_doctor(bug), run_doctor(bug, is_told=False)
    wrong = {*find_wrong_kinds(bug, findings), *find_wrong_kinds(bug, alone)}
    kinds = [tuple(dict.fromkeys(finding.kind for finding in found)) for found in (findings, alone)]
    try:
        comparison = run_compare(bug)
    except regard.RegardError as error:  # compare refuses what the lens cannot read
        return Score(bug, *kinds, tuple(sorted(wrong)), type(error).__name__, -1, (str(alone), str(error)))
    layer = -1 if comparison.first is None else comparison.first.layer
    texts = str(alone), str(comparison)
    return Score(bug, *kinds, tuple(sorted(wrong)), comparison.kind, layer, texts)


def measure_all(bugs: dict[str, PlantedBug]) -> list[Score]:
    """Return the scores of all bugs whose packages are installed."""
    return [measure(bug) for bug in bugs.values() if not bug.requires or find_spec(bug.requires)]


def print_scores(title: str, scores: list[Score]) -> None:
    """Print one line for each bug, and the counts of faults that are counted."""
    print(f"\n{title}")
    for score in scores:
        doctor_says = "doctor" if score.is_named else "reference" if score.bug.needs_reference else "-"
        untold = "untold" if score.is_named_untold else "-"
        compare_says = "compare" if score.is_compared else "-"
        print(f"{score.bug.name:52} {doctor_says:10} {untold:7} {compare_says:8}", end="")
        print(
            f" doctor: {', '.join(score.told) or 'nothing'} | compare: {score.difference}, {score.layer}",
            end="",
        )
        if not score.is_compared:
            print(f" (expected {score.bug.difference}, {score.bug.layer})", end="")
        print(f" | WRONG: {', '.join(score.wrong)}" if score.wrong else "")
    counted = [score for score in scores if not score.bug.same_as and not score.bug.harmless]
    either = [score for score in counted if score.is_named or score.is_compared]
    print(
        f"of {len(counted)}: doctor {sum(score.is_named for score in counted)}, without causal= and cached= "
        f"{sum(score.is_named_untold for score in counted)}, compare {sum(score.is_compared for score in counted)}, "
        f"either {len(either)}, wrong causes {sum(bool(score.wrong) for score in counted)}"
    )


def main() -> None:
    """Print the scores of the bugs whose names contain a text, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="part of the names of the bugs")
    parser.add_argument("--texts", action="store_true", help="print what doctor and compare print")
    parser.add_argument("--port", action="store_true", help="only the faults of ports")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets = {"PLANTED_BUGS": PLANTED_BUGS, "PORT_BUGS": PORT_BUGS}
    for title, bugs in list(sets.items())[int(options.port) :]:
        scores = measure_all({name: bug for name, bug in bugs.items() if options.name in name})
        if options.texts:
            for score in scores:
                print(f"\n## {score.bug.name}", *score.texts, sep="\n")
        print_scores(title, scores)


if __name__ == "__main__":
    main()
