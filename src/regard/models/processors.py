"""Find the processor of a model: what turns sound and images into the tensors that it reads."""

from __future__ import annotations

from typing import Any, Literal

from regard.errors import ArgumentError
from regard.models.loaded_model import LoadedModel
from regard.models.optional_imports import first_line, import_optional, silence_transformers

Kind = Literal["image", "audio", "text and image", "text and audio"]

# Attribute of a processor that has the part, class of transformers that loads it, and what it needs in the folder.
_PARTS: dict[str, tuple[str, str, str]] = {
    "image": ("image_processor", "AutoImageProcessor", "preprocessor_config.json"),
    "audio": ("feature_extractor", "AutoFeatureExtractor", "preprocessor_config.json"),
    "text and image": ("", "AutoProcessor", "processor_config.json"),
    "text and audio": ("", "AutoProcessor", "processor_config.json"),
}


def find_processor(loaded: LoadedModel, kind: Kind, operation: str) -> Any:
    """Return the processor of a model.

    Args:
        loaded: The model. If it came from `module:function`, the second object that the function returned may be a
            processor.
        kind: What the processor reads. An image processor and a feature extractor read one kind alone.
        operation: Name of the calling function, for error messages.

    Returns:
        An image processor, a feature extractor, or for several kinds the processor that joins them.

    Raises:
        ArgumentError: If there is none.
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
        operation,
        received=f"{loaded.name!r} without a processor for {kind} ({reason})",
        expected=f"{file}, as processor.save_pretrained writes it"
        if loaded.source
        else "a function that returns (model, processor)",
        hint="Save it to the folder: AutoProcessor.from_pretrained(name).save_pretrained(folder)."
        if loaded.source
        else "Return the processor in place of the tokenizer.",
    )


def _reads(processor: Any, kind: str) -> bool:
    """Return whether an object is itself an image processor or a feature extractor."""
    names = getattr(processor, "model_input_names", ())
    if kind == "audio":
        return hasattr(processor, "sampling_rate")
    return "pixel_values" in names and not hasattr(processor, "convert_ids_to_tokens")
