"""The report of a verification as a page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.pages.html import Page
from regard.pages.policy_page import build_policy_page

if TYPE_CHECKING:
    from regard.policy.verification import Verification

MEASURES = (
    ("window", "Number of latest keys that the head keeps; – if it keeps all."),
    (
        "lost",
        "Share of the weight on evicted keys, among tokens that have some, measured without the policy.",
    ),
    ("predicted", "The lost share that the survey predicts."),
    (
        "effect",
        "The head's part in the KL divergence, in nats per token; the parts add up. 0 if not measured.",
    ),
)


def build_page(verification: Verification, title: str | None) -> Page:
    """Build the page of `Verification.page`."""
    if title is None:
        # Pages are shared, so the title has only the end of a folder's path.
        name = "/".join(Path(verification.settings["model"]["name"]).parts[-2:]).strip("/")
        title = f"Cache policy of {name}"
    rows: list[dict[str, Any]] = []
    for row in verification.heads:
        numbers = {name: row[name] for name in ("lost", "predicted", "effect")}
        rows.append(
            {
                **{name: row[name] for name in ("layer", "module", "head")},
                "window": None if row["window"] == "full" else int(row["window"]),
                **{name: None if math.isnan(value) else value for name, value in numbers.items()},
            }
        )
    return build_policy_page(
        title=title,
        verdict=verification.verdict,
        holds=verification.holds,
        facts=verification.facts,
        heads=rows,
        measures=MEASURES,
        documents=verification.worst(),
    )
