"""`RunOptions`: how a model is run over a corpus, for surveys, verifications and their commands alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from regard.errors import ArgumentError

# The dtypes that a model's weights can be converted to; "auto" leaves them as stored.
WeightDtype = Literal["float32", "bfloat16", "float16", "auto"]


@dataclass(frozen=True)
class RunOptions:
    """How a model is run over a corpus; `regard.survey.run` and `CachePolicy.verify` take these as keyword arguments.

    >>> RunOptions(workers=4).max_tokens
    1024

    Args:
        max_tokens: Documents are truncated to this many tokens.
        workers: Number of worker processes, each with its own copy of the model.
        executor: "local" runs the workers on this machine, "ray" as actors of Ray Data, on this machine or on the
            cluster that `ray.init` connected to.
        text_field: Field of JSON lines, or column of Parquet, that holds the text.
        name_field: Field or column that holds the name of a document.
        shard_size: Approximate number of documents that are committed together.
        timeout: Seconds that a document may take.
        max_bytes: Longer documents are quarantined.
        device: Device to run on, e.g. "cuda:0".
        dtype: "float32", "bfloat16", "float16" or "auto"; see `regard.models.load`.
        threads: Number of torch threads in each worker.
        trust_remote_code: Run the code that comes with a model.
    """

    max_tokens: int = 1024
    workers: int = 1
    executor: Literal["local", "ray"] = "local"
    text_field: str = "text"
    name_field: str | None = None
    shard_size: int = 64
    timeout: float = 600.0
    max_bytes: int = 1 << 24
    device: str | None = None
    dtype: WeightDtype = "float32"
    threads: int = 1
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "workers", "shard_size", "threads"):
            if getattr(self, name) < 1:
                raise ArgumentError(
                    "RunOptions",
                    received=f"{name} {getattr(self, name)}",
                    expected="at least 1",
                    hint=f"Omit {name} for the default.",
                )

    @property
    def corpus_fields(self) -> tuple[str, str | None, int, int]:
        """The options of a `Corpus`."""
        return self.text_field, self.name_field, self.shard_size, self.max_bytes


class RunKeywords(TypedDict, total=False):
    """The fields of `RunOptions` as keyword arguments, for type checkers."""

    max_tokens: int
    workers: int
    executor: Literal["local", "ray"]
    text_field: str
    name_field: str | None
    shard_size: int
    timeout: float
    max_bytes: int
    device: str | None
    dtype: WeightDtype
    threads: int
    trust_remote_code: bool
