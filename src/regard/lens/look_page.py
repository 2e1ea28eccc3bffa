"""`regard.look`: run a model on a text, an image or audio, and return the page of its heads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.lens.recording import Recording
from regard.lens.watch import watch
from regard.models.loaded_model import LoadedModel, call_model, model_info, name_tokens
from regard.models.loading import DEMO_MODEL, DEMO_TEXT, load
from regard.models.model_inputs import (
    GeneratedText,
    ModelInputs,
    prepare_generation,
    prepare_inputs,
)
from regard.models.model_inputs import generate as generate_tokens
from regard.pages.html import Page, shorten_path

__all__ = ["look"]


@dataclass(frozen=True)
class LookRun:
    """A recorded run of a model on its inputs, and what it generated."""

    inputs: ModelInputs
    recording: Recording
    generated: GeneratedText | None = None

    @property
    def title(self) -> str:
        """The model and what it ran on."""
        return f"{shorten_path(self.inputs.loaded.name)} on {self.inputs.description}"

    @property
    def tokens(self) -> list[str] | None:
        """The tokens of the decoder, or of the only sequence; None without a text."""
        tokens = self.inputs.decoder_tokens if self.generated is None else self.generated.tokens
        return list(tokens) or None

    @property
    def encoder_tokens(self) -> list[str] | None:
        """The tokens or the times of the encoder's frames; None without an encoder beside the decoder."""
        if not self.inputs.is_encoder_decoder:
            return None
        if self.inputs.tokens:
            return list(self.inputs.tokens)
        lengths = [
            self.recording.calls(name)[0].shape[-1] for name in self.recording if "decoder" not in name
        ]
        seconds = self.inputs.seconds
        if seconds is None or not lengths:
            return None
        return [f"{frame * seconds / lengths[-1]:.2f} s" for frame in range(lengths[-1])]

    def build_page(self, title: str | None = None) -> Page:
        """Build the page with every head."""
        named: dict[str, Any] = {"tokens": self.tokens}
        if self.inputs.is_encoder_decoder:
            named = {"tokens": self.encoder_tokens, "query_tokens": self.tokens}
        return self.recording.page(**named, image=self.inputs.image, title=title or self.title)


def run_inputs(
    inputs: ModelInputs, num_generated: int | None, advance: Callable[[], None] = lambda: None
) -> GeneratedText | None:
    """Run a model on its inputs, and let it generate; `advance` is called after each step."""
    if num_generated is not None:
        return generate_tokens(inputs, num_generated, advance)
    if inputs.text is not None and not inputs.is_encoder_decoder:
        for _ in inputs.loaded.forward_chunks(inputs.text):
            advance()
    else:
        inputs.forward()
    return None


def look(
    model: str | Path | LoadedModel | nn.Module = DEMO_MODEL,
    text: str | None = None,
    *,
    inputs: Any = None,
    image: Any = None,
    audio: str | Path | None = None,
    generate: int | None = None,
    layers: str | Sequence[str] | None = None,
    max_tokens: int | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
    title: str | None = None,
) -> Page:
    """Run a model, record it and build a page with every head, as the command `regard look` does.

    Without arguments, it shows a small trained model that comes with regard, on a sentence. To look at one run several
    times, record it with `regard.watch` and call `recording.page`.

    Args:
        model: A model, or a name for `regard.models.load`: a folder, a name on the Hub or `module:function`. The
            default comes with regard.
        text: A text to run the model on. With `audio`, the transcript of the audio.
        inputs: Inputs of the model instead of a text: a tensor, or a mapping with keyword arguments, such as the output
            of a tokenizer.
        image: An image to run the model on, as in `Recording.page`.
        audio: A WAV file to run the model on.
        generate: Generate up to this many tokens, with greedy decoding. Cannot be combined with `inputs`.
        layers: Record only these modules: names or patterns with `*`, including their submodules. Default: all.
        max_tokens: Truncate the text to this many tokens. Cannot be combined with `inputs`.
        dtype: Dtype of the weights of a loaded model, as in `regard.models.load`.
        trust_remote_code: Run code that comes with a loaded model.
        tokenizer: Tokenizer or processor of a `torch.nn.Module`.
        title: Title of the page. Default: the model and what it ran on.

    Returns:
        The page: `page.save(path)` writes it, and a notebook shows it.

    Raises:
        ArgumentError: If there is no input for the model, or the model cannot be loaded or run.
        ArgumentTypeError: If `model`, `text` or `inputs` has the wrong type, or the model does not accept the
            arguments.
        NotCapturedError: If no attention of the model can be captured.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> regard.look(layer, inputs=torch.ones(1, 3, 8))
    <page "TransformerEncoderLayer", ... kB: save(path) writes it>
    """
    if text is not None and not isinstance(text, str):
        raise ArgumentTypeError(
            "look",
            received=f"text as {describe_argument(text)}",
            expected="a string",
            hint="Pass tensors and mappings as inputs=: regard.look(model, inputs=inputs).",
        )
    has_media = text is not None or image is not None or audio is not None
    if isinstance(model, str) and model == DEMO_MODEL and inputs is None and not has_media:
        text, has_media = DEMO_TEXT, True
    if (inputs is not None) == has_media:
        raise ArgumentError(
            "look",
            received="no text, image, audio or inputs"
            if inputs is None
            else "inputs together with a text, an image or audio",
            expected="a text, image= or audio=; or inputs=",
            hint='For a text: regard.look(model, "The cat sat on the mat").',
        )
    if inputs is not None and (generate is not None or max_tokens is not None):
        raise ArgumentError(
            "look",
            received=f"inputs with {'max_tokens' if generate is None else 'generate'}",
            expected="a text, image= or audio=, or inputs= alone, which run as they are",
            hint="Truncate the inputs themselves, or watch the model generate: "
            "with regard.watch(model) as recording: model.generate(**inputs).",
        )
    if text is not None and audio is not None and generate is not None:
        raise ArgumentError(
            "look",
            received="a transcript of the audio and generate",
            expected="one of them",
            hint="Omit text to let the model transcribe, or generate to see how it reads this transcript.",
        )
    loaded = _load(model, tokenizer, dtype, trust_remote_code)
    if inputs is not None:
        return _look_at_inputs(loaded, inputs, layers, title)
    prepared = prepare_inputs(loaded, text, image, None if audio is None else Path(audio), max_tokens)
    if generate is not None:
        prepare_generation(prepared, generate)
    notes = [*prepared.loaded.notes, *prepared.notes]
    encoded = prepared.text
    if encoded is not None and len(encoded) < encoded.full_length and len(encoded) != max_tokens:
        notes.append(
            f"The text has {encoded.full_length:,} tokens, and the model reads the first {len(encoded):,}."
        )
    for note in notes:
        warnings.warn(note, stacklevel=2)
    prepared = _move_inputs(prepared)
    with watch(prepared.loaded.model, layers=layers) as recording:
        generated = run_inputs(prepared, generate)
    return LookRun(prepared, recording, generated).build_page(title)


def _move_inputs(inputs: ModelInputs) -> ModelInputs:
    """Return the inputs on the device of the model."""
    weight = next(inputs.loaded.model.parameters(), None)
    if weight is None:
        return inputs

    def move(value: Any) -> Any:
        return value.to(weight.device) if isinstance(value, torch.Tensor) else value

    return replace(
        inputs,
        arguments={name: move(value) for name, value in inputs.arguments.items()},
        decoder_ids=move(inputs.decoder_ids),
        text=None if inputs.text is None else replace(inputs.text, ids=move(inputs.text.ids)),
    )


def _load(model: Any, tokenizer: Any, dtype: str | None, trust_remote_code: bool) -> LoadedModel:
    """Return a model with its tokenizer, loaded by name or as given."""
    if isinstance(model, str | Path):
        return load(str(model), trust_remote_code=trust_remote_code, dtype=dtype, part="whole")
    if isinstance(model, LoadedModel):
        return model
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            "look",
            received=f"model as {describe_argument(model)}",
            expected="a name, a folder, or a torch.nn.Module",
            hint="See regard.models.load for the accepted names.",
        )
    return LoadedModel(type(model).__name__, model, tokenizer, info=model_info(model))


def _look_at_inputs(
    loaded: LoadedModel, inputs: Any, layers: str | Sequence[str] | None, title: str | None
) -> Page:
    """Build the page of a run on given inputs; a tokenizer names the tokens of their ids."""
    if not isinstance(inputs, torch.Tensor | Mapping):
        raise ArgumentTypeError(
            "look",
            received=f"inputs as {describe_argument(inputs)}",
            expected="a tensor, or a mapping with the keyword arguments of the model",
            hint='For token ids: inputs=torch.tensor([ids]). With a tokenizer: tokenizer(text, return_tensors="pt").',
        )
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), {})
    with torch.no_grad(), watch(loaded.model, layers=layers) as recording:
        call_model(loaded.model, "look", args, kwargs)

    def name_ids(name: str) -> list[list[str]] | None:
        ids = inputs.get(name) if isinstance(inputs, Mapping) else inputs
        has_tokens = isinstance(ids, torch.Tensor) and not ids.is_floating_point() and ids.ndim in (1, 2)
        if loaded.tokenizer is None or not has_tokens:
            return None
        return [name_tokens(loaded.text_tokenizer, row) for row in torch.atleast_2d(ids).tolist()]

    two = isinstance(inputs, Mapping) and "decoder_input_ids" in inputs
    query_tokens = name_ids("decoder_input_ids") if two else None
    return recording.page(name_ids("input_ids"), query_tokens=query_tokens, title=title or loaded.name)
