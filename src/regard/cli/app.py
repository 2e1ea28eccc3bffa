"""The commands as they are typed, and the one place where what goes wrong becomes a line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.output import Out, fail
from regard.errors import RegardError

EXIT_CODES = (
    "Exit codes: 0 done, 1 doctor found an error, 2 the question was wrong, 3 an extra is missing, "
    "4 something else failed."
)

LOOK, REPORT = Path("look.html"), Path("report.html")

app = typer.Typer(
    name="regard",
    help="Scaled dot-product attention you can look at, in models and by itself.",
    epilog=EXIT_CODES,
    rich_markup_mode=None,  # plain help: shorter, and the same in a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


class Explorer(StrEnum):
    """The pages of `regard.explore`."""

    pipeline = "pipeline"
    heatmap = "heatmap"
    scaling = "scaling"
    geometry = "geometry"
    cost = "cost"
    code = "code"


class Dtype(StrEnum):
    """What a model's weights are turned into."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    auto = "auto"


class Engine(StrEnum):
    """What runs a survey's workers."""

    local = "local"
    ray = "ray"


class Number(StrEnum):
    """What `profile` computes with."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


Json = Annotated[bool, typer.Option("--json", help="The result as JSON on standard output, for scripts.")]
Head = Annotated[
    str | None,
    typer.Option("--head", metavar="H", help="Which head of larger arrays: 3, or 0,3 with a batch."),
]
Causal = Annotated[bool, typer.Option("--causal", help="No query sees a later key.")]
Show = Annotated[bool, typer.Option("--open", help="Open it in a browser.")]
Given = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]", show_default=False, help="JSON or NPZ with query, key, value, tokens, mask."
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", show_default=False, help="A folder, a name on the hub, or module:function."
    ),
]
TextOption = Annotated[str | None, typer.Option("--text", "-t", metavar="TEXT", help="What the model reads.")]
FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help="A text file; - is standard input.")
]
Layers = Annotated[
    list[str] | None,
    typer.Option("--layers", "-l", metavar="NAME", help="Only these modules; * matches. May be repeated."),
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Read no more tokens than this.")
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Of the weights. float32 by default, of module:function its own."),
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model. Read it first.")
]


def explain(
    file: Given = None,
    query: Annotated[
        str, typer.Option("--query", "-q", metavar="N", help="Which query: its position, or its token.")
    ] = "0",
    head: Head = None,
    causal: Causal = False,
    as_json: Json = False,
) -> int:
    """The four steps of one query with every number: of the book's example, or of a FILE of your own."""
    from regard.cli.explain_commands import explain

    return explain(Out(as_json), file, query, head, causal)


def explore(
    name: Annotated[Explorer, typer.Argument(show_default=False, help="Which page.")],
    file: Given = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PAGE", help="Where to; NAME.html by default.")
    ] = None,
    head: Head = None,
    causal: Causal = False,
    show: Show = False,
    as_json: Json = False,
) -> int:
    """A page to work through, one file without a server: of the book's example, or of a FILE of your own."""
    from regard.cli.explain_commands import explore

    return explore(Out(as_json), name.value, file, output or Path(f"{name.value}.html"), head, causal, show)


def look(
    model: Model,
    text: TextOption = None,
    file: FileOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PAGE", help="Where to.")] = LOOK,
    layers: Layers = None,
    max_tokens: MaxTokens = None,
    dtype: DtypeOption = None,
    trust: Trust = False,
    show: Show = False,
    as_json: Json = False,
) -> int:
    """A page of every head of a model on a text: maps, measures, findings, and who looks at whom."""
    from regard.cli.model_commands import Asked, look

    asked = Asked(model, text, file, tuple(layers or ()), max_tokens, dtype, trust)
    return look(Out(as_json), asked, output, show)


def doctor(
    model: Model,
    text: TextOption = None,
    file: FileOption = None,
    layers: Layers = None,
    max_tokens: MaxTokens = None,
    dtype: DtypeOption = None,
    trust: Trust = False,
    as_json: Json = False,
) -> int:
    """What looks wrong with a model's attention, where, and what to do. Exits with 1 if there is an error."""
    from regard.cli.model_commands import Asked, doctor

    return doctor(Out(as_json), Asked(model, text, file, tuple(layers or ()), max_tokens, dtype, trust))


def heads(
    model: Model,
    text: TextOption = None,
    file: FileOption = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="MEASURE", help="Order by a column, the largest first.")
    ] = None,
    smallest: Annotated[bool, typer.Option("--smallest", help="The smallest first.")] = False,
    top: Annotated[
        int | None,
        typer.Option(
            "--top", "-n", metavar="N", min=1, help="So many rows; by default 20 in a terminal, else all."
        ),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="The table as CSV.")] = False,
    layers: Layers = None,
    max_tokens: MaxTokens = None,
    dtype: DtypeOption = None,
    trust: Trust = False,
    as_json: Json = False,
) -> int:
    """What each head of a model does on a text, in numbers: entropy, distance, sinks, induction, and more."""
    from regard.cli.model_commands import Asked, heads

    asked = Asked(model, text, file, tuple(layers or ()), max_tokens, dtype, trust)
    return heads(Out(as_json, as_csv), asked, by, smallest, top)


def profile(
    length: Annotated[
        list[int] | None,
        typer.Option("--length", "-n", metavar="N", min=1, help="Tokens, 2048 by default; may be repeated."),
    ] = None,
    queries: Annotated[
        int | None, typer.Option("--queries", metavar="N", min=1, help="Fewer queries, as 1 when decoding.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1)] = 1,
    heads: Annotated[int, typer.Option("--heads", metavar="N", min=1)] = 8,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", metavar="N", min=1, help="Fewer heads of keys and values.")
    ] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", metavar="N", min=1)] = 64,
    value_dim: Annotated[
        int | None, typer.Option("--value-dim", metavar="N", min=1, help="Where it is not head_dim.")
    ] = None,
    mask: Annotated[
        str, typer.Option("--mask", metavar="MASK", help="none, causal, window:N, padding:N or documents:N.")
    ] = "causal",
    dtype: Annotated[Number, typer.Option("--dtype")] = Number.float32,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="How often each is timed.")] = 7,
    as_json: Json = False,
) -> int:
    """What attention of a size costs here, which kernel runs, and why: time, spread and memory of each way."""
    from regard.cli.profile_command import Size, profile

    sizes = [
        Size(
            batch,
            heads,
            kv_heads or heads,
            queries or n,
            n,
            head_dim,
            value_dim or head_dim,
            mask,
            dtype.value,
        )
        for n in length or [2048]
    ]
    return profile(Out(as_json), sizes, rounds)


def survey(
    model: Model,
    corpus: Annotated[
        str,
        typer.Argument(
            metavar="CORPUS",
            show_default=False,
            help="A file, a directory or a pattern: text, JSON lines, Parquet.",
        ),
    ],
    folder: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="DIR", show_default=False, help="Where to; goes on with what is there."
        ),
    ],
    measures: Annotated[
        str | None,
        typer.Option(
            "--measures", metavar="NAMES", help="Some of entropy,distance,first,heavy,copies; else all."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Read no more of a document than this.")
    ] = 1024,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Processes with a model each.")
    ] = 1,
    engine: Annotated[Engine, typer.Option("--engine", help="ray is for several machines.")] = Engine.local,
    field: Annotated[
        str, typer.Option("--field", metavar="NAME", help="Where lines and tables have the text.")
    ] = "text",
    label: Annotated[
        str | None, typer.Option("--label", metavar="NAME", help="… and the documents' own names.")
    ] = None,
    shard: Annotated[
        int, typer.Option("--shard", metavar="N", min=1, help="Documents that are committed together.")
    ] = 64,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.001, help="Seconds that a document may take.")
    ] = 600.0,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="As cuda:0.")] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of the weights.")] = Dtype.float32,
    trust: Trust = False,
    as_json: Json = False,
) -> int:
    """A model's heads measured over a corpus, as Parquet in a directory. Broken off, the same command goes on."""
    from regard.cli.survey_commands import survey

    options = {
        "measures": None if measures is None else [each.strip() for each in measures.split(",")],
        "max_tokens": max_tokens,
        "workers": workers,
        "engine": engine.value,
        "text": field,
        "label": label,
        "shard": shard,
        "timeout": timeout,
        "device": device,
        "dtype": dtype.value,
        "trust_remote_code": trust,
    }
    return survey(Out(as_json), model, corpus, folder, options)


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", show_default=False, help="What regard survey wrote, finished or not."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PAGE", help="Where to.")] = REPORT,
    show: Show = False,
    as_json: Json = False,
) -> int:
    """A page of a survey: which heads need the context, what each does, and the documents behind it."""
    from regard.cli.survey_commands import report

    return report(Out(as_json), folder, output, show)


SHORT = {
    explain: ("The four steps of one query, every number.", "regard explain --query sat --causal"),
    explore: ("A page to work through.", "regard explore heatmap mine.npz -o mine.html"),
    look: ("A page of every head of a model.", 'regard look ./model --text "The cat sat" -o page.html'),
    doctor: ("What looks wrong with a model's attention.", "regard doctor ./model --file text.txt"),
    heads: (
        "What each head does, in numbers.",
        "regard heads my_models:make --file text.txt --by induction --top 5",
    ),
    survey: (
        "A model over a corpus: every head, every document.",
        "regard survey ./model 'texts/*.txt' --out found",
    ),
    report: ("A page of a survey.", "regard report found -o report.html"),
    profile: ("What attention costs here, and why.", "regard profile -n 4096 --mask window:256"),
}
for command, (short, example) in SHORT.items():
    app.command(command.__name__, short_help=short, epilog=f"For example: {example}")(command)


_settings = {"traceback": False}


def _version(asked: bool) -> None:
    if asked:
        print(f"regard {metadata.version('regard')}")
        raise typer.Exit


def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", envvar="REGARD_TRACEBACK", help="Show where an error came from.")
    ] = False,
) -> None:
    _settings["traceback"] = show_traceback


app.callback()(_main)


def run(arguments: list[str]) -> int:
    """Run a command line; whatever goes wrong is one line on standard error and an exit code."""
    name = next((each for each in arguments if not each.startswith("-")), "")
    known = {command.name for command in app.registered_commands}
    command = f"regard {name}" if name in known else "regard"
    _settings["traceback"] = False
    try:
        code = typer.main.get_command(app).main(
            arguments or ["--help"], prog_name="regard", standalone_mode=False
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        words = error.format_message().replace("Value error, ", "").rstrip(".")
        fail(command, f"{words}{'' if words.endswith('?') else '.'} Try '{command} --help'.")
        return 2
    except BrokenPipeError:  # somebody has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.Abort:
        fail(command, "stopped.")
        return 130
    except Exception as error:
        if _settings["traceback"]:
            traceback.print_exc()
        words, code = _told(error)
        fail(command, words)
        return code


def _told(error: Exception) -> tuple[str, int]:
    """The line for an error, and its exit code."""
    if isinstance(error, RegardError):
        # What stops a survey half-way is nobody's question.
        code = 4 if isinstance(error, RuntimeError) else 2
        return f"received {error.received}; expected {error.expected}. {error.hint}", code
    if isinstance(error, ImportError) and "is not installed. pip install" in str(error):
        return str(error).partition(": ")[2], 3
    if isinstance(error, OSError) and error.filename is not None:
        return f"received {str(error.filename)!r}; {error.strerror}.", 2
    where: Any = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    place = (
        "" if where is None else f" in {Path(where.tb_frame.f_code.co_filename).name}, line {where.tb_lineno}"
    )
    said = f"{type(error).__name__}{place}: {error}."
    return f"{said} This was not foreseen; regard --traceback … shows where it came from.", 4
