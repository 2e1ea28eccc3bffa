"""Let a model continue its inputs, token by token and greedily."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from regard.errors import ArgumentError, RegardError
from regard.models.model_inputs import ModelInputs
from regard.models.optional_imports import first_line, import_optional, silence_transformers
from regard.models.tokenization import name_tokens


@dataclass(frozen=True)
class GeneratedText:
    """What a model generated.

    Args:
        ids: (1, n), the whole sequence of the decoder, from its first token on.
        num_given: Number of tokens at its start that were given.
        tokens: The whole sequence as texts.
        text: What was generated, without special tokens.
    """

    ids: Any
    num_given: int
    tokens: tuple[str, ...]
    text: str


def prepare_generation(inputs: ModelInputs, count: int, operation: str = "generate") -> None:
    """Check that a model can generate this many tokens, and let a multilingual Whisper detect the language.

    The language is set in the generation configuration of the model, so that `generate` runs the decoder once.

    Args:
        inputs: The model and its inputs.
        count: Number of tokens.
        operation: Name of the calling function, for error messages.

    Raises:
        ArgumentError: If it cannot generate at all, or has not as many positions.
    """
    loaded = inputs.loaded
    if not getattr(loaded.model, "can_generate", lambda: False)():
        raise ArgumentError(
            operation,
            received=f"{loaded.info.get('class', loaded.name)}, which does not generate text",
            expected="a model of transformers with generate()",
            hint="Run it on a text without generating.",
        )
    given = inputs.decoder_ids.shape[1] if inputs.is_encoder_decoder else len(inputs.tokens)
    if given + count > loaded.max_positions:
        raise ArgumentError(
            operation,
            received=f"{given:,} tokens and {count:,} to generate",
            expected=f"at most {loaded.max_positions:,} together, the positions of the model",
            hint="Generate fewer tokens, or shorten the text.",
        )
    settings: Any = getattr(loaded.model, "generation_config", None)
    languages = getattr(settings, "lang_to_id", None)
    if _is_whisper(inputs) and languages and getattr(settings, "language", None) is None:
        found = int(loaded.model.detect_language(inputs.arguments["input_features"])[0])
        settings.language = next(name for name, token in languages.items() if token == found)


def generate(
    inputs: ModelInputs,
    count: int,
    operation: str = "generate",
    on_token: Callable[[], None] = lambda: None,
) -> GeneratedText:
    """Generate up to `count` tokens; each is the most probable one.

    Args:
        inputs: The model and its inputs, after `prepare_generation`.
        count: Number of tokens. The model may end earlier.
        operation: Name of the calling function, for error messages.
        on_token: Called after each token.

    Returns:
        The whole sequence.

    Raises:
        ArgumentError: If the method of the model fails.
    """
    import torch

    model, tokenizer = inputs.loaded.model, inputs.loaded.text_tokenizer
    arguments = dict(inputs.arguments)
    if "input_ids" in arguments and "attention_mask" not in arguments:
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    counter = _TokenCounter(on_token)
    options: dict[str, Any] = {
        "max_new_tokens": count,
        "do_sample": False,
        "num_beams": 1,
        "streamer": counter,
    }
    if _is_whisper(inputs):  # one window of sound, and the prompt as part of the result
        options |= {"return_dict_in_generate": True, "force_unique_generate_call": True}
    with silence_transformers(import_optional("transformers", "hf")), torch.no_grad():
        try:
            output = model.generate(**arguments, **options)
        except RegardError:
            raise
        except Exception as error:  # a method of the model
            raise ArgumentError(
                operation,
                received=f"a model whose generate() failed ({type(error).__name__}: {first_line(error)})",
                expected="a model that generates from these inputs",
                hint="Check generation_config.json in its folder.",
            ) from error
    ids = getattr(output, "sequences", output)
    new = ids[0, counter.num_given :].tolist()
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        text = str(tokenizer.decode(new, skip_special_tokens=True))
    else:
        text = "".join(name_tokens(tokenizer, new))
    return GeneratedText(ids, counter.num_given, tuple(name_tokens(tokenizer, ids[0].tolist())), text)


class _TokenCounter:
    """A streamer of transformers, which is passed the tokens of the prompt first, and then each new one.

    Args:
        on_token: Called after each new token.
    """

    def __init__(self, on_token: Callable[[], None]) -> None:
        self.num_given, self._on_token = -1, on_token

    def put(self, ids: Any) -> None:
        """Count the tokens of the prompt, or report a new one."""
        if self.num_given < 0:
            self.num_given = int(ids.shape[-1])
        else:
            self._on_token()

    def end(self) -> None:
        """Do nothing."""


def _is_whisper(inputs: ModelInputs) -> bool:
    return hasattr(inputs.loaded.model, "detect_language") and "input_features" in inputs.arguments
