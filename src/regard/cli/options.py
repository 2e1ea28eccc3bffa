"""The arguments and options that commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ExplorerName(StrEnum):
    """The pages of `regard.explore`."""

    pipeline = "pipeline"
    heatmap = "heatmap"
    scaling = "scaling"
    geometry = "geometry"
    cost = "cost"
    code = "code"
    model = "model"


class AblationName(StrEnum):
    """What `effects` replaces the output of a head by."""

    zero = "zero"
    mean = "mean"


class WeightDtype(StrEnum):
    """The dtypes a model's weights can be converted to; `auto` leaves them as stored."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    auto = "auto"


class ProfileDtype(StrEnum):
    """The dtypes that `profile` computes with."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


class ExecutorName(StrEnum):
    """The executors of a survey."""

    local = "local"
    ray = "ray"


JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
OpenOption = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--head", metavar="INDEX", help="Head of larger arrays: 3, or 0,3 for head 3 of batch entry 0."
    ),
]
CausalOption = Annotated[bool, typer.Option("--causal", help="Apply a causal mask.")]
MatrixFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        show_default=False,
        help="JSON or NPZ file with query, key, value, tokens, mask, scale. Default: a built-in example.",
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", show_default=False, help="A folder, a name on the Hub, or module:function."
    ),
]
TextOption = Annotated[
    str | None, typer.Option("--text", "-t", metavar="TEXT", help="Text to run the model on.")
]
FileOption = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Read the text from a file; - is standard input."),
]
ImageOption = Annotated[
    Path | None, typer.Option("--image", metavar="FILE", help="Image to run the model on.")
]
AudioOption = Annotated[
    Path | None,
    typer.Option("--audio", metavar="FILE", help="WAV file to run the model on; --text is its transcript."),
]
GenerateOption = Annotated[
    int | None, typer.Option("--generate", metavar="N", min=1, help="Generate up to N tokens, greedily.")
]
LayersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--layers", "-l", metavar="NAME", help="Record only these modules; * is a wildcard. Repeatable."
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", min=1, help="Truncate the text to this many tokens."),
]
DtypeOption = Annotated[
    WeightDtype | None,
    typer.Option("--dtype", help="Dtype of the weights. Default: float32; with module:function, unchanged."),
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with the model. Read that code first."),
]
