"""The commands with their arguments and help; those for learners are in `learn_app`."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.learn_app import exercise, explain, explore
from regard.cli.options import (
    AblationName,
    AudioOption,
    DtypeOption,
    ExecutorName,
    FileOption,
    GenerateOption,
    ImageOption,
    JsonOption,
    LayersOption,
    MaxTokensOption,
    ModelName,
    OpenOption,
    ProfileDtype,
    TextOption,
    TrustOption,
    WeightDtype,
)
from regard.cli.output import Printer
from regard.cli.policy_app import policy_app

EXIT_CODES = (
    "Exit codes: 0 success, 1 error or difference found, 2 usage error, "
    "3 an extra is missing, 4 other failure."
)
LOOK_PAGE, REPORT_PAGE = Path("look.html"), Path("report.html")

app = typer.Typer(
    name="regard",
    help="Inspect scaled dot-product attention, in models and on its own.",
    epilog=EXIT_CODES,
    rich_markup_mode=None,  # plain help: shorter, and the same in a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def look(
    model: ModelName,
    text: TextOption = None,
    file: FileOption = None,
    image: ImageOption = None,
    audio: AudioOption = None,
    generate: GenerateOption = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Page to write, or a picture: FILE.png.")
    ] = LOOK_PAGE,
    layers: LayersOption = None,
    max_tokens: MaxTokensOption = None,
    dtype: DtypeOption = None,
    trust: TrustOption = False,
    show: OpenOption = False,
    as_json: JsonOption = False,
) -> int:
    """Write a page with every head of a model on a text, an image or sound: maps, measures and findings."""
    from regard.cli.look_command import LookOptions, look
    from regard.cli.model_commands import ModelOptions

    options = ModelOptions(model, text, file, tuple(layers or ()), max_tokens, dtype, trust)
    return look(Printer(as_json), options, LookOptions(image, audio, generate), output, show)


def doctor(
    model: ModelName,
    text: TextOption = None,
    file: FileOption = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="No token may attend to later ones. Default: inferred.")
    ] = False,
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="Tokens may attend to later ones.")
    ] = False,
    layers: LayersOption = None,
    max_tokens: MaxTokensOption = None,
    dtype: DtypeOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> int:
    """Diagnose the attention of a model by experiments on a text. Exits with 1 if there is an error."""
    from regard.cli.model_commands import ModelOptions, doctor

    options = ModelOptions(model, text, file, tuple(layers or ()), max_tokens, dtype, trust)
    return doctor(Printer(as_json), options, causal, bidirectional)


def heads(
    model: ModelName,
    text: TextOption = None,
    file: FileOption = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="MEASURE", help="Sort by a column, largest first.")
    ] = None,
    smallest: Annotated[bool, typer.Option("--smallest", help="Sort smallest first.")] = False,
    top: Annotated[
        int | None,
        typer.Option(
            "--top", "-n", metavar="N", min=1, help="Print N rows. Default: 20 in a terminal, else all."
        ),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    layers: LayersOption = None,
    max_tokens: MaxTokensOption = None,
    dtype: DtypeOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> int:
    """Print the measures of each head of a model on a text, such as entropy, distance and induction."""
    from regard.cli.model_commands import ModelOptions, heads

    options = ModelOptions(model, text, file, tuple(layers or ()), max_tokens, dtype, trust)
    return heads(Printer(as_json, as_csv), options, by, smallest, top)


def effects(
    model: ModelName,
    answer: Annotated[
        str,
        typer.Option(
            "--answer", "-a", metavar="TEXT", show_default=False, help="Answer that follows the text."
        ),
    ],
    text: TextOption = None,
    file: FileOption = None,
    wrong: Annotated[
        str | None,
        typer.Option(
            "--wrong", "-w", metavar="TEXT", help="Wrong answer to compare with. Default: all others."
        ),
    ] = None,
    to: Annotated[AblationName, typer.Option("--to", help="What the output of a head is replaced by.")] = (
        AblationName.zero
    ),
    keys: Annotated[
        str | None,
        typer.Option(
            "--keys", metavar="SPAN", help="Knock out the edges to a token, position or range (3:8) instead."
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", "-n", metavar="N", min=1, help="Print N rows.")] = 20,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PAGE", help="Write a page with all heads.")
    ] = None,
    layers: LayersOption = None,
    max_tokens: MaxTokensOption = None,
    dtype: DtypeOption = None,
    trust: TrustOption = False,
    show: OpenOption = False,
    as_json: JsonOption = False,
) -> int:
    """Measure what each head of a model is worth: how the logit of an answer changes without it."""
    from regard.cli.effects_command import effects
    from regard.cli.model_commands import ModelOptions

    options = ModelOptions(model, text, file, tuple(layers or ()), max_tokens, dtype, trust)
    return effects(Printer(as_json), options, answer, wrong, to.value, keys, top, output, show)


def compare(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_A",
            show_default=False,
            help="A folder, a name on the Hub, module:function, or a file that recording.save wrote.",
        ),
    ],
    other: Annotated[
        str, typer.Argument(metavar="MODEL_B", show_default=False, help="The model to compare with it.")
    ],
    text: TextOption = None,
    file: FileOption = None,
    layers: LayersOption = None,
    max_tokens: MaxTokensOption = None,
    dtype: DtypeOption = None,
    other_dtype: Annotated[
        WeightDtype | None,
        typer.Option("--dtype-b", help="Dtype of the weights of MODEL_B. Default: that of --dtype."),
    ] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> int:
    """Compare two models on a text: the first layer or module in which they part, and why. Exits with 1 if they do."""
    from regard.cli.compare_command import compare
    from regard.cli.model_commands import ModelOptions

    first = ModelOptions(model, text, file, tuple(layers or ()), max_tokens, dtype, trust)
    second = ModelOptions(other, text, file, tuple(layers or ()), max_tokens, other_dtype or dtype, trust)
    return compare(Printer(as_json), first, second)


def survey(
    model: ModelName,
    corpus: Annotated[
        str,
        typer.Argument(
            metavar="CORPUS",
            show_default=False,
            help="A file, directory or pattern of text files, JSON lines or Parquet.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            show_default=False,
            help="Directory to write to; an unfinished survey is resumed.",
        ),
    ],
    measures: Annotated[
        str | None,
        typer.Option(
            "--measures",
            metavar="NAMES",
            help="Comma-separated: entropy,distance,first,heavy,copies. Default: all.",
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", metavar="N", min=1, help="Truncate each document to this many tokens."),
    ] = 1024,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Number of processes, each with a model.")
    ] = 1,
    executor: Annotated[
        ExecutorName, typer.Option("--executor", help="Where workers run; ray for several machines.")
    ] = ExecutorName.local,
    text_field: Annotated[
        str, typer.Option("--text-field", metavar="NAME", help="Field or column that holds the text.")
    ] = "text",
    name_field: Annotated[
        str | None,
        typer.Option("--name-field", metavar="NAME", help="Field or column that holds a document's name."),
    ] = None,
    prompt_field: Annotated[
        str | None,
        typer.Option(
            "--prompt-field", metavar="NAME", help="Field or column with the prompt that a text answers."
        ),
    ] = None,
    shard_size: Annotated[
        int,
        typer.Option(
            "--shard-size", metavar="N", min=1, help="Number of documents that are committed together."
        ),
    ] = 64,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Time limit for a document."),
    ] = 600.0,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="Device to run on, e.g. cuda:0.")
    ] = None,
    dtype: Annotated[
        WeightDtype, typer.Option("--dtype", help="Dtype of the weights.")
    ] = WeightDtype.float32,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> int:
    """Measure the heads of a model over a corpus and write the rows as Parquet.

    Run the same command again to resume an interrupted survey.
    """
    from regard.cli.survey_commands import survey

    options = {
        "measures": None if measures is None else [name.strip() for name in measures.split(",")],
        "max_tokens": max_tokens,
        "workers": workers,
        "executor": executor.value,
        "text_field": text_field,
        "name_field": name_field,
        "prompt_field": prompt_field,
        "shard_size": shard_size,
        "timeout": timeout,
        "device": device,
        "dtype": dtype.value,
        "trust_remote_code": trust,
    }
    return survey(Printer(as_json), model, corpus, output, options)


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", show_default=False, help="Output of regard survey, finished or not."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PAGE", help="File to write.")
    ] = REPORT_PAGE,
    show: OpenOption = False,
    as_json: JsonOption = False,
) -> int:
    """Write the page of a survey: which heads need a long context, their behaviour, and their documents."""
    from regard.cli.survey_commands import report

    return report(Printer(as_json), folder, output, show)


def profile(
    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length", "-n", metavar="N", min=1, help="Number of tokens. Default: 2048. Repeatable."
        ),
    ] = None,
    queries: Annotated[
        int | None,
        typer.Option("--queries", metavar="N", min=1, help="Number of queries, e.g. 1 for decoding."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option("--heads", metavar="N", min=1, help="Number of heads.")] = 8,
    kv_heads: Annotated[
        int | None,
        typer.Option("--kv-heads", metavar="N", min=1, help="Number of key/value heads. Default: heads."),
    ] = None,
    head_dim: Annotated[
        int, typer.Option("--head-dim", metavar="N", min=1, help="Width of queries and keys.")
    ] = 64,
    value_dim: Annotated[
        int | None,
        typer.Option("--value-dim", metavar="N", min=1, help="Width of values. Default: head_dim."),
    ] = None,
    mask: Annotated[
        str, typer.Option("--mask", metavar="MASK", help="none, causal, window:N, padding:N or documents:N.")
    ] = "causal",
    dtype: Annotated[
        ProfileDtype, typer.Option("--dtype", help="Dtype to compute with.")
    ] = ProfileDtype.float32,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=1, help="Number of timings of each variant.")
    ] = 7,
    as_json: JsonOption = False,
) -> int:
    """Time attention of a given size on this machine, with the kernel and peak memory of each variant."""
    from regard.cli.profile_command import ProfileSize, profile

    sizes = [
        ProfileSize(
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
    return profile(Printer(as_json), sizes, rounds)


def selfcheck(
    cases: Annotated[
        int, typer.Option("--cases", "-n", metavar="N", min=1, help="Number of generated cases.")
    ] = 100,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Device to check as well, e.g. cuda or mps; takes about two minutes.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Compare the kernels and generated cases with the definition, in the installed versions.

    Exits with 1 if something is wrong. The report names versions and settings, no paths, machine or user: paste the
    output of --json into an issue.
    """
    from regard.cli.selfcheck_command import selfcheck

    return selfcheck(Printer(as_json), cases, device)


SHORT_HELP = {
    explain: ("Explain one query step by step.", "regard explain --query sat --causal"),
    explore: ("Write an interactive page.", "regard explore heatmap mine.npz -o mine.html"),
    exercise: ("Do the exercises of the book.", "regard exercise 3"),
    look: (
        "Write a page with every head of a model.",
        'regard look ./model --text "The cat sat" -o page.html',
    ),
    doctor: ("Diagnose the attention of a model.", "regard doctor ./model --file text.txt"),
    heads: (
        "Print measures of each head of a model.",
        "regard heads my_models:make --file text.txt --by induction --top 5",
    ),
    effects: (
        "Measure what each head is worth.",
        'regard effects ./model --text "The capital of France is" --answer " Paris" --wrong " Rome"',
    ),
    compare: (
        "Find where two models part.",
        'regard compare ./model ./port --text "The cat sat"',
    ),
    survey: (
        "Measure a model over a corpus.",
        "regard survey ./model 'texts/*.txt' -o results",
    ),
    report: ("Write the page of a survey.", "regard report results -o report.html"),
    profile: ("Time attention on this machine.", "regard profile -n 4096 --mask window:256"),
    selfcheck: ("Check the installed versions.", "regard selfcheck --json >selfcheck.json"),
}
for command, (short_help, example) in SHORT_HELP.items():
    app.command(command.__name__, short_help=short_help, epilog=f"Example: {example}")(command)

app.add_typer(policy_app, name="policy")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"regard {metadata.version('regard')}")
        raise typer.Exit


def _set_global_options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    show_traceback: Annotated[
        bool,
        typer.Option("--traceback", envvar="REGARD_TRACEBACK", help="Print the traceback of an error."),
    ] = False,
) -> None:
    context.obj["traceback"] = show_traceback


app.callback()(_set_global_options)
