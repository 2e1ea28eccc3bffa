"""The table of supported models, from the results that the checks keep in docs/supported-models.json."""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

COLUMNS = {
    "watch": "<code>watch</code>",
    "intervene": "<code>intervene</code>",
    "implementation": "<code>attn_implementation</code>",
}
KINDS = (
    "text generation",
    "images or sound with text",
    "text encoders",
    "text to text",
    "images and video",
    "diffusion",
    "proteins",
    "sound",
    "other models",
)
HEAD = ("package", "model", *COLUMNS.values(), "weights compared with", "version", "date", "notes")
# How the page shows a result. A model that could not be built tiny has no result.
ANSWERS = {
    "captured": "yes",
    "edited": "yes",
    "bit-equal": "yes",
    "equal to eager": "yes",
    "rejected": "no",
    "refused": "no",
    "outside": "no",
    "failed": "fails",
}


def answer(model: dict[str, Any], column: str) -> str:
    """Return yes, no or fails, and – for a model that was not tested."""
    return ANSWERS.get(model.get(column, ("",))[0], "–")


def notes(model: dict[str, Any]) -> str:
    """Return why an answer is no, and what differs from the other models that have a yes."""
    found = []
    for column in ("watch", "intervene", "implementation"):
        result, remark = model.get(column, ("", ""))
        if result == "outside":
            found.append("chooses its attention by other means; use watch")
        elif ANSWERS.get(result) in ("no", "fails") and remark not in found:
            found.append(remark.split("; expected")[0])
        elif result == "equal to eager":
            found.append("has no sdpa; equals eager within the error rule")
    return "; ".join(found)


def provenance(model: dict[str, Any], results: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the package of a model, what its weights were compared with, the version and the date."""
    if "package" in model:
        return model["package"], model["compared"], model["version"], model["date"]
    compared = "eager attention" if "all equal" in model.get("watch", ("", ""))[1] else ""
    return "transformers", compared, results["transformers"]["watch"], results["date"]


def models_table(results: dict[str, Any]) -> str:
    """Return one folded table for each kind of model as HTML."""
    tested = {
        name: model
        for name, model in results["models"].items()
        if any(answer(model, column) != "–" for column in COLUMNS)
    }
    head = "".join(f'<th scope="col">{title}</th>' for title in HEAD)
    parts = []
    for kind in KINDS:
        rows = {name: model for name, model in tested.items() if model["kind"] == kind}
        lines = []
        for name, model in rows.items():
            answers = "".join(f"<td>{answer(model, column)}</td>" for column in COLUMNS)
            if "generate:" in model.get("implementation", ("", ""))[1]:
                answers = answers.removesuffix("</td>") + ", with <code>generate()</code></td>"
            package, compared, version, date = provenance(model, results)
            name = name.removeprefix(f"{package}.")
            name = f'<th scope="row"><code class="literal"><span class="pre">{name}</span></code></th>'
            cells = "".join(f"<td>{escape(text)}</td>" for text in (compared, version, date, notes(model)))
            lines.append(f"<tr><td>{package}</td>{name}{answers}{cells}</tr>")
        parts.append(
            f'<details class="models"><summary>{kind[0].upper()}{kind[1:]} ({len(rows)})</summary>\n'
            '<div class="table-wrapper docutils container"><table class="docutils">\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n"
            + "\n".join(lines)
            + "\n</tbody></table></div></details>"
        )
    return "\n".join(parts)


def models_summary(results: dict[str, Any]) -> str:
    """Return the counts of the three checks as a table in Markdown, and the packages that were tested."""
    lines = ["| | tested | yes | no | fails |", "| --- | --- | --- | --- | --- |"]
    titles = {
        "watch": "read by {py:obj}`regard.watch`",
        "intervene": "edited by {py:obj}`regard.intervene`",
        "implementation": '`attn_implementation="regard"`',
    }
    for column, title in titles.items():
        counts = Counter(answer(model, column) for model in results["models"].values())
        tested = counts["yes"] + counts["no"] + counts["fails"]
        lines.append(f"| {title} | {tested} | {counts['yes']} | {counts['no']} | {counts['fails']} |")
    versions = " and ".join(sorted(set(results["transformers"].values())))
    others = [model for model in results["models"].values() if "package" in model]
    ran = sum(any(answer(model, column) != "–" for column in COLUMNS) for model in results["models"].values())
    packages = Counter(f"{model['package']} {model['version']}" for model in others)
    lines += [
        "",
        f"transformers {versions} has {results['listed']} base models, of which {ran - len(others)} could be tested.",
        f"{len(others)} models come from {len(packages)} other packages: "
        + ", ".join(f"{package} ({count})" for package, count in sorted(packages.items()))
        + ".",
    ]
    return "\n".join(lines)


# -- Sphinx hooks -----------------------------------------------------------------------------------------


def insert_models(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the counts and the table into the page of supported models."""
    if docname == "supported-models":
        results = json.loads((Path(app.srcdir) / "supported-models.json").read_text("utf-8"))
        source[0] = source[0].replace("<!-- summary -->", models_summary(results))
        source[0] = source[0].replace("<!-- table -->", models_table(results))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", insert_models)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
