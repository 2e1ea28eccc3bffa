"""The arguments and options that commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from regard.jobs.options import RunOptions, WeightDtype

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
OpenOption = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--head",
        metavar="INDEX",
        help="Head to select if the arrays have several: 3, or 0,3 for head 3 of batch entry 0.",
    ),
]
CausalOption = Annotated[
    bool, typer.Option("--causal", help="Apply a causal mask: no token attends to later ones.")
]
MatrixFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        show_default=False,
        help="JSON or NPZ file with query and key; optionally value, tokens, mask and scale. "
        "Default: an example of five tokens.",
    ),
]
MODEL_HELP = (
    "A folder, a name on the Hugging Face Hub, module:function (a function that returns a model), "
    "or stories (the small trained model that comes with regard)."
)
ModelName = Annotated[str, typer.Argument(metavar="MODEL", show_default=False, help=MODEL_HELP)]
TRUST_OPTION = typer.Option(
    "--trust-remote-code", help="Run the code that comes with a model. Read that code first."
)


@dataclass(frozen=True)
class TextOptions:
    """The options of a command that runs a model on a text."""

    text: Annotated[
        str | None, typer.Option("--text", "-t", metavar="TEXT", help="Text to run the model on.")
    ] = None
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Read the text from a file; - reads standard input."
        ),
    ] = None
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layers",
            "-l",
            metavar="NAME",
            help="Only modules with this name; * is a wildcard. Repeatable. Default: all.",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            min=1,
            help="Truncate the text to N tokens. Default: the maximum length of the model.",
        ),
    ] = None
    dtype: Annotated[
        WeightDtype | None,
        typer.Option(
            "--dtype",
            help="Dtype of the weights; auto = as stored. Default: float32, or unchanged with module:function.",
        ),
    ] = None
    trust_remote_code: Annotated[bool, TRUST_OPTION] = False


# Options that follow those of the command itself.
RARE_OPTIONS = ("layers", "max_tokens", "dtype", "other_dtype", "trust_remote_code", "as_csv", "as_json")

# The fields of `RunOptions` as options of a command that runs a model over a corpus.
RUN_OPTIONS: dict[str, Any] = {
    "max_tokens": typer.Option(
        "--max-tokens", metavar="N", min=1, help="Truncate each document to N tokens."
    ),
    "workers": typer.Option(
        "--workers", metavar="N", min=1, help="Number of processes, each with its own copy of the model."
    ),
    "executor": typer.Option(
        "--executor", help="Where the processes run: on this machine, or on a Ray cluster."
    ),
    "text_field": typer.Option(
        "--text-field", metavar="NAME", help="Field of JSON lines, or column of Parquet, that holds the text."
    ),
    "name_field": typer.Option(
        "--name-field",
        metavar="NAME",
        help="Field or column that holds the name of a document. Default: its file and position.",
    ),
    "shard_size": typer.Option(
        "--shard-size", metavar="N", min=1, help="Number of documents that are saved together."
    ),
    "timeout": typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Time limit for one document."),
    "max_bytes": typer.Option(
        "--max-bytes", metavar="N", min=1, help="Skip documents larger than N bytes, and list them."
    ),
    "device": typer.Option(
        "--device",
        metavar="DEVICE",
        help="Device to run on, e.g. cuda:0. Default: where the model is loaded, usually the CPU.",
    ),
    "dtype": typer.Option("--dtype", help="Dtype of the weights; auto = as stored."),
    "threads": typer.Option("--threads", metavar="N", min=1, help="Number of torch threads per process."),
    "trust_remote_code": TRUST_OPTION,
}


def take_options(command: Callable[..., int]) -> Callable[..., int]:
    """Let a command take the fields of an options class as options of its own.

    typer reads the signature: a parameter whose type is a dataclass is replaced by the fields of the class.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []

    def add(name: str, default: Any, annotation: Any) -> None:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))

    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            add(name, parameter.default, hints[name])
            continue
        group = groups[name]
        # Of its constructor: a public class names another module than the one with its annotations.
        own = get_type_hints(group.__init__, include_extras=True)
        for field in fields(group):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            hint = own[field.name]
            add(
                field.name, default, Annotated[hint, RUN_OPTIONS[field.name]] if group is RunOptions else hint
            )

    if TextOptions in groups.values():  # what a command is about comes first in its help
        parameters.sort(
            key=lambda parameter: RARE_OPTIONS.index(parameter.name) if parameter.name in RARE_OPTIONS else -1
        )

    @functools.wraps(command)
    def run(**given: Any) -> int:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
