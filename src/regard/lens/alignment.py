"""`Alignment`: when each token of a transcript was spoken, found by dynamic time warping over cross-attention."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.capture.call import Call, LayerCall
from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError, describe_argument
from regard.lens.find import as_numpy, require_weights, select_batch_entry
from regard.lens.table import Table
from regard.lens.time_warping import filter_median, find_cheapest_path, standardise_columns
from regard.lens.token_rows import TokenRows, as_token_lists
from regard.lens.word_groups import group_words
from regard.types import Array, IntArray

OPERATION = "recording.align"


@dataclass(frozen=True)
class Alignment:
    """The times of the tokens of a transcript. `Recording.align` makes it.

    Args:
        ids: The generated tokens, n of them.
        times: (n,), the end of each token in seconds, which is the start of the next; transformers calls them
            `token_timestamps`. The last token was not fed back to the model, so it ends with the one before it.
        matrix: (n or n − 1, frames), mean over the heads of the standardised weights, which was warped.
        path: Rows and columns of `matrix` on the path, in order.
        seconds_per_frame: Length of a frame.
        start: Time of the first frame in seconds.

    >>> import numpy as np
    >>> from regard.lens import Alignment
    >>> alignment = Alignment([7, 8], np.array([0.02, 0.06]), np.eye(2, 4), (np.arange(2), np.arange(2)), 0.02)
    >>> print(alignment.tokens())
    token  start    end
        7  0.000  0.020
        8  0.020  0.060
    """

    ids: list[Any]
    times: Array = field(repr=False)
    matrix: Array = field(repr=False)
    path: tuple[IntArray, IntArray] = field(repr=False)
    seconds_per_frame: float
    start: float = 0.0

    def tokens(self, tokenizer: Any = None) -> Table:
        """Return a table with one row for each token: `token`, and `start` and `end` in seconds.

        Args:
            tokenizer: A tokenizer of transformers, for texts in place of ids.

        Returns:
            The table.
        """
        names = self.ids if tokenizer is None else tokenizer.convert_ids_to_tokens(self.ids)
        starts = [self.start, *self.times[:-1].tolist()]
        rows = zip(names, starts, self.times.tolist(), strict=True)
        return Table({"token": name, "start": start, "end": end} for name, start, end in rows)

    def words(self, tokenizer: Any, *, spaces: bool | None = None) -> Table:
        """Return a table with one row for each word: `word`, `start` and `end` in seconds, `first` and `last` token.

        A word starts at a token that adds a space to the text, or at a punctuation mark. Opening marks then belong to
        the word after them, closing marks to the word before. Tokens that are part of a character stay together.
        Special tokens and timestamps belong to no word. This is the grouping of Whisper and of transformers' pipeline.

        Args:
            tokenizer: A tokenizer of transformers.
            spaces: Whether the language is written with spaces; if not, every character is a word. By default it is,
                unless the tokens contain the language token of Chinese, Japanese, Thai, Lao, Burmese or Cantonese.

        Returns:
            The table.

        Raises:
            ArgumentTypeError: If `tokenizer` is not a tokenizer, or the tokens are not ids.
        """
        is_tokenizer = hasattr(tokenizer, "convert_ids_to_tokens") and hasattr(tokenizer, "decode")
        if not is_tokenizer or not all(isinstance(token, int) for token in self.ids):
            raise ArgumentTypeError(
                "alignment.words",
                received=f"tokenizer as {describe_argument(tokenizer)}"
                if not is_tokenizer
                else "tokens that are not ids",
                expected="a tokenizer of transformers, and an alignment of token ids",
                hint="Words need the text of each token: recording.align(ids, …).words(processor.tokenizer).",
            )
        ends = [self.start, *self.times.tolist()]
        return Table(
            {
                "word": word.text,
                "start": ends[word.start],
                "end": ends[word.stop],
                "first": word.start,
                "last": word.stop - 1,
            }
            for word in group_words(self.ids, tokenizer, spaces)
        )

    def __repr__(self) -> str:
        tokens = "1 token" if len(self.ids) == 1 else f"{len(self.ids):,} tokens"
        return f"Alignment({tokens}, {self.matrix.shape[1]:,} frames of {self.seconds_per_frame:g} s)"


def compute_alignment(
    layer_calls: Sequence[LayerCall],
    tokens: Any,
    heads: Any,
    *,
    prompt: int | None,
    frames: int | None,
    seconds_per_frame: float,
    start: float,
    filter_width: int,
    batch: int,
    call: int | None,
) -> Alignment:
    """Compute the result of `Recording.align`; its arguments are described there."""
    if not isinstance(filter_width, int) or filter_width < 1 or filter_width % 2 == 0:
        raise ArgumentError(
            OPERATION,
            received=f"filter_width={filter_width!r}",
            expected="an odd number, at least 1",
            hint="Whisper's is model.config.median_filter_width; 1 does not filter.",
        )
    pairs = _parse_heads(heads)
    by_layer = _select_calls(layer_calls, sorted({layer for layer, _ in pairs}, key=str))
    ids = _select_entry(as_token_lists(tokens, OPERATION), batch)
    chosen = {layer: _select_call(calls, len(ids), prompt, call) for layer, calls in by_layer.items()}
    total: Any = 0.0
    for layer, head in pairs:
        selected = chosen[layer]
        # One head at a time: the weights of all heads of a layer are never made.
        weights = _read_weights(selected, head, len(ids), prompt, frames, batch)
        total = total + filter_median(standardise_columns(weights), filter_width)
    matrix = total / len(pairs)
    rows, columns = find_cheapest_path(-matrix) if matrix.size else (np.zeros(0, int), np.zeros(0, int))
    entered = columns[np.diff(rows, prepend=-1) > 0]  # the frame in which the path enters each row
    padded = np.append(entered, entered[-1:] if len(entered) else [0])[: len(ids)]
    times = start + padded * seconds_per_frame
    return Alignment(ids, times, matrix, (rows, columns), seconds_per_frame, start)


def _parse_heads(heads: Any) -> list[tuple[int | str, int]]:
    """Return the pairs of layer and head."""
    try:
        pairs = [
            (layer if isinstance(layer, str) else operator.index(layer), operator.index(head))
            for layer, head in heads
        ]
    except (TypeError, ValueError):
        pairs = []
    if pairs:
        return pairs
    raise ArgumentTypeError(
        OPERATION,
        received=f"heads as {describe_argument(heads)}",
        expected="pairs of decoder layer and head, at least one, e.g. [(2, 3), (3, 0)]",
        hint="Whisper's are model.generation_config.alignment_heads. A layer can be the name of a module, too.",
    )


def _select_entry(token_lists: list[list[Any]], batch: int) -> list[Any]:
    """Return the tokens of one batch entry; one list is for any entry."""
    if len(token_lists) == 1:
        return token_lists[0]
    if not -len(token_lists) <= batch < len(token_lists):
        raise IndexOutOfRangeError(
            OPERATION,
            received=f"batch={batch} and tokens of {len(token_lists)} batch entries",
            expected=f"a number from 0 to {len(token_lists) - 1}",
            hint="Batch entries are counted from 0.",
        )
    return token_lists[batch]


def _select_calls(
    layer_calls: Sequence[LayerCall], layers: Sequence[int | str]
) -> dict[int | str, list[Call]]:
    """Return the calls of cross-attention of each layer, by its name or the number in its name."""
    by_name: dict[str, list[Call]] = {}
    for entry in layer_calls:
        if TokenRows.from_call(entry.call).query_offset is None:
            by_name.setdefault(entry.module, []).append(entry.call)
    numbers: dict[int, list[str]] = {}
    for position, name in enumerate(by_name):
        parts = [int(part) for part in name.split(".") if part.isdigit()]
        numbers.setdefault(parts[0] if parts else position, []).append(name)
    selected = {}
    for layer in layers:
        names = [layer] if isinstance(layer, str) else numbers.get(layer, [])
        if len(names) != 1 or names[0] not in by_name:
            raise ArgumentError(
                OPERATION,
                received=f"heads of layer {layer!r}"
                + (f", which is {' and '.join(names)}" if names[1:] else ""),
                expected=f"a layer with cross-attention: {', '.join(map(str, sorted(numbers)))}"
                if by_name
                else "a recording of a model with an encoder and a decoder, such as Whisper",
                hint=f"Pass a number, or a name such as {next(iter(by_name))!r}."
                if by_name
                else "Watch the whole model, and run it on audio inside the with block.",
            )
        selected[layer] = by_name[names[0]]
    return selected


def _count_prompt(call: Call, prompt: int | None) -> int:
    """Return the number of rows that belong to the prompt: those of the first call of `generate()`."""
    rows = call.shape[-2]
    if prompt is None and call.steps == 1:
        raise ArgumentError(
            OPERATION,
            received=f"one call with {rows} rows and no prompt",
            expected="the number of decoder tokens before the transcript",
            hint="Pass prompt=4 for <|startoftranscript|><|en|><|transcribe|><|notimestamps|>. "
            "It is known without if the tokens were generated inside the with block.",
        )
    count = rows - call.steps + 1 if prompt is None else prompt
    if not isinstance(count, int) or not 0 <= count <= rows:
        raise ArgumentError(
            OPERATION,
            received=f"prompt={count!r}",
            expected=f"the number of decoder tokens before the transcript, from 0 to {rows}",
            hint="Omit it if the tokens were generated inside the with block.",
        )
    return count


def _select_call(calls: Sequence[Call], num_tokens: int, prompt: int | None, index: int | None) -> Call:
    """Return the call of a layer that read the tokens."""
    for entry in calls:
        require_weights(entry, OPERATION)
    if index is None and len(calls) > 1:
        fitting = [
            entry
            for entry in calls
            if (entry.steps > 1 or prompt is not None)
            and entry.shape[-2] - _count_prompt(entry, prompt) in (num_tokens - 1, num_tokens)
        ]
    else:
        position = 0 if index is None else index
        fitting = [calls[position]] if -len(calls) <= position < len(calls) else []
    if len(fitting) == 1:
        return fitting[0]
    rows = ", ".join(str(entry.shape[-2]) for entry in calls)
    raise ArgumentError(
        OPERATION,
        received=f"call={index}" if index is not None else f"{num_tokens} tokens and no call",
        expected=f"one of {len(calls)} calls of the decoder, which have {rows} rows",
        hint="Each window of 30 seconds, each retry and the detection of the language are calls: pass call=0, or -1.",
    )


def _read_weights(
    call: Call, head: int, num_tokens: int, prompt: int | None, frames: int | None, batch: int
) -> Array:
    """Read the weights of one head, (rows, frames), from the first token after the prompt on."""
    *lead, num_rows, num_keys = call.shape
    first = _count_prompt(call, prompt)
    if not 1 <= num_tokens <= num_rows - first + 1:
        raise ArgumentError(
            OPERATION,
            received=f"{num_tokens} tokens",
            expected=f"the generated tokens: at most {num_rows - first + 1}, after a prompt of {first}",
            hint="Pass the tokens without the prompt; the last one may be missing in the recording. If the prompt has "
            "another length, pass prompt=.",
        )
    if frames is not None and (not isinstance(frames, int) or not 1 <= frames <= num_keys):
        raise ArgumentError(
            OPERATION,
            received=f"frames={frames!r}",
            expected=f"the number of frames that are audio, from 1 to {num_keys}",
            hint="With Whisper's feature extractor: int(inputs.attention_mask.sum()) // 2.",
        )
    if not 0 <= head < lead[-1]:
        raise IndexOutOfRangeError(
            OPERATION,
            received=f"head {head} of {call.name}",
            expected=f"a head from 0 to {lead[-1] - 1}",
            hint="Heads are counted from 0.",
        )
    stop = first + min(num_tokens, num_rows - first)
    matrix = select_batch_entry(call, batch, OPERATION).lazy[head, first:stop]
    weights = as_numpy(matrix.to_dense())[:, :frames]
    if not np.isfinite(weights).all():
        raise ArgumentError(
            OPERATION,
            received=f"NaN in the weights of head {head} of {call.name}",
            expected="finite weights",
            hint="recording.diagnose() finds where it comes from.",
        )
    return weights
