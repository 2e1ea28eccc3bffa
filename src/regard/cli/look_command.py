"""`regard look`: run a model on a text, an image or audio, and write its attention as a page or an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.files import read_text
from regard.cli.model_commands import record_run, warn_if_truncated
from regard.cli.options import MODEL_HELP, JsonOption, TextOptions
from regard.cli.output import Printer, check_output, has_display, save_file, save_page, style_text
from regard.errors import ArgumentError, NotCapturedError
from regard.models import load
from regard.models.loading import DEMO_MODEL, DEMO_TEXT
from regard.models.model_inputs import GeneratedText, prepare_generation, prepare_inputs
from regard.types import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.capture.call import Call
    from regard.images.patch_grid import PatchGrid
    from regard.lens.look_page import LookRun
    from regard.lens.recording import Recording
    from regard.lens.table import Table


LOOK_PAGE = Path("look.html")
DEMO_PAIR = "is", "Max"  # to say the name, the model reads it where it was mentioned
PICTURE_SUFFIX = ".png"
OTHER_SUFFIXES = (".jpg", ".jpeg", ".gif", ".webp", ".svg", ".pdf")  # a page must not be named so


MAX_HEADS = 400  # of a picture
INCHES = 1.7  # edge of a map
MAX_LABEL = 36  # characters beside a map
MAX_LINE = 24  # of them on one line
CELLS = 128  # of a map along an edge; longer sequences show the maximum of each cell


def look(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = DEMO_MODEL,
    *,
    options: TextOptions,
    image: Annotated[
        Path | None, typer.Option("--image", metavar="FILE", help="Run the model on an image.")
    ] = None,
    audio: Annotated[
        Path | None,
        typer.Option(
            "--audio",
            metavar="FILE",
            help="Run the model on a WAV file; --text is then its transcript.",
        ),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(
            "--generate",
            metavar="N",
            min=1,
            help="Generate up to N tokens with greedy decoding.",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File to write: a page (.html) or an image (.png)."
        ),
    ] = LOOK_PAGE,
    show: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            show_default=False,
            help="Open the page in a browser. Default: only without MODEL and text, if there is a display.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Write a page with every head of a model, run on a text, an image or audio: maps, measures and findings.

    Without MODEL and text, the page shows a small trained model that comes with regard.
    """
    printer = Printer(as_json)
    has_input = any(given is not None for given in (options.text, options.file, image, audio))
    is_demo = model == DEMO_MODEL and not has_input
    if is_demo:
        options = replace(options, text=DEMO_TEXT)
    if show is None:
        show = is_demo and not as_json and has_display()
    check_output(output, "look")
    if output.suffix.lower() in OTHER_SUFFIXES:
        raise ArgumentError(
            "look",
            received=f"-o {str(output)!r}",
            expected="a file name that ends in .html for a page, or in .png for an image",
            hint=f"Rename it: -o {output.with_suffix(PICTURE_SUFFIX)}.",
        )
    as_picture = output.suffix.lower() == PICTURE_SUFFIX
    if as_picture:
        import regard.plot  # noqa: F401 - before the model runs: Matplotlib may be missing
    text = _read_text(options, image, audio, generate)
    run, record = _run(printer, model, options, (text, image, audio), generate)
    with printer.progress("Drawing the heads" if as_picture else "Building the page"):
        if as_picture:
            figure = draw_heads(run.recording, run.title, image=run.inputs.image, has_text=bool(run.tokens))
        else:
            page = run.build_page()
    if as_picture:
        save_file(printer, run.title, output, show, record, figure.savefig)
    else:
        save_page(printer, page, output, show, record)
    if is_demo:
        _explain_demo(printer, run)
    return 0


def _explain_demo(printer: Printer, run: LookRun) -> None:
    """Print what to see in the page of the demo, and how to look into another model."""
    best, (query, key) = run.recording.find(*DEMO_PAIR, run.tokens)[0], DEMO_PAIR
    place = f"layer {best['layer']}, head {best['head']}"
    printer.print(
        f'The head that attends most from "{query}" to "{key}": {place}, weight {best["weight"]:.2f}.'
    )
    printer.print('For another model: regard look MODEL --text "The cat sat on the mat"')


def _read_text(
    options: TextOptions, image: Path | None, audio: Path | None, num_generated: int | None
) -> str | None:
    """Read the text, which is optional if there is an image or audio."""
    has_text = options.text is not None or options.file is not None
    if not has_text and image is None and audio is None:
        raise ArgumentError(
            "look",
            received="no text, image or audio",
            expected="--text, --file, --image or --audio",
            hint='For a text: --text "…", --file FILE, or --file - for standard input.',
        )
    text = read_text(options.text, options.file, "look") if has_text else None
    if text is not None and audio is not None and num_generated is not None:
        raise ArgumentError(
            "look",
            received="a transcript of the audio and --generate",
            expected="one of them",
            hint="Omit --text to let the model transcribe, or --generate to see how it reads this transcript.",
        )
    return text


def _run(
    printer: Printer,
    model: str,
    options: TextOptions,
    media: tuple[str | None, Path | None, Path | None],
    num_generated: int | None,
) -> tuple[LookRun, dict[str, Any]]:
    """Load the model and run it; return the run, and the facts about it for --json."""
    with printer.progress(f"Loading {Path(model).name}"):
        loaded = load(model, trust_remote_code=options.trust_remote_code, dtype=options.dtype, part="whole")
        inputs = prepare_inputs(loaded, *media, options.max_tokens)
        if num_generated is not None:
            prepare_generation(inputs, num_generated)
    loaded, text = inputs.loaded, inputs.text
    for note in (*loaded.notes, *inputs.notes):
        printer.warn(note)
    if text is not None:
        warn_if_truncated(printer, text, options.max_tokens)
    if inputs.is_encoder_decoder and num_generated is None and inputs.decoder_ids.shape[1] == 1:
        printer.warn("The decoder reads only its start token; pass --generate N to continue.")
    from regard.lens.look_page import LookRun, run_inputs

    generated: GeneratedText | None = None
    description = inputs.description

    def run(advance: Callable[[], None]) -> str:
        nonlocal generated, description
        generated = run_inputs(inputs, num_generated, advance)
        if generated is not None:
            description += f" and {generated.ids.shape[1] - generated.num_given:,} generated"
        return description

    num_chunks = 1 if text is None or inputs.is_encoder_decoder else loaded.num_chunks(text)
    recording, record = record_run(
        printer, loaded, options.layers, inputs.description, run, num_generated or num_chunks
    )
    look_run = LookRun(inputs, recording, generated)
    record["inputs"] = description
    record["notes"] += inputs.notes
    record["tokens"] = len(look_run.tokens or ())
    if text is not None:
        record["text_tokens"] = text.full_length
    if generated is not None:
        record["generated"] = generated.text
        printer.print(style_text(("generated: ", "dim"), generated.text))
        words = _find_words(look_run)
        if words is not None:
            record["words"] = [{name: row[name] for name in ("word", "start", "end")} for row in words]
            rows = [[row["word"].strip(), row["start"], row["end"]] for row in words]
            printer.table(["word", "start", "end"], rows)
    return look_run, record


def _find_words(run: LookRun) -> Table | None:
    """Return the table of words with their times, if the model names the heads that align; else None."""
    loaded, generated = run.inputs.loaded, run.generated
    heads = getattr(getattr(loaded.model, "generation_config", None), "alignment_heads", None)
    seconds, mask = run.inputs.seconds, run.inputs.arguments.get("attention_mask")
    cross_attention = [name for name in run.recording if "encoder_attn" in name]
    is_whole = len(cross_attention) == getattr(loaded.model.config, "decoder_layers", None)
    if not heads or not is_whole or generated is None or seconds is None or mask is None:
        return None
    call = run.recording.calls(cross_attention[0])[0]
    # The last token of the prompt reads the sound of the first word, so that token is aligned as well.
    num_frames, prompt = call.shape[-1], generated.num_given - 1
    alignment = run.recording.align(
        generated.ids[:, prompt:],
        heads=heads,
        prompt=prompt,
        frames=max(1, int(mask.sum()) * num_frames // mask.shape[-1]),
        seconds_per_frame=seconds / num_frames,
        filter_width=loaded.model.config.median_filter_width,
    )
    return alignment.words(loaded.text_tokenizer)


def draw_heads(
    recording: Recording, title: str, *, image: Array | None = None, has_text: bool = False
) -> Figure:
    """Draw every head of a recording into one figure: a map of each head, one row for each call of a layer.

    With an image, the weights of one query lie over it: of the last token of a text, of the class token, or the mean of
    all queries if the model has none. Layers that do not read the image are left out.

    `has_text` says whether the last token of a text is the query.
    """
    from matplotlib.figure import Figure

    from regard.plot.figures import LITERAL, SOFT

    rows = [(name, call) for name in recording for call in recording.calls(name)]
    grids: dict[str, PatchGrid] = {}
    if image is not None:
        for name in recording:
            try:
                grids[name] = recording.grids(name)[0]
            except NotCapturedError:
                continue  # a layer that reads the text alone
        rows = [(name, call) for name, call in rows if name in grids]
    num_heads = sum(call.shape[-3] for _, call in rows)
    if not 1 <= num_heads <= MAX_HEADS:
        raise ArgumentError(
            "look",
            received=f"an image of {num_heads:,} heads",
            expected=f"from 1 to {MAX_HEADS}",
            hint="Choose layers, e.g. --layers '*.0.*', or write a page: -o look.html.",
        )
    columns = max(call.shape[-3] for _, call in rows)
    figure = Figure(figsize=(INCHES * columns + 1, INCHES * len(rows) + 0.6), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=11, **LITERAL)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for (name, call), line in zip(rows, axes, strict=True):
        for head, ax in enumerate(line):
            if head >= call.shape[-3]:
                ax.set_axis_off()
                continue
            _draw_head(ax, call, head, image, grids.get(name), has_text)
            ax.set(xticks=[], yticks=[], xlabel="", ylabel="")
            ax.set_title(f"head {head}", fontsize=7, color=SOFT, pad=2)
        line[0].set_ylabel(_format_label(name), fontsize=7, **LITERAL)
    return figure


def _draw_head(
    ax: Any, call: Call, head: int, image: Array | None, grid: PatchGrid | None, has_text: bool
) -> None:
    from regard.plot import heatmap, overlay

    matrix = call.matrix.lazy[(0,) * (len(call.shape) - 3) + (head,)]
    if grid is None:
        heatmap(matrix, ax=ax, cells=CELLS, numbers=False, colorbar=False, aspect="auto")
        return
    num_queries = matrix.shape[-2]
    if has_text and grid.length > len(grid.names) + grid.rows * grid.columns:
        weights = matrix[num_queries - 1]
    elif "class" in grid.names:
        weights = matrix[grid.names.index("class")]
    else:
        weights = matrix.sum(axis=-2) / num_queries
    overlay(image, weights, grid, ax=ax, colorbar=False)


def _format_label(name: str) -> str:
    r"""Return the last parts of a module's name, on two lines if they do not fit beside a map on one.

    >>> _format_label("layers.0.self_attn"), _format_label("model.language_model.layers.10.self_attn")
    ('layers.0.self_attn', 'language_model.layers.10\nself_attn')
    """
    while len(name) > MAX_LABEL and "." in name:
        name = name.partition(".")[2]
    name = name[-MAX_LABEL:]
    return "\n".join(name.rsplit(".", 1)) if len(name) > MAX_LINE else name
