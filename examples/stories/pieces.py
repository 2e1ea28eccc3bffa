"""The word pieces of the story model; `TinyGPT.encode` splits a text into the longest ones that fit."""

from __future__ import annotations

import re
from collections import Counter

from regard.learn.tiny_gpt import mark_lines

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
    counts = Counter(WORD.findall(mark_lines(text)))
    words = [word for word, _ in counts.most_common() if len(word) > 1]
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
