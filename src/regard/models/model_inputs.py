"""`prepare_inputs`: turn a text, an image or audio into the arguments of a model; `generate` lets it continue them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from regard.errors import ArgumentError, RegardError
from regard.images.pixels import load_pixels, undo_normalisation
from regard.models.audio import read_wav, resample
from regard.models.loaded_model import (
    EncodedText,
    LoadedModel,
    find_token_embedding,
    name_tokens,
    select_options,
)
from regard.models.loading import find_text_part, select_part
from regard.models.optional_imports import first_line, import_optional, silence_transformers
from regard.types import Array

OPERATION = "look"  # the command that runs models on images and audio


Kind = Literal["image", "audio", "text and image", "text and audio"]

# Attribute of a processor that has the part, class of transformers that loads it, and what it needs in the folder.
_PARTS: dict[str, tuple[str, str, str]] = {
    "image": ("image_processor", "AutoImageProcessor", "preprocessor_config.json"),
    "audio": ("feature_extractor", "AutoFeatureExtractor", "preprocessor_config.json"),
    "text and image": ("", "AutoProcessor", "processor_config.json"),
    "text and audio": ("", "AutoProcessor", "processor_config.json"),
}


@dataclass(frozen=True)
class ModelInputs:
    """What a model is run on.

    Args:
        loaded: The model, or the part of it that reads the inputs.
        arguments: Arguments of its forward, without `decoder_input_ids`.
        tokens: The tokens of `input_ids`; empty without a text.
        text: The encoded text; None if a processor joined it with an image or audio.
        decoder_ids: (1, n), what the decoder of an encoder-decoder model reads; None for other models.
        image: (height, width, 3), the image as the model saw it.
        seconds: Seconds that the frames of the encoder stand for, padding included.
        notes: Remarks that matter for reading results, such as a change of the sampling rate.
        description: The inputs in a few words, such as "12 tokens".
    """

    loaded: LoadedModel
    arguments: dict[str, Any]
    tokens: tuple[str, ...] = ()
    text: EncodedText | None = None
    decoder_ids: Any = None
    image: Array | None = None
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    description: str = ""

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder, which read different sequences."""
        return self.decoder_ids is not None

    @property
    def decoder_tokens(self) -> tuple[str, ...]:
        """The tokens that the decoder reads, or the only sequence of the model."""
        if self.decoder_ids is None:
            return self.tokens
        return tuple(name_tokens(self.loaded.text_tokenizer, self.decoder_ids[0].tolist()))

    def forward(self) -> Any:
        """Run the model once, without gradients."""
        import torch

        options = select_options(self.loaded.model)
        if self.decoder_ids is not None:
            options["decoder_input_ids"] = self.decoder_ids
        try:
            with torch.no_grad():
                return self.loaded.model(**self.arguments, **options)
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, RegardError) or self.text is not None:
                raise
            raise ArgumentError(
                OPERATION,
                received=f"{self.description}, which {self.loaded.info['class']} rejected ({first_line(error)})",
                expected="inputs of the size that the model reads",
                hint="Check that the processor belongs to the model.",
            ) from error


def prepare_inputs(
    loaded: LoadedModel,
    text: str | None,
    image: Any,
    audio: Path | None,
    max_tokens: int | None = None,
) -> ModelInputs:
    """Turn a text, an image or a WAV file into the arguments of a model; with audio, the text is its transcript.

    Of a model with several parts, the one that reads the inputs is taken: CLIP's image encoder for an image alone. An
    encoder-decoder model is run as a whole; its decoder reads its start token, or with audio the transcript. `loaded`
    is the whole model: `load(name, part="whole")`.
    """
    if image is not None and audio is not None:
        raise ArgumentError(
            OPERATION, received="an image and audio", expected="at most one of them", hint="Omit one."
        )
    if audio is not None:
        return _prepare_audio(loaded, audio, text, max_tokens)
    if image is not None:
        return _prepare_image(loaded, image, text, max_tokens)
    assert text is not None
    part, note = find_text_part(loaded.model)
    is_text_to_text = _is_encoder_decoder(loaded) and part is not loaded.model.get_decoder()
    if not is_text_to_text:
        loaded = select_part(loaded, part, note)
    encoded = loaded.encode(text, max_tokens)
    return ModelInputs(
        loaded,
        {"input_ids": encoded.ids},
        tuple(encoded.tokens),
        encoded,
        _start_decoder(loaded) if is_text_to_text else None,
        description=_count_tokens(encoded),
    )


def _prepare_audio(loaded: LoadedModel, path: Path, text: str | None, max_tokens: int | None) -> ModelInputs:
    reads_text = _reads_beside_text(loaded, "audio_config")
    if not reads_text and _main_input(loaded) not in ("input_features", "input_values"):
        raise _unread(loaded, "audio")
    kind: Kind = "text and audio" if reads_text else "audio"
    processor = find_processor(loaded, kind)
    extractor = getattr(processor, "feature_extractor", processor)
    samples, rate = read_wav(path, OPERATION)
    duration, notes = len(samples) / rate, []
    if rate != extractor.sampling_rate:
        notes.append(
            f"The audio was resampled from {rate:,} to {extractor.sampling_rate:,} samples per second."
        )
        samples = resample(samples, rate, extractor.sampling_rate)
    description = f"{duration:.1f} s of audio"
    options = {"sampling_rate": extractor.sampling_rate, "return_tensors": "pt"}
    if reads_text:
        inputs = _join_with_text(loaded, processor, text, "audio", {"audio": samples, **options})
        return ModelInputs(loaded, *inputs, notes=tuple(notes), description=description)
    if text is not None and not _is_encoder_decoder(loaded):
        raise _unread(loaded, "text together with audio")
    with _translate_errors(loaded, "the audio"):
        features = dict(extractor(samples, return_attention_mask=True, **options))
    longest = getattr(extractor, "n_samples", None)
    if longest is not None and len(samples) > longest:
        limit = longest / extractor.sampling_rate
        notes.append(
            f"The audio has {duration:.1f} s; truncated to the first {limit:g} s, which the model reads."
        )
    decoder_ids, encoded = _read_transcript(loaded, text, max_tokens)
    if encoded is not None:
        description += f" and {_count_tokens(encoded)}"
        notes += _note_truncation(encoded)
    return ModelInputs(
        loaded,
        _select_arguments(loaded, features),
        decoder_ids=decoder_ids,
        seconds=_measure_seconds(features, extractor),
        notes=tuple(notes),
        description=description,
    )


def _prepare_image(loaded: LoadedModel, image: Any, text: str | None, max_tokens: int | None) -> ModelInputs:
    model = loaded.model
    has_two_encoders = all(getattr(model, name, None) is not None for name in ("text_model", "vision_model"))
    is_joined = not has_two_encoders and _reads_beside_text(loaded, "vision_config")
    if not is_joined and not has_two_encoders and _main_input(loaded) != "pixel_values":
        raise _unread(loaded, "images")
    processor = find_processor(loaded, "text and image" if is_joined else "image")
    pixels = load_pixels(image, OPERATION)
    picture = import_optional("PIL.Image", "hf").fromarray(pixels)
    height, width = pixels.shape[:2]
    description = f"an image of {width:,} × {height:,} pixels"
    if is_joined:
        if max_tokens is not None:
            raise ArgumentError(
                OPERATION,
                received=f"max_tokens={max_tokens} with an image among the tokens",
                expected="a text that is read as a whole",
                hint="Omit max_tokens, and shorten the text.",
            )
        given = {"images": picture, "return_tensors": "pt"}
        arguments, tokens = _join_with_text(loaded, processor, text, "image", given)
        return ModelInputs(
            loaded,
            arguments,
            tokens,
            image=_recover_image(arguments, processor, pixels),
            description=f"{len(tokens):,} tokens with {description}",
        )
    if has_two_encoders and text is not None:
        raise ArgumentError(
            OPERATION,
            received=f"a text and an image, for {loaded.info.get('class', 'a model')}, which has an encoder for each",
            expected="one of them, because no attention connects the encoders",
            hint="Run it once on the image and once on the text.",
        )
    if text is not None and not _is_encoder_decoder(loaded):
        raise _unread(loaded, "text together with an image")
    with _translate_errors(loaded, "the image"):
        features = dict(processor(images=picture, return_tensors="pt"))
    image = _recover_image(features, processor, pixels)
    if has_two_encoders:
        note = "The model has a text encoder and an image encoder; only the image encoder is used."
        loaded = select_part(loaded, model.vision_model, note)
    decoder_ids, encoded = _read_transcript(loaded, text, max_tokens)
    if encoded is not None:
        description += f" and {_count_tokens(encoded)}"
    return ModelInputs(
        loaded,
        _select_arguments(loaded, features),
        decoder_ids=decoder_ids,
        image=image,
        notes=() if encoded is None else tuple(_note_truncation(encoded)),
        description=description,
    )


def _join_with_text(
    loaded: LoadedModel,
    processor: Any,
    text: str | None,
    kind: str,
    options: dict[str, Any],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Let a processor put an image or audio into a text, and return the arguments and the tokens."""
    if text is None:
        raise ArgumentError(
            OPERATION,
            received=f"{kind} alone, for {loaded.info.get('class', 'a model')}",
            expected=f"a text as well: the model reads the {kind} as part of it",
            hint="Add a text, e.g. a question.",
        )
    with _translate_errors(loaded, f"the {kind} and the text"):
        mark = getattr(processor, f"{kind}_token", None)
        if mark is not None and str(mark) in text:
            prompt = text
        elif getattr(processor, "chat_template", None):
            content = [{"type": kind}, {"type": "text", "text": text}]
            messages = [{"role": "user", "content": content}]
            prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        else:
            prompt = f"{mark or ''}{text}"
        arguments = _select_arguments(loaded, dict(processor(text=[prompt], **options)))
    names = name_tokens(loaded.text_tokenizer, arguments["input_ids"][0].tolist())
    return arguments, tuple(names)


def _is_encoder_decoder(loaded: LoadedModel) -> bool:
    return bool(getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False))


def _read_transcript(
    loaded: LoadedModel, text: str | None, max_tokens: int | None
) -> tuple[Any, EncodedText | None]:
    """Return what the decoder of an encoder-decoder model reads, (1, n) or None, and the text if there is one."""
    if not _is_encoder_decoder(loaded):
        return None, None
    if text is None:
        return _start_decoder(loaded), None
    encoded = loaded.encode(text, max_tokens)
    # The end token is what the model predicts last; it does not read it.
    is_complete = encoded.ids[0, -1] == getattr(loaded.text_tokenizer, "eos_token_id", None)
    return encoded.ids[:, :-1] if is_complete and len(encoded) > 1 else encoded.ids, encoded


def _start_decoder(loaded: LoadedModel) -> Any:
    """Return the start token of a decoder, (1, 1)."""
    import torch

    settings = (getattr(loaded.model, "generation_config", None), loaded.model.config)
    names = ("decoder_start_token_id", "bos_token_id")
    found = [getattr(part, name, None) for name in names for part in settings]
    start = next((token for token in found if isinstance(token, int)), None)
    if start is None:
        raise ArgumentError(
            OPERATION,
            received=f"{loaded.name!r}, whose decoder has no start token",
            expected="decoder_start_token_id or bos_token_id in config.json",
            hint="Set it: model.config.decoder_start_token_id = …, and save the model again.",
        )
    return torch.tensor([[start]])


def _select_arguments(loaded: LoadedModel, features: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs of a processor that the model accepts, in the dtype of its weights."""
    parameters = inspect.signature(loaded.model.forward).parameters
    dtype = next(loaded.model.parameters()).dtype
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in features.items()
        if name in parameters
    }


def _recover_image(features: dict[str, Any], processor: Any, pixels: Array) -> Array:
    """Return the image as the model saw it: after resizing and cropping, if the processor returns one image."""
    values = features.get("pixel_values")
    if values is None or values.ndim != 4:
        return pixels
    try:
        return undo_normalisation(values[0].float(), processor)
    except ArgumentError:  # the processor normalises in another way
        return pixels


def _measure_seconds(features: dict[str, Any], extractor: Any) -> float | None:
    """Return the seconds that features stand for, padding included; None if that is unknown."""
    if "input_values" in features:
        return float(features["input_values"].shape[-1] / extractor.sampling_rate)
    hop, values = getattr(extractor, "hop_length", None), features.get("input_features")
    if hop is None or values is None:
        return None
    size = getattr(extractor, "feature_size", None)
    frames = values.shape[-1] if values.shape[1] == size else values.shape[1]
    return float(frames * hop / extractor.sampling_rate)


def _note_truncation(text: EncodedText) -> list[str]:
    if len(text) == text.full_length:
        return []
    return [f"The text has {text.full_length:,} tokens; truncated to the first {len(text):,}."]


def _count_tokens(text: EncodedText) -> str:
    return "1 token" if len(text) == 1 else f"{len(text):,} tokens"


def _reads_beside_text(loaded: LoadedModel, config: str) -> bool:
    """Return whether a language model reads images or audio among its tokens, by the part of its configuration."""
    has_part = getattr(getattr(loaded.model, "config", None), config, None) is not None
    return has_part and not _is_encoder_decoder(loaded) and find_token_embedding(loaded.model) is not None


def _main_input(loaded: LoadedModel) -> str | None:
    return getattr(loaded.model, "main_input_name", None)


def _unread(loaded: LoadedModel, what: str) -> ArgumentError:
    return ArgumentError(
        OPERATION,
        received=f"{loaded.info.get('class', loaded.name)}, which does not read {what}",
        expected="what the model reads" + (f": {_main_input(loaded)}" if _main_input(loaded) else ""),
        hint="Use a transformers model that reads it, or omit the option.",
    )


@contextmanager
def _translate_errors(loaded: LoadedModel, what: str) -> Iterator[None]:
    """Raise errors of a processor as one-line `ArgumentError`s."""
    try:
        with silence_transformers(import_optional("transformers", "hf")):
            yield
    except Exception as error:  # a processor may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ArgumentError(
            OPERATION,
            received=f"{what}, which the processor of {loaded.name!r} rejected ({reason})",
            expected="inputs that the processor of the model accepts",
            hint="Check that the processor belongs to the model.",
        ) from error


def find_processor(loaded: LoadedModel, kind: Kind) -> Any:
    """Return the image processor or feature extractor of a model, or for several kinds the processor that joins them.

    If the model came from `module:function`, the second object that the function returned may be a processor.
    """
    attribute, auto_class, file = _PARTS[kind]
    own = loaded.tokenizer
    if not attribute and hasattr(own, "tokenizer"):
        return own
    if attribute and (hasattr(own, attribute) or _reads(own, kind)):
        return getattr(own, attribute, own)
    reason = "the second object that its function returned is none"
    if loaded.source:
        transformers = import_optional("transformers", "hf")
        try:
            with silence_transformers(transformers):
                found = getattr(transformers, auto_class).from_pretrained(
                    loaded.source, **loaded.source_options
                )
            if attribute or hasattr(found, "tokenizer"):
                return found
            reason = f"{type(found).__name__} reads one of them alone"
        except Exception as error:  # files of any content
            reason = first_line(error)
    raise ArgumentError(
        OPERATION,
        received=f"{loaded.name!r} without a processor for {kind} ({reason})",
        expected=f"{file}, as processor.save_pretrained writes it"
        if loaded.source
        else "a function that returns (model, processor)",
        hint="Save it to the folder: AutoProcessor.from_pretrained(name).save_pretrained(folder)."
        if loaded.source
        else "Return the processor instead of the tokenizer.",
    )


def _reads(processor: Any, kind: str) -> bool:
    """Return whether an object is itself an image processor or a feature extractor."""
    names = getattr(processor, "model_input_names", ())
    if kind == "audio":
        return hasattr(processor, "sampling_rate")
    return "pixel_values" in names and not hasattr(processor, "convert_ids_to_tokens")


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


def prepare_generation(inputs: ModelInputs, count: int) -> None:
    """Check that a model can generate this many tokens, and let a multilingual Whisper detect the language.

    The language is set in the generation configuration of the model, so that `generate` runs the decoder once.
    """
    loaded = inputs.loaded
    if not getattr(loaded.model, "can_generate", lambda: False)():
        raise ArgumentError(
            OPERATION,
            received=f"{loaded.info.get('class', loaded.name)}, which does not generate text",
            expected="a transformers model with generate()",
            hint="Run it on a text without generating.",
        )
    given = inputs.decoder_ids.shape[1] if inputs.is_encoder_decoder else len(inputs.tokens)
    if given + count > loaded.max_positions:
        raise ArgumentError(
            OPERATION,
            received=f"{given:,} tokens and {count:,} to generate",
            expected=f"at most {loaded.max_positions:,} in total, the number of positions of the model",
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
    on_token: Callable[[], None] = lambda: None,
) -> GeneratedText:
    """Generate up to `count` tokens, each the most probable one, and call `on_token` after each.

    `prepare_generation` comes first. The model may end earlier.
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
                OPERATION,
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
    """A streamer of transformers, which is passed the tokens of the prompt first, and then each new one."""

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
