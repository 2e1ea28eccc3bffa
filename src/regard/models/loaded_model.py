"""`LoadedModel`: a model with its tokenizer, which encodes texts and runs the model on them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from regard.errors import ArgumentError
from regard.models.tokenization import check_ids, tokenize

CHUNK_SIZE = 2048  # tokens of a chunk
CHUNK_ABOVE = 8192  # longer texts run in chunks


@dataclass(frozen=True)
class EncodedText:
    """A text as a model reads it.

    Args:
        ids: Token ids, (1, n).
        tokens: The tokens as strings, n of them.
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
        name: The name it was loaded by.
        model: A `torch.nn.Module`.
        tokenizer: A transformers tokenizer or processor, an object with `encode`, or a function that maps text to ids.
            Without one, `encode` passes the bytes of a text to a model with at most 256 tokens.
        notes: Remarks that matter for reading results, such as randomly initialised weights.
        info: "class", "parameters" and "dtype" of the model, and "stored_dtype" if its configuration names one.
        source: The folder or the name on the Hub that transformers loaded it from; "" if it did not.
        source_options: Arguments of `from_pretrained` with which further files are loaded from there.
    """

    name: str
    model: Any
    tokenizer: Any = None
    notes: tuple[str, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    source_options: dict[str, Any] = field(default_factory=dict, repr=False)

    def encode(self, text: str, max_tokens: int | None = None) -> EncodedText:
        """Tokenize a text and truncate it to the positions of the model.

        Args:
            text: The text.
            max_tokens: Truncate to this number of tokens; None for no limit except the model's.

        Returns:
            The ids and the tokens.

        Raises:
            ArgumentError: If the text has no tokens, `max_tokens` is below 1, or the model does not know an id.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ArgumentError(
                "encode",
                received=f"max_tokens={max_tokens}",
                expected="at least 1",
                hint="Omit max_tokens to encode the whole text.",
            )
        limit = min(max_tokens or sys.maxsize, self.max_positions)
        ids, tokens, full_length = tokenize(self.name, self.text_tokenizer, self._vocab_size, text, limit)
        if not tokens:
            raise ArgumentError(
                "encode",
                received="a text without tokens",
                expected="at least one token to run the model on",
                hint="Pass a text that is not empty.",
            )
        return EncodedText(check_ids(ids, self._vocab_size), tokens, full_length)

    def forward(self, text: EncodedText) -> Any:
        """Run the model on a text, without gradients.

        Logits are computed for the last token only, if the model supports it: for every token they would need one
        number per entry of the vocabulary. A text of more than 8,192 tokens runs in chunks, see `forward_chunks`.

        Args:
            text: What `encode` returned.

        Returns:
            The output of the model; for a text in chunks, that of the last chunk.
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
            text: What `encode` returned.

        Yields:
            The output of each chunk.
        """
        import torch

        parameters = inspect.signature(self.model.forward).parameters
        wanted = {"use_cache": False, "logits_to_keep": 1}
        options = {name: value for name, value in wanted.items() if name in parameters}
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
            text: What `encode` returned.
        """
        generates = getattr(self.model, "can_generate", lambda: False)()
        has_cache = "past_key_values" in inspect.signature(self.model.forward).parameters
        return -(-len(text) // CHUNK_SIZE) if generates and has_cache and len(text) > CHUNK_ABOVE else 1

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer, or that of the processor in its place."""
        return getattr(self.tokenizer, "tokenizer", self.tokenizer)

    @property
    def max_positions(self) -> int:
        """The number of positions by the configuration of model and tokenizer; `sys.maxsize` if none is given."""
        config = getattr(self.model, "config", None)
        config = getattr(config, "text_config", None) or config  # of a model that reads images, too
        names = ("max_position_embeddings", "n_positions", "max_target_positions")
        limits = [getattr(config, name, None) for name in names]
        limits.append(getattr(self.text_tokenizer, "model_max_length", None))
        return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=sys.maxsize)

    @property
    def _vocab_size(self) -> int | None:
        """The number of rows of the model's token embedding; None without one."""
        embedding = find_token_embedding(self.model)
        return None if embedding is None else embedding.num_embeddings


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
