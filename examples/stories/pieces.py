"""The word pieces of the story model: a list of strings, and the longest one that fits at each place of a text."""

from __future__ import annotations

import re
from collections import Counter

WORD = re.compile(r" ?[A-Za-z]+| ?[^A-Za-z\s]+|\s")  # a word or signs, with the space before it
LONGEST_PIECE = 4


def build_vocabulary(text: str, size: int) -> list[str]:
    """Choose the pieces: all printable ASCII characters, the most frequent words, and parts of the other words.

    Args:
        text: The training text, ASCII.
        size: Number of pieces.

    Returns:
        The pieces, sorted; the first is the newline, which begins a text.
    """
    characters = ["\n", *map(chr, range(32, 127))]
    counts = Counter(WORD.findall(_mark_lines(text)))
    words = [word for word, _ in counts.most_common() if len(word.strip()) > 1]
    parts: Counter[str] = Counter()
    num_words = (size - len(characters)) * 5 // 6
    for word in words[num_words:]:
        for start in range(len(word)):
            for length in range(2, LONGEST_PIECE + 1):
                part = word[start : start + length]
                if len(part) == length and part.strip():
                    parts[part] += counts[word] * (length - 1)
    chosen = dict.fromkeys([*characters, *words[:num_words]])
    for part, _ in parts.most_common():
        if len(chosen) == size:
            break
        chosen.setdefault(part)
    return ["\n", *sorted(set(chosen) - {"\n"})]


def _mark_lines(text: str) -> str:
    """Put a space at the beginning of each line, so that its first word is the same piece as elsewhere."""
    return re.sub(r"^(?=[^\n ])", " ", text, flags=re.MULTILINE)


def encode(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Split a text into the longest pieces from left to right.

    Args:
        text: The text; characters that are not ASCII become "?".
        vocabulary: Number of each piece.

    Returns:
        The numbers of the pieces; a newline comes first.
    """
    text = "\n" + _mark_lines(text.encode("ascii", "replace").decode())
    longest, at, tokens = max(map(len, vocabulary)), 0, []
    while at < len(text):
        length = next(n for n in range(min(longest, len(text) - at), 0, -1) if text[at : at + n] in vocabulary)
        tokens.append(vocabulary[text[at : at + length]])
        at += length
    return tokens
