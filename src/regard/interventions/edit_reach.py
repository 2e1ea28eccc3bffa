"""Find out which layers and positions of edits no call of a block had, so that no edit is left out silently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from regard.interventions.edits import Edit, list_entries, matches_layer
from regard.interventions.layer_edits import LayerEdits

# Layers that a message lists by name.
MAX_LISTED = 6
PARAMETERS = ("layers", "queries", "keys", "heads", "batch")


class EditReach:
    """What the edits of a block select, and the calls of the block have not had so far.

    Args:
        edits: The edits.
    """

    def __init__(self, edits: Sequence[Edit]) -> None:
        # By number of the edit and parameter: the entries that no call has had.
        self._missing = {
            (i, parameter): entries
            for i, edit in enumerate(edits)
            for parameter in PARAMETERS
            if (entries := list_entries(getattr(edit, parameter, None)))
        }
        self._length = 0
        self._has_run: set[int] = set()
        self._count = len(edits)

    def note(self, i: int, number: int, place: int, edits: LayerEdits) -> None:
        """Note that an edit applies to a call.

        Args:
            i: Number of the edit.
            number: Number of the layer.
            place: Number of the edit among those of the call.
            edits: The edits of the call.
        """
        self._has_run.add(i)
        self._length = max(self._length, edits.placement.num_queries, edits.placement.num_keys)
        for parameter in PARAMETERS:
            missing = self._missing.get((i, parameter))
            if missing and parameter == "layers":
                missing = [entry for entry in missing if not matches_layer(entry, edits.name, number)]
            elif missing:
                missing = [entry for entry in missing if not edits.reaches(place, parameter, entry)]
            if missing is not None:
                self._missing[i, parameter] = missing

    def describe(self, numbers: Mapping[str, int], where: str = "") -> dict[int, str]:
        """Describe what was not found of each edit that did not apply as a whole, by its number.

        Args:
            numbers: Number of each layer that ran, by its name.
            where: Where the model ran, if not in this thread.
        """
        if not numbers:
            return dict.fromkeys(range(self._count), f"no attention layer of the model ran{where}")
        ran = [f"{number} {name!r}" for name, number in numbers.items()]
        if len(ran) > MAX_LISTED:
            ran = [*ran[: MAX_LISTED - 1], "…", ran[-1]]
        found: dict[int, list[str]] = {}
        for (i, parameter), missing in self._missing.items():
            if not missing or (parameter != "layers" and i not in self._has_run):
                continue
            listed = ", ".join(map(repr, missing))
            if parameter == "layers":
                text = f"no layer{'s' * (len(missing) > 1)} {listed}, of {len(numbers)} that ran: {', '.join(ran)}"
            elif parameter in ("heads", "batch"):
                text = f"no {parameter} {listed} in the layers that ran"
            else:
                text = f"no {parameter} {listed} in a sequence of {self._length} tokens"
            found.setdefault(i, []).append(text)
        return {i: "; ".join(texts) for i, texts in found.items()}
