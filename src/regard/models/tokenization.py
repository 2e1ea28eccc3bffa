"""Turn a text into ids and printable tokens, with any tokenizer or as bytes."""

from __future__ import annotations

import functools
from typing import Any

from regard.errors import ArgumentError
from regard.models.optional_imports import import_optional, silence_transformers


def tokenize(
    model_name: str, tokenizer: Any, vocab_size: int | None, text: str, limit: int
) -> tuple[list[int], list[str], int]:
    """Tokenize a text.

    Args:
        model_name: Name of the model, for error messages.
        tokenizer: A transformers tokenizer, an object with `encode`, a function that maps text to ids, or None for
            bytes.
        vocab_size: Number of tokens that the model knows, or None if unknown.
        text: The text.
        limit: Truncate to this number of tokens.

    Returns:
        The ids, the tokens as strings, and the number of tokens before truncation.

    Raises:
        ArgumentError: If there is no tokenizer, and the model knows more than 256 tokens.
    """
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return _tokenize_with_transformers(tokenizer, text, limit)
    if tokenizer is None:
        if vocab_size is None or vocab_size > 256:
            raise ArgumentError(
                "encode",
                received=f"a text for {model_name}, which has no tokenizer and "
                + ("no embedding" if vocab_size is None else f"a vocabulary of {vocab_size:,} tokens"),
                expected="a tokenizer, or a model with at most 256 tokens, which reads bytes",
                hint="Put the tokenizer files in the folder, or return (model, tokenizer) from module:function.",
            )
        ids = list(text.encode(errors="surrogateescape"))
    else:
        ids = _flatten_ids(tokenizer.encode(text) if hasattr(tokenizer, "encode") else tokenizer(text))
    return ids[:limit], name_tokens(tokenizer, ids[:limit]), len(ids)


def name_tokens(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return printable tokens.

    Args:
        tokenizer: A transformers tokenizer, an object with `decode`, a function, or None for bytes.
        ids: The ids.

    Returns:
        One text for each id; the id itself if nothing decodes it.
    """
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        found = tokenizer.convert_ids_to_tokens(ids)  # None for an id beyond the vocabulary
        tokens = [str(i if token is None else token) for i, token in zip(ids, found, strict=True)]
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        return (
            [decode_byte_level(token) for token in tokens]
            if type(decoder).__name__ == "ByteLevel"
            else tokens
        )
    if tokenizer is None:
        return [_format_byte(token) if token < 256 else str(token) for token in ids]
    decode = getattr(tokenizer, "decode", None)
    return [str(token) if decode is None else str(decode([token])) for token in ids]


def check_ids(ids: list[int], vocab_size: int | None) -> Any:
    """Return the ids as a tensor (1, n).

    Raises:
        ArgumentError: If an id is not below `vocab_size`.
    """
    import torch

    if vocab_size is not None and max(ids) >= vocab_size:
        raise ArgumentError(
            "encode",
            received=f"a token with the id {max(ids):,}",
            expected=f"ids below {vocab_size:,}, the vocabulary of the model",
            hint="Use the tokenizer the model was trained with. A model that reads bytes below 128 needs ASCII text.",
        )
    return torch.tensor([ids])


def _tokenize_with_transformers(tokenizer: Any, text: str, limit: int) -> tuple[list[int], list[str], int]:
    with silence_transformers(import_optional("transformers", "hf")):
        ids = tokenizer(text, truncation=False)["input_ids"]
        full_length = len(ids)
        if full_length > limit:
            # Tokenize again, so that the tokenizer appends its end-of-text tokens after truncation.
            ids = tokenizer(text, truncation=True, max_length=limit)["input_ids"]
    return ids, name_tokens(tokenizer, ids), full_length


def _flatten_ids(ids: Any) -> list[int]:
    """Return the ids of one text as a list, whether they came as a list, an array, or a batch of one."""
    ids = getattr(ids, "ids", ids)
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    while len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    return [int(token) for token in ids]


def _format_byte(byte: int) -> str:
    r"""Format a byte as a token: its ASCII character, or an escape if it is not printable.

    >>> [_format_byte(byte) for byte in "a\né".encode()]
    ['a', '\\n', '\\xc3', '\\xa9']
    """
    return chr(byte) if 32 <= byte < 127 else repr(bytes([byte]))[2:-1]


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each letter that byte-level tokenizers use.

    Printable bytes stand for themselves; the others follow from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def decode_byte_level(token: str) -> str:
    """Decode the letters of a byte-level token to text; the mark Ġ of a leading space stays.

    >>> [decode_byte_level(token) for token in ("Ġcat", "ĠÃ©tÃ©", "Ã")]
    ['Ġcat', 'Ġété', 'Ã']
    """
    mark = token[:1] if token[:1] in ("Ġ", "Ċ", "ĉ") else ""
    try:
        return mark + bytes(_byte_level_alphabet()[letter] for letter in token[len(mark) :]).decode()
    except (KeyError, UnicodeDecodeError):  # a special token, or part of a character
        return token
