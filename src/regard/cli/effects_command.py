"""`regard effects`: measure what each head of a model is worth for an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.cli.files import read_text
from regard.cli.model_commands import MAX_ROWS, ModelOptions
from regard.cli.output import NUMBER_STYLE, Printer, style_text
from regard.cli.page_files import check_output, save_page
from regard.errors import ArgumentError
from regard.models import LoadedModel, load
from regard.render.text import escape_unprintable


def effects(
    printer: Printer,
    options: ModelOptions,
    answer: str,
    wrong: str | None,
    to: str,
    keys: str | None,
    top: int,
    output: Path | None,
    show: bool,
) -> int:
    """Print how much the metric changes without each head.

    Args:
        printer: Prints the result.
        options: The model and the text.
        answer: The answer that the model should give after the text.
        wrong: A wrong answer, or None.
        to: What heads are ablated to, "zero" or "mean".
        keys: Knock out the edges to this span instead: a text, a position, or a range such as 3:8.
        top: Number of rows to print.
        output: Page to write, or None.
        show: Open the page in a browser.

    Returns:
        The exit code.
    """
    if output is not None:
        check_output(output, "effects")
    content = read_text(options.text, options.file, "effects")
    with printer.progress(f"Loading {Path(options.model).name}"):
        loaded = load(options.model, trust_remote_code=options.trust, dtype=options.dtype)
        text = loaded.encode(content, options.max_tokens)
    for note in loaded.notes:
        printer.warn(note)
    from regard.interventions import effects, logit_difference

    metric = logit_difference(_find_id(loaded, answer), None if wrong is None else _find_id(loaded, wrong))
    layers = list(options.layers) or None
    heads = _count_heads(loaded)
    with printer.progress("Editing heads", heads) as advance:
        table = effects(
            loaded.model,
            text.ids,
            metric,
            to=to,  # type: ignore[arg-type]
            keys=_parse_span(keys),
            layers=layers,
            tokens=text.tokens,
            progress=advance,
        )
    record: dict[str, Any] = {
        "model": {"name": loaded.name, **loaded.info},
        "notes": list(loaded.notes),
        "tokens": len(text),
        "metric": table.metric,
        "edit": table.edit,
        "clean": table.clean,
        "heads": list(table),
    }
    ranked = sorted(table, key=lambda row: -abs(row["effect"]))[: top or MAX_ROWS]
    printer.info(
        style_text(
            (options.model, "bold"), f": {table.metric} ", (f"{table.clean:.4g}", NUMBER_STYLE),
            f" on {len(text):,} tokens; each of {len(table):,} heads by itself: {table.edit}",
        )
    )  # fmt: skip
    columns = ["layer", "head", "metric", "effect"]
    printer.table(columns, [[row[name] for name in columns] for row in ranked], bold="effect")
    if output is None:
        printer.record(record)
        return 0
    name = escape_unprintable("/".join(Path(options.model).parts[-2:]).strip("/"))
    save_page(printer, table.page(f"What each head of {name} is worth"), output, show, record)
    return 0


def _find_id(loaded: LoadedModel, word: str) -> int:
    """Return the id of the first token of a word, without the special tokens that a tokenizer adds."""
    tokenizer = loaded.tokenizer
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        ids = tokenizer.encode(word, add_special_tokens=False)
    else:
        ids = loaded.encode(word).ids[0].tolist() if word else []
    if not ids:
        raise ArgumentError(
            "effects",
            received=f"an answer {word!r} without tokens",
            expected="a word that the model can predict",
            hint="Begin it with a space if the text does not end with one: ' Paris'.",
        )
    return int(ids[0])


def _parse_span(keys: str | None) -> Any:
    """Return a position, a slice, or the text of a token."""
    if keys is None:
        return None
    bounds = keys.split(":")
    if len(bounds) <= 2 and all(bound.lstrip("-").isdigit() or not bound for bound in bounds) and any(bounds):
        numbers = [int(bound) if bound else None for bound in bounds]
        return numbers[0] if len(numbers) == 1 else slice(*numbers)
    return keys


def _count_heads(loaded: LoadedModel) -> int | None:
    """Return the number of heads by the configuration, for a progress bar; None if unknown."""
    config = getattr(loaded.model, "config", None)
    counts = [getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads")]
    return counts[0] * counts[1] if all(isinstance(count, int) for count in counts) else None  # type: ignore[operator]
