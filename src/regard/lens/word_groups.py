"""Group the tokens of a transcript into words, by the text that each token adds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

    Args:
        ids: The tokens of a transcript.
        tokenizer: A tokenizer of transformers.
        spaces: Whether the language is written with spaces; if not, every character is a word. By default it is, unless
            `ids` has the language token of one that is not.

    Returns:
        The words in order.
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
