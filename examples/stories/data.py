"""The training text of the story model: stories in the words of small children, one paragraph per line."""

from __future__ import annotations

import hashlib
from pathlib import Path

from examples.induction.data import TextSplit

# Name and SHA-256 of each excerpt of the TinyStories dataset; README.md says where they are.
SOURCES = {
    "stories-a.txt": "5a19b936d7b53bbdac1eea03230b00161dceca24ae272f5bd8e9dbbc2a883418",
    "stories-b.txt": "c56cfd24fb1c542b141a396184b822a4db3672abdb4c49c6aa843171c5e822a5",
    "stories-c.txt": "5fc1fb0113df62b567fb271806cd645ce8d75f59c58ca0b764c03d3b6ff34ca6",
}
HELD_OUT_BYTES = 150_000  # the end of the last file, which is an excerpt of the dataset's validation set
# Quotation marks and dashes, some of them as UTF-8 that was read as Windows-1252.
REPLACED = {"â€œ": '"', "â€\x9d": '"', "â€™": "'", "â€˜": "'", "â€“": "-", "â€”": "-", "â€": '"'}
REPLACED |= {"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-"}


def read_stories(folder: Path) -> TextSplit:
    """Read the excerpts, check their hashes, and clean them.

    Args:
        folder: Folder with the files of `SOURCES`.

    Returns:
        The training text and the held-out text, both ASCII with one paragraph per line.

    Raises:
        ValueError: If a file is not the one that the stored model was trained on.
    """
    texts = []
    for name, expected in SOURCES.items():
        content = (folder / name).read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise ValueError(
                f"{folder / name} has the SHA-256 {found}, not {expected}. README.md says where it is."
            )
        texts.append(clean(content.decode()))
    last = texts.pop()
    cut = last.index("\n", len(last) - HELD_OUT_BYTES) + 1
    return TextSplit("\n".join([*texts, last[:cut]]).encode(), last[cut:].encode())


def clean(text: str) -> str:
    """Return the paragraphs of a text, one per line, in ASCII and without markers between stories.

    >>> clean("<|endoftext|>\\nâ€œHello,â€ said “Max”.\\n\\n  He smiled. \\n")
    '"Hello," said "Max".\\nHe smiled.\\n'

    Args:
        text: Text of the dataset.

    Returns:
        The cleaned text.
    """
    for old, new in REPLACED.items():
        text = text.replace(old, new)
    text = text.encode("ascii", "ignore").decode()
    lines = (" ".join(line.split()) for line in text.replace("<|endoftext|>", "\n").split("\n"))
    return "".join(f"{line}\n" for line in lines if line)
