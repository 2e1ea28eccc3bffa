"""`regard policy make`, `verify` and `tighten` with their arguments and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.options import ExecutorName, JsonOption, ModelName, OpenOption, TrustOption, WeightDtype
from regard.cli.output import Printer

POLICY_FILE = Path("policy.json")

policy_app = typer.Typer(
    help="Make a cache policy from a survey, and verify it on the model.", rich_markup_mode=None
)

PolicyArgument = Annotated[
    Path, typer.Argument(metavar="POLICY", show_default=False, help="File that regard policy make wrote.")
]
CorpusArgument = Annotated[
    str,
    typer.Argument(
        metavar="CORPUS",
        show_default=False,
        help="Other documents than those of the survey: a file, directory or pattern.",
    ),
]
BoundOption = Annotated[
    float,
    typer.Option("--bound", metavar="NATS", min=1e-9, help="Largest mean KL divergence of a prediction."),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option("--resume", metavar="DIR", help="Directory in which an interrupted run is resumed."),
]
TokensOption = Annotated[
    int,
    typer.Option("--max-tokens", metavar="N", min=1, help="Truncate each document to this many tokens."),
]
WorkersOption = Annotated[
    int, typer.Option("--workers", metavar="N", min=1, help="Number of processes, each with a model.")
]
ExecutorOption = Annotated[
    ExecutorName, typer.Option("--executor", help="Where workers run; ray for several machines.")
]
FieldOption = Annotated[
    str, typer.Option("--text-field", metavar="NAME", help="Field or column that holds the text.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="Device to run on, e.g. cuda:0.")
]
DtypeOption = Annotated[WeightDtype, typer.Option("--dtype", help="Dtype of the weights.")]


def make(
    survey: Annotated[
        Path, typer.Argument(metavar="DIR", show_default=False, help="Output of regard survey.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Policy to write, as JSON.")
    ] = POLICY_FILE,
    keep: Annotated[
        float, typer.Option("--keep", metavar="SHARE", help="Share of the weight to keep, up to 1.")
    ] = 0.99,
    sinks: Annotated[
        int, typer.Option("--sinks", metavar="N", help="First keys that every head keeps: 0, 1 or 4.")
    ] = 4,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Give the heads of a layer the same window.")
    ] = False,
    length: Annotated[
        int, typer.Option("--length", metavar="N", min=1, help="Context length of the printed sizes.")
    ] = 8192,
    as_json: JsonOption = False,
) -> int:
    """Choose for each key/value head how many keys a cache keeps, from a survey."""
    from regard.cli.policy_commands import make

    return make(Printer(as_json), survey, output, keep, sinks, by_layer, length)


def verify(
    model: ModelName,
    policy: PolicyArgument,
    corpus: CorpusArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Page to write.")
    ] = None,
    bound: BoundOption = 0.01,
    effects: Annotated[
        bool, typer.Option("--effects", help="Attribute the divergence to the heads: about 9 times the work.")
    ] = False,
    resume: ResumeOption = None,
    max_tokens: TokensOption = 1024,
    workers: WorkersOption = 1,
    executor: ExecutorOption = ExecutorName.local,
    text_field: FieldOption = "text",
    device: DeviceOption = None,
    dtype: DtypeOption = WeightDtype.float32,
    trust: TrustOption = False,
    show: OpenOption = False,
    as_json: JsonOption = False,
) -> int:
    """Run documents with a policy and without, and compare the predictions. Exits with 1 if the policy fails."""
    from regard.cli.policy_commands import verify

    options = _collect_options(max_tokens, workers, executor, text_field, device, dtype, trust)
    options |= {"effects": effects, "bound": bound}
    return verify(Printer(as_json), model, policy, corpus, output, resume, show, options)


def tighten(
    model: ModelName,
    policy: PolicyArgument,
    corpus: CorpusArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Policy to write.")
    ],
    bound: BoundOption = 0.01,
    resume: ResumeOption = None,
    max_tokens: TokensOption = 1024,
    workers: WorkersOption = 1,
    executor: ExecutorOption = ExecutorName.local,
    text_field: FieldOption = "text",
    device: DeviceOption = None,
    dtype: DtypeOption = WeightDtype.float32,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> int:
    """Widen the heads that are responsible for what a policy costs, until it holds."""
    from regard.cli.policy_commands import tighten

    options = _collect_options(max_tokens, workers, executor, text_field, device, dtype, trust)
    return tighten(Printer(as_json), model, policy, corpus, output, bound, resume, options)


def _collect_options(
    max_tokens: int,
    workers: int,
    executor: ExecutorName,
    text_field: str,
    device: str | None,
    dtype: WeightDtype,
    trust: bool,
) -> dict[str, Any]:
    """Return the options of a run over a corpus, as arguments of `CachePolicy.verify`."""
    return {
        "max_tokens": max_tokens,
        "workers": workers,
        "executor": executor.value,
        "text_field": text_field,
        "device": device,
        "dtype": dtype.value,
        "trust_remote_code": trust,
    }


EXAMPLES = {
    make: "regard policy make results -o policy.json",
    verify: "regard policy verify ./model policy.json 'other/*.txt'",
    tighten: "regard policy tighten ./model policy.json 'other/*.txt' -o tight.json",
}
for command, example in EXAMPLES.items():
    policy_app.command(command.__name__, epilog=f"Example: {example}")(command)
