"""Training data: random sequences with a repeated block, and English text that ships with Python."""

from __future__ import annotations

import ast
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class RepeatBatch(NamedTuple):
    """Sequences with a repeated block, all tensors (batch, length).

    `first` and `second` are True on the two copies of the block. For each query inside the second copy, `source` is
    the position of the token that came next in the first copy, which is where an induction head attends; elsewhere it
    is −1.
    """

    tokens: Tensor
    first: Tensor
    second: Tensor
    source: Tensor


def draw_repeats(
    batch: int,
    seed: int | torch.Generator,
    *,
    length: int = 64,
    vocabulary: int = 128,
    block: tuple[int, int] = (12, 32),
) -> RepeatBatch:
    """Draw random tokens with a random block of them repeated.

    The length of the block and the positions of its copies differ between sequences, so neither a fixed distance nor a
    position gives the repeat away.

    Args:
        batch: Number of sequences.
        seed: A seed, or a generator to draw from.
        length: Number of tokens in a sequence.
        vocabulary: Number of different tokens.
        block: Shortest and longest length of the block.

    Returns:
        The tokens, and where the copies are.
    """
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed

    def draw_up_to(maximum: Tensor) -> Tensor:
        """Draw a whole number from 0 to `maximum` for each sequence, (batch, 1)."""
        return (torch.rand(batch, 1, generator=generator) * (maximum + 1)).long()

    size = block[0] + draw_up_to(torch.tensor(block[1] - block[0]))
    start = draw_up_to(length - 2 * size)
    repeat = start + size + draw_up_to(length - start - 2 * size)
    position = torch.arange(length)
    first, second = ((position >= begin) & (position < begin + size) for begin in (start, repeat))
    source = torch.where(second, position - repeat + start, position)
    tokens = torch.randint(vocabulary, (batch, length), generator=generator).gather(1, source)
    continues = second & second.roll(-1, 1) & (position < length - 1)
    return RepeatBatch(tokens, first, second, torch.where(continues, source + 1, -1))


def encode(text: str) -> Tensor:
    """Encode a text as bytes.

    Args:
        text: The text.

    Returns:
        A batch of one sequence (1, n).
    """
    return torch.tensor([list(text.encode())])


def decode(tokens: Tensor) -> str:
    """Decode bytes to text; invalid UTF-8 shows as �.

    Args:
        tokens: Bytes (n,) or (1, n).

    Returns:
        The text.
    """
    return bytes(tokens.flatten().tolist()).decode(errors="replace")


class TextSplit(NamedTuple):
    """Training text and held-out text as bytes; no paragraph is in both, or twice in one."""

    train: bytes
    held_out: bytes


def build_text() -> TextSplit:
    """Build the text from the topics of `help()` and the docstrings of the standard library.

    Both are part of Python, © Python Software Foundation, under the PSF License Version 2. About every twentieth
    document (a topic, or the docstrings of a module) is held out, chosen by its name.

    Returns:
        The training text and the held-out text.
    """
    documents = _read_topics() | _read_docstrings()
    held_out = {name for name in documents if zlib.crc32(name.encode()) % 20 == 0}
    seen: set[str] = set()
    parts = []
    for names in (sorted(documents.keys() - held_out), sorted(held_out)):
        paragraphs = []
        for name in names:
            for paragraph in documents[name].split("\n\n"):
                if paragraph.strip() not in seen:
                    seen.add(paragraph.strip())
                    paragraphs.append(paragraph.rstrip())
        parts.append("\n\n".join(paragraphs).encode())
    return TextSplit(*parts)


def _read_topics() -> dict[str, str]:
    """Read the pages that `help("…")` shows, by name."""
    from pydoc_data.topics import topics

    return {f"help {name}": page for name, page in topics.items()}


def _read_docstrings() -> dict[str, str]:
    """Read the docstrings of each module of the standard library, by path; without tests and very short docstrings."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data"}
    documents = {}
    for path in sorted(root.rglob("*.py")):
        if skipped & set(path.relative_to(root).parts):
            continue
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds)]
        texts = [ast.get_docstring(node) or "" for node in nodes]
        documents[path.relative_to(root).as_posix()] = "\n\n".join(text for text in texts if len(text) > 120)
    return {name: page for name, page in documents.items() if page}
