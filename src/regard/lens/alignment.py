"""`Alignment`: when each token of a transcript was spoken, found by dynamic time warping over cross-attention."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.capture.call import Call, LayerCall
from regard.capture.module_names import find_place
from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError, describe_argument
from regard.lens.find import as_numpy, require_weights, select_batch_entry
from regard.lens.table import Table
from regard.lens.token_rows import TokenRows, as_token_lists
from regard.types import Array, IntArray


def standardise_columns(weights: Array) -> Array:
    """Subtract the mean of each column and divide by its standard deviation; a constant column becomes 0.

    A frame that every token attends to, such as a sink, then says nothing about where a token is.

    Args:
        weights: (tokens, frames).

    Returns:
        (tokens, frames), float64.

    >>> standardise_columns(np.array([[0.5, 0.25], [0.5, 0.75]])).tolist()
    [[0.0, -1.0], [0.0, 1.0]]
    """
    if not len(weights):
        return weights
    deviations, spread = weights - weights.mean(0), weights.std(0)
    return deviations / np.where(spread > 0, spread, 1.0)


def filter_median(rows: Array, width: int) -> Array:
    """Replace each number by the median of `width` numbers around it; rows are reflected at both ends.

    Args:
        rows: (…, n).
        width: An odd number. Rows of at most `width // 2` numbers stay as they are.

    Returns:
        (…, n).

    >>> filter_median(np.array([0.0, 9.0, 1.0, 2.0, 2.0]), 3).tolist()
    [9.0, 1.0, 2.0, 2.0, 2.0]
    """
    reach, length = width // 2, rows.shape[-1]
    if length <= reach:
        return rows
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(reach, reach)], mode="reflect")
    shifted = [padded[..., i : i + length] for i in range(width)]
    # Sorting whole arrays against each other is ten times faster than sorting each short window.
    for last in range(width - 1, reach - 1, -1):
        for i in range(last):
            low, high = np.minimum(shifted[i], shifted[i + 1]), np.maximum(shifted[i], shifted[i + 1])
            shifted[i], shifted[i + 1] = low, high
    return shifted[reach]


def find_cheapest_path(costs: Array) -> tuple[IntArray, IntArray]:
    """Find the path from the first cell to the last whose costs have the smallest sum.

    A step goes to the next row, to the next column, or to both. Of equal sums, the path stays in its row, then goes to
    both.

    Args:
        costs: (rows, columns), finite, at least one of each.

    >>> rows, columns = find_cheapest_path(np.array([[0, 0, 9], [9, 9, 0]]))
    >>> rows.tolist(), columns.tolist()
    ([0, 0, 1], [0, 1, 2])
    """
    num_rows, num_columns = costs.shape
    flat = np.ascontiguousarray(costs, np.float64).reshape(-1)
    choices = np.empty(flat.shape, np.int8)  # 0: from both, 1: from the row before, 2: from the column before
    # Cells on one antidiagonal do not depend on each other. Sums are indexed by row + 1; index 0 is outside.
    before_last, last, current = (np.full(num_rows + 1, np.inf) for _ in range(3))
    before_last[0] = 0.0
    for diagonal in range(num_rows + num_columns - 1):
        top, bottom = max(0, diagonal - num_columns + 1), min(num_rows - 1, diagonal)
        first, final = (row * (num_columns - 1) + diagonal for row in (top, bottom))
        cells = slice(first, final + 1, max(1, num_columns - 1))
        from_both, from_row = before_last[top : bottom + 1], last[top : bottom + 1]
        from_column = last[top + 1 : bottom + 2]
        cheaper = np.minimum(from_both, from_row)
        stays = from_column <= cheaper
        current[top + 1 : bottom + 2] = np.where(stays, from_column, cheaper) + flat[cells]
        choices[cells] = np.where(stays, 2, from_row < from_both)
        before_last[0] = np.inf
        before_last, last, current = last, current, before_last
    return _follow_back(choices.reshape(num_rows, num_columns))


def _follow_back(choices: Array) -> tuple[IntArray, IntArray]:
    """Follow the choices from the last cell to the first."""
    row, column = choices.shape[0] - 1, choices.shape[1] - 1
    cells = [(row, column)]
    while row or column:
        choice = choices[row, column]
        row, column = row - (choice != 2), column - (choice != 1)
        cells.append((row, column))
    rows, columns = np.array(cells[::-1], np.int64).T
    return rows, columns


# Marks, or parts of these texts, that attach to the word after them, attach to the word before them, and start a word:
# the rule of Whisper.
OPENING = "\"'“¡¿([{-"
CLOSING = "\"'.。,，!！?？:：”)]}、"
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
# Language tokens of Whisper for languages that are written without spaces.
UNSPACED = frozenset(f"<|{code}|>" for code in ("zh", "ja", "th", "lo", "my", "yue"))
TIMESTAMP = re.compile(r"<\|\d+\.\d+\|>")
INCOMPLETE = "\ufffd"  # what a tokenizer decodes part of a character to


@dataclass
class Word:
    """A word and its tokens.

    Args:
        text: The text, with the space before it.
        start: Position of its first token.
        stop: Position after its last token.
    """

    text: str
    start: int
    stop: int


def group_words(ids: Sequence[int], tokenizer: Any, spaces: bool | None = None) -> list[Word]:
    """Group tokens into words; special tokens and timestamps belong to none.

    A word starts at a token that adds a space and at a punctuation mark. Then opening marks are attached to the word
    after them, and closing marks to the word before.
    """
    names = tokenizer.convert_ids_to_tokens(list(ids))
    special = set(tokenizer.all_special_ids)
    if spaces is None:
        spaces = not UNSPACED.intersection(names)
    words: list[Word] = []
    start = 0
    is_text = [  # some vocabularies end before the timestamps
        bool(name) and token not in special and not TIMESTAMP.fullmatch(name)
        for token, name in zip(ids, names, strict=True)
    ]
    for stop in range(len(ids) + 1):
        if stop == len(ids) or not is_text[stop]:  # the end of a run of text
            pieces = _split_characters(ids[start:stop], tokenizer, start)
            words += _attach_punctuation(_join_pieces(pieces) if spaces else pieces)
            start = stop + 1
    return words


def _split_characters(ids: Sequence[int], tokenizer: Any, offset: int) -> list[Word]:
    """Split tokens into the shortest runs that decode to whole characters."""
    # The text up to each token, so that a tokenizer that strips the first space keeps the others.
    texts = [""] + [
        tokenizer.decode(list(ids[: i + 1]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for i in range(len(ids))
    ]
    pieces: list[Word] = []
    start = 0
    for stop in range(1, len(texts)):
        text = texts[stop][len(texts[start]) :]
        place = text.find(INCOMPLETE)
        # If the whole text has the mark in this place, the bytes are no character, and no later token completes it.
        is_whole = place < 0 or texts[-1][len(texts[start]) + place :].startswith(INCOMPLETE)
        if is_whole or stop == len(ids):
            pieces.append(Word(text, offset + start, offset + stop))
            start = stop
    return pieces


def _join_pieces(pieces: Sequence[Word]) -> list[Word]:
    """Join pieces into words, which start at a space and at a punctuation mark."""
    words: list[Word] = []
    for piece in pieces:
        if not words or piece.text.startswith(" ") or piece.text.strip() in PUNCTUATION:
            words.append(piece)
        else:
            words[-1].text += piece.text
            words[-1].stop = piece.stop
    return words


def _attach_punctuation(words: Sequence[Word]) -> list[Word]:
    """Attach opening marks to the word after them, then closing marks to the word before them."""
    opened: list[Word] = []
    for word in reversed(words):
        if opened and word.text.startswith(" ") and word.text.strip() in OPENING:
            opened[-1].text, opened[-1].start = word.text + opened[-1].text, word.start
        else:
            opened.append(word)
    attached: list[Word] = []
    for word in reversed(opened):
        if attached and word.text in CLOSING and not attached[-1].text.endswith(" "):
            attached[-1].text += word.text
            attached[-1].stop = word.stop
        else:
            attached.append(word)
    return attached


OPERATION = "recording.align"


@dataclass(frozen=True)
class Alignment:
    """The times of the tokens in a transcript, returned by `Recording.align`.

    Args:
        ids: The n generated tokens.
        times: (n,), the end of each token in seconds, which is the start of the next token; transformers calls them
            `token_timestamps`. The last token was not fed back to the model, so it ends at the same time as the token
            before it.
        matrix: (n or n − 1, frames), the mean of the standardised weights over the heads, in which the path was found.
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
            tokenizer: A transformers tokenizer, to show texts instead of ids.

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
        the word after them, closing marks to the word before. Tokens that each encode part of one character stay
        together. Special tokens and timestamps do not belong to a word. Whisper and the transformers pipeline group
        tokens in the same way.

        Args:
            tokenizer: A transformers tokenizer.
            spaces: Whether the language is written with spaces; if not, every character is a word. Default: True,
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
    ids: Any,
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
            hint="Whisper uses model.config.median_filter_width; 1 disables the filter.",
        )
    pairs = _parse_heads(heads)
    by_layer = _select_calls(layer_calls, sorted({layer for layer, _ in pairs}, key=str))
    ids = _select_entry(as_token_lists(ids, OPERATION), batch)
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
        hint="Whisper lists its heads in model.generation_config.alignment_heads. A layer can also be a module name.",
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
        number = find_place(name).number
        numbers.setdefault(position if number is None else number, []).append(name)
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
            "Omit it if the tokens were generated inside the with block.",
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
        hint="Each 30-second window, each retry and the language detection is a separate call: pass call=0, or -1 for "
        "the last.",
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
            hint="Pass the tokens without the prompt; the recording may lack the last one. If the prompt has a "
            "different length, pass prompt=.",
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
            hint="Call recording.diagnose() to find its origin.",
        )
    return weights
