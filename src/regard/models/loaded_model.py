"""`LoadedModel`: a model with its tokenizer, which encodes texts and runs the model on them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.optional_imports import import_optional, silence_transformers

CHUNK_SIZE = 2048  # tokens of a chunk
CHUNK_ABOVE = 8192  # longer texts run in chunks


@dataclass(frozen=True)
class EncodedText:
    """A text as a model reads it.

    Args:
        ids: Token ids, (1, n).
        tokens: The n tokens as strings.
        full_length: Number of tokens before truncation; greater than n if the text was truncated.
    """

    ids: Any
    tokens: list[str]
    full_length: int

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode with its tokenizer.

    Args:
        name: The name under which it was loaded.
        model: A `torch.nn.Module`.
        tokenizer: A transformers tokenizer or processor, an object with `encode`, or a function that maps text to ids.
            Without one, `encode` passes the bytes of a text to a model whose vocabulary has at most 256 tokens.
        notes: Remarks that matter for reading results, such as randomly initialised weights.
        info: "class", "parameters" and "dtype" of the model, and "stored_dtype" if its configuration names one.
        source: The folder or Hub name from which transformers loaded the model; "" otherwise.
        source_options: Arguments of `from_pretrained` for loading further files from the source.
    """

    name: str
    model: Any = field(repr=False)
    tokenizer: Any = None
    notes: tuple[str, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    source_options: dict[str, Any] = field(default_factory=dict, repr=False)

    def encode(self, text: str, max_tokens: int | None = None) -> EncodedText:
        """Tokenize a text and truncate it to the maximum length of the model.

        Args:
            text: The text.
            max_tokens: Truncate to this number of tokens; None for the limit of the model only.

        Returns:
            The ids and the tokens.

        Raises:
            ArgumentError: If the text has no tokens, `max_tokens` is below 1, or an id is not in the vocabulary of the
                model.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ArgumentError(
                "encode",
                received=f"max_tokens={max_tokens}",
                expected="at least 1",
                hint="Omit max_tokens to encode the whole text.",
            )
        limit = min(max_tokens or sys.maxsize, self.max_positions)
        ids, full_length = self._tokenize(text, limit)
        if not ids:
            raise ArgumentError(
                "encode",
                received="a text without tokens",
                expected="at least one token to run the model on",
                hint="Pass a text that is not empty.",
            )
        vocab_size = self._vocab_size
        if vocab_size is not None and max(ids) >= vocab_size:
            raise ArgumentError(
                "encode",
                received=f"a token with the id {max(ids):,}",
                expected=f"ids below {vocab_size:,}, the vocabulary of the model",
                hint="Use the tokenizer the model was trained with. "
                "A model that reads bytes below 128 needs ASCII text.",
            )
        import torch

        return EncodedText(torch.tensor([ids]), name_tokens(self.text_tokenizer, ids), full_length)

    def _tokenize(self, text: str, limit: int) -> tuple[list[int], int]:
        """Return at most `limit` ids of a text, and the number of its tokens; without a tokenizer, its bytes."""
        tokenizer = self.text_tokenizer
        if hasattr(tokenizer, "convert_ids_to_tokens"):
            with silence_transformers(import_optional("transformers", "hf")):
                ids = tokenizer(text, truncation=False)["input_ids"]
                if len(ids) <= limit:
                    return ids, len(ids)
                # Tokenize again, so that the tokenizer appends its end-of-text tokens after truncation.
                return tokenizer(text, truncation=True, max_length=limit)["input_ids"], len(ids)
        vocab_size = self._vocab_size
        if tokenizer is None:
            if vocab_size is None or vocab_size > 256:
                raise ArgumentError(
                    "encode",
                    received=f"a text for {self.name}, which has no tokenizer and "
                    + ("no embedding" if vocab_size is None else f"a vocabulary of {vocab_size:,} tokens"),
                    expected="a tokenizer, or a model that reads bytes, with a vocabulary of at most 256 tokens",
                    hint="Put the tokenizer files in the folder, or return (model, tokenizer) from module:function.",
                )
            ids = list(text.encode(errors="surrogateescape"))
        else:
            ids = _flatten_ids(tokenizer.encode(text) if hasattr(tokenizer, "encode") else tokenizer(text))
        return ids[:limit], len(ids)

    def forward(self, text: EncodedText) -> Any:
        """Run the model on a text, without gradients.

        If the model supports it, logits are computed for the last token only, to save memory. A text of more than 8,192
        tokens runs in chunks; see `forward_chunks`.

        Args:
            text: The result of `encode`.

        Returns:
            The output of the model; for a text in chunks, the output of the last chunk.
        """
        output = None
        for output in self.forward_chunks(text):  # noqa: B007 - the last output is returned
            pass
        return output

    def forward_chunks(self, text: EncodedText) -> Iterator[Any]:
        """Run the model on a text chunk by chunk, through the model's own key-value cache.

        Masks and activations then need memory for 2,048 rows instead of all. Texts of up to 8,192 tokens, and models
        without `generate` or a cache, run in one chunk.

        Args:
            text: The result of `encode`.

        Yields:
            The output of each chunk.
        """
        import torch

        options = select_options(self.model)
        with torch.no_grad():
            if self.num_chunks(text) == 1:
                yield self.model(text.ids, **options)
                return
            cache = None
            for ids in text.ids.split(CHUNK_SIZE, 1):
                output = self.model(ids, **options | {"use_cache": True, "past_key_values": cache})
                cache = output.past_key_values
                yield output

    def num_chunks(self, text: EncodedText) -> int:
        """Return the number of chunks in which `forward` runs a text.

        Args:
            text: The result of `encode`.
        """
        generates = getattr(self.model, "can_generate", lambda: False)()
        has_cache = "past_key_values" in inspect.signature(self.model.forward).parameters
        return -(-len(text) // CHUNK_SIZE) if generates and has_cache and len(text) > CHUNK_ABOVE else 1

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer; if a processor was loaded instead, the tokenizer of the processor."""
        return getattr(self.tokenizer, "tokenizer", self.tokenizer)

    @property
    def max_positions(self) -> int:
        """The maximum number of tokens in the configuration of model and tokenizer; `sys.maxsize` if there is none."""
        limits = list_position_limits(getattr(self.model, "config", None))
        limits.append(getattr(self.text_tokenizer, "model_max_length", None))
        return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=sys.maxsize)

    @property
    def _vocab_size(self) -> int | None:
        """The number of rows of the model's token embedding; None without one."""
        embedding = find_token_embedding(self.model)
        return None if embedding is None else embedding.num_embeddings


def list_position_limits(config: Any) -> list[Any]:
    """List what a configuration states as the number of positions, None where it states none."""
    config = getattr(config, "text_config", None) or config  # of a model that reads images, too
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx")
    return [getattr(config, name, None) for name in names]


def find_token_embedding(model: Any) -> Any:
    """Return the `nn.Embedding` that looks up the tokens, or None if the model reads something else.

    It is what `get_input_embeddings` returns. A model without that method, or with one that is not implemented, uses
    its first `nn.Embedding`.
    """
    import torch

    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = next((part for part in model.modules() if isinstance(part, torch.nn.Embedding)), None)
    return embedding if isinstance(embedding, torch.nn.Embedding) else None


def select_options(model: Any) -> dict[str, Any]:
    """Return the arguments that spare work, of those that the model has: no cache, and logits of the last token."""
    parameters = inspect.signature(model.forward).parameters
    wanted = {"use_cache": False, "logits_to_keep": 1}
    return {name: value for name, value in wanted.items() if name in parameters}


def call_model(model: Any, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a model; raise an error that names the arguments if its `forward` does not have them."""
    try:
        return model(*args, **kwargs)
    except TypeError:
        signature = inspect.signature(model.forward)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as mismatch:
            raise ArgumentTypeError(
                operation,
                received=f"inputs that {type(model).__name__}.forward does not accept: {mismatch}",
                expected=f"its arguments: {', '.join(signature.parameters)}",
                hint="Pass a mapping from the names of arguments to their values.",
            ) from None
        raise


def model_info(model: Any, stored_dtype: Any = None) -> dict[str, Any]:
    """Return class, number of parameters and dtype of a model, and the dtype it is stored in if known."""
    weights = list(model.parameters())
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    info = {
        "class": type(model).__name__,
        "parameters": sum(weight.numel() for weight in weights),
        "dtype": ", ".join(dtypes),
    }
    if stored_dtype is not None:
        info["stored_dtype"] = str(stored_dtype).removeprefix("torch.")
    return info


def name_tokens(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return a printable token for each id, or the id itself if nothing decodes it; without a tokenizer, bytes."""
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
