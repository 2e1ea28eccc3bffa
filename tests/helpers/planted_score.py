"""Print which planted bugs `Recording.diagnose` names on one run, and which `doctor` names."""

from __future__ import annotations

import torch

import regard
from regard.lens import doctor
from tests.helpers.planted_bugs import PLANTED_BUGS, PlantedBug


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


def run_doctor(bug: PlantedBug) -> set[str]:
    """Return the kinds of findings of doctor."""
    model = bug.build()
    cached = model.decode if getattr(model, "is_decoder", False) else None
    return {finding.kind for finding in doctor(model, bug.inputs(), causal=bug.causal, cached=cached)}


def main() -> None:
    """Print one line for each bug, and the scores."""
    torch.set_num_threads(1)
    ways = {"diagnose": diagnose_run, "doctor": run_doctor}
    scores = dict.fromkeys(ways, 0)
    for bug in PLANTED_BUGS.values():
        named = {way: bool(run(bug) & set(bug.kinds)) for way, run in ways.items()}
        for way, hit in named.items():
            scores[way] += hit
        print(f"{bug.name:52}", *(f"{way if hit else '-':10}" for way, hit in named.items()))
    print(f"of {len(PLANTED_BUGS)}:", ", ".join(f"{way} {score}" for way, score in scores.items()))


if __name__ == "__main__":
    main()
