"""What to measure: the settings of a server, and what a request asks for."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.lens.spans import Spans, parse_spans

__all__ = [
    "RequestOptions", "Settings", "asks_for_nothing", "find_settings", "is_sampled", "select_ids", "split_request_id",
]  # fmt: skip

VARIABLE = "REGARD_VLLM"  # of the environment
FORMATS = ("jsonl", "parquet")
MAX_TOPK = 1024
# Names of other columns in the tables of a request log.
TABLE_COLUMNS = (
    "entropy", "first", "max_score", "id", "child", "prompt_tokens", "generated_tokens", "measured_tokens",
    "finish_reason",
)  # fmt: skip


def _accept_integers(lowest: int, highest: float = math.inf) -> tuple[str, Callable[[Any], bool]]:
    accepted = (
        f"an integer of {lowest} or more" if highest == math.inf else f"an integer from {lowest} to {highest}"
    )
    return accepted, lambda value: type(value) is int and lowest <= value <= highest


# What each setting accepts.
BOOLEAN = ("true or false", lambda value: type(value) is bool)
ACCEPTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "rate": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "folder": ("a string", lambda value: isinstance(value, str)),
    "format": (" or ".join(map(repr, FORMATS)), lambda value: value in FORMATS),
    "prompt": BOOLEAN,
    "keep": BOOLEAN,
    "topk": _accept_integers(0, MAX_TOPK),
    "token_ids": BOOLEAN,
    "recent": _accept_integers(0),
    "otlp_endpoint": ("a string", lambda value: value is None or isinstance(value, str)),
    "queue": _accept_integers(1),
    "keep_bytes": _accept_integers(0),
}


@dataclass(frozen=True)
class Settings:
    """What a server measures, and where the records go.

    Args:
        rate: Share of requests that are measured although they do not ask for it, from 0 to 1.
        folder: Directory of the records.
        format: "jsonl", or "parquet" for files that are converted as soon as they are complete.
        prompt: Measure the rows of the prompt also.
        keep: Keep the numbers of every row, not only their means.
        topk: How many of the largest weights of each row are kept, if rows are kept.
        token_ids: Store the token ids of a measured request.
        recent: How many records a worker keeps in memory for `GET /regard/<id>`.
        otlp_endpoint: Address of an OpenTelemetry collector, such as "http://localhost:4317"; None for none.
        queue: How many records may wait to be written; further records are dropped and counted.
        keep_bytes: Size of the rows of one request up to which they are kept; of a larger request, only the means are.
    """

    rate: float = 0.0
    folder: str = "regard-requests"
    format: str = "jsonl"
    prompt: bool = False
    keep: bool = False
    topk: int = 4
    token_ids: bool = False
    recent: int = 100
    otlp_endpoint: str | None = None
    queue: int = 1000
    keep_bytes: int = 64_000_000

    def __post_init__(self) -> None:
        for name, (accepted, is_accepted) in ACCEPTED.items():
            if not is_accepted(getattr(self, name)):
                raise ArgumentError(
                    "regard.vllm",
                    received=f"{name}={getattr(self, name)!r}",
                    expected=accepted,
                    hint='For example --additional-config \'{"regard": {"rate": 0.01, "folder": "attention"}}\'.',
                )


def find_settings(vllm_config: Any) -> Settings | None:
    """Return the settings of an engine, from its additional config or else the environment; None if it has none.

    Args:
        vllm_config: The engine's `VllmConfig`.

    Raises:
        ArgumentError: If a setting is unknown or has a wrong value.
    """
    config = vllm_config.additional_config
    given = config.get("regard") if isinstance(config, Mapping) else None
    if given is None and os.environ.get(VARIABLE):
        given = _parse_json(os.environ[VARIABLE], VARIABLE)
    if given is None or given is False:
        return None
    return Settings(**_check_names({} if given is True else given, list(ACCEPTED)))


@dataclass(frozen=True)
class RequestOptions:
    """What is measured for one request.

    Args:
        spans: Named parts of the prompt; None without spans.
        prompt: Measure the rows of the prompt also.
        keep: Keep the numbers of every row.
        topk: How many of the largest weights of each row are kept, if rows are kept.
    """

    spans: Spans | None
    prompt: bool
    keep: bool
    topk: int

    @classmethod
    def parse(cls, given: Any, settings: Settings) -> RequestOptions:
        """Parse `SamplingParams(extra_args={"regard": given})`; a server receives `given` as a JSON string.

        Args:
            given: A mapping, a JSON string, or None or True for the defaults.
            settings: The settings of the server, which are the defaults.

        Raises:
            ArgumentError: If an option is unknown or has a wrong value.
            ArgumentTypeError: If `given` is not a mapping.
        """
        given = _parse_json(given, "regard") if isinstance(given, str) else given
        given = {} if given is None or (isinstance(given, int) and given == 1) else given
        options = _check_names(given, ["spans", "prompt", "keep", "topk"])
        spans = options.pop("spans", None)
        merged = {name: options.get(name, getattr(settings, name)) for name in ("prompt", "keep", "topk")}
        Settings(**merged)  # checks the values
        return cls(None if spans is None else _parse_names(spans), **merged)


def _parse_names(given: Any) -> Spans:
    """Parse spans as JSON has them, and refuse names that files or tables cannot hold."""
    spans = parse_spans(_as_ranges(given), "regard.vllm")
    for name in spans.names:
        if name in TABLE_COLUMNS or any("\ud800" <= character <= "\udfff" for character in name):
            raise ArgumentError(
                "regard.vllm",
                received=f"a span named {name!r}",
                expected="text other than " + ", ".join(TABLE_COLUMNS),
                hint="These are names of other columns. Choose another name.",
            )
    return spans


def _as_ranges(spans: Any) -> Any:
    """Convert the lists of JSON, [0, 57] or [[0, 57], [60, 70]], to ranges."""
    if not isinstance(spans, Mapping):
        return spans
    return {
        name: tuple(ranges)
        if isinstance(ranges, list) and not any(isinstance(part, list | tuple) for part in ranges)
        else [tuple(part) if isinstance(part, list) else part for part in ranges]
        if isinstance(ranges, list)
        else ranges
        for name, ranges in spans.items()
    }


def asks_for_nothing(given: Any) -> bool:
    """Return whether a request refuses to be measured: `{"regard": false}`, which JSON of a server makes 0."""
    return (isinstance(given, int) and given == 0) or (
        isinstance(given, str) and given.strip().lower() == "false"
    )


def split_request_id(request_id: str) -> tuple[str, int]:
    """Split an id of the engine into the id that the client sees, and the number of the child for n > 1.

    >>> split_request_id("1_cmpl-7-0-0a1b2c3d"), split_request_id("cmpl-7-0-0a1b2c3d")
    (('cmpl-7-0', 1), ('cmpl-7-0', 0))
    """
    found = re.fullmatch(r"(?:(\d+)_)?(.*?)(?:-[0-9a-f]{8})?", request_id, re.DOTALL)
    assert found is not None
    return found[2], int(found[1] or 0)


def select_ids(ids: Iterable[str], response_id: str) -> list[str]:
    """Return the ids of a response: its own, or else one for each prompt of a completion.

    >>> select_ids(["cmpl-7-0", "cmpl-7-1", "cmpl-70-0"], "cmpl-7")
    ['cmpl-7-0', 'cmpl-7-1']
    """
    ids = list(dict.fromkeys(ids))
    numbered = re.compile(rf"{re.escape(response_id)}-\d+")
    return [response_id] if response_id in ids else [name for name in ids if numbered.fullmatch(name)]


def is_sampled(request_id: str, rate: float) -> bool:
    """Return whether a request is among the share `rate`; the same on every rank and for all children of n > 1."""
    client_id, _ = split_request_id(request_id)
    # Offline ids are small numbers that every engine counts from 0, so the random suffix counts too.
    suffix = re.search(r"-[0-9a-f]{8}$", request_id)
    name = client_id if client_id and not client_id.isdigit() else request_id if suffix is None else suffix[0]
    digest = hashlib.blake2b(name.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < rate * 2**64


def _parse_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            "regard.vllm",
            received=f"{name}={text[:80]!r}, which is not JSON ({error})",
            expected="a JSON object",
            hint=f"""For example {name}='{{"rate": 0.01}}'."""
            if name == VARIABLE
            else "Pass json.dumps({'spans': {'document': [0, 57]}}) in vllm_xargs.",
        ) from None


def _check_names(given: Any, names: list[str]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            "regard.vllm",
            received=describe_argument(given),
            expected="a mapping of options",
            hint="The options are " + ", ".join(names) + ".",
        )
    for name in given:
        if name not in names:
            raise ArgumentError(
                "regard.vllm",
                received=f"the option {name!r}",
                expected="one of " + ", ".join(names),
                hint="Options of a request are set in extra_args, options of the server in its additional config.",
            )
    return dict(given)
