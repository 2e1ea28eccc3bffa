"""`regard look`: run a model on a text, an image or sound, and write its attention as a page or a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.files import read_text
from regard.cli.model_commands import (
    ModelOptions,
    describe_run,
    print_run,
    record_run,
    warn_if_truncated,
)
from regard.cli.output import Printer, style_text
from regard.cli.page_files import check_output, save_file, save_page
from regard.errors import ArgumentError
from regard.models import load
from regard.models.generation import GeneratedText, generate, prepare_generation
from regard.models.model_inputs import Media, ModelInputs, prepare_inputs
from regard.render.text import escape_unprintable

if TYPE_CHECKING:
    from regard.lens.recording import Recording
    from regard.lens.table import Table

PICTURE_SUFFIX = ".png"
OTHER_SUFFIXES = (".jpg", ".jpeg", ".gif", ".webp", ".svg", ".pdf")  # a page must not be named so


@dataclass(frozen=True)
class LookOptions:
    """What `look` runs a model on, besides a text.

    Args:
        image: An image file.
        audio: A WAV file.
        num_generated: Number of tokens to generate; None for a single pass.
    """

    image: Path | None = None
    audio: Path | None = None
    num_generated: int | None = None


@dataclass(frozen=True)
class LookRun:
    """A run of `look`.

    Args:
        inputs: What the model ran on.
        recording: Its attention.
        generated: What it generated, or None.
        title: Title of the page.
    """

    inputs: ModelInputs
    recording: Recording
    generated: GeneratedText | None
    title: str

    @property
    def tokens(self) -> list[str] | None:
        """The tokens of the decoder, or of the only sequence; None without a text."""
        tokens = self.inputs.decoder_tokens if self.generated is None else self.generated.tokens
        return list(tokens) or None

    @property
    def key_tokens(self) -> list[str] | None:
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


def look(printer: Printer, options: ModelOptions, more: LookOptions, output: Path, show: bool) -> int:
    """Write the page of a model on a text, an image or sound, or a picture if the output ends in .png.

    Args:
        printer: Prints the result.
        options: The model and the text.
        more: Image, sound, and the number of tokens to generate.
        output: File to write.
        show: Open it in a browser.

    Returns:
        The exit code.

    Raises:
        ArgumentError: If the output is neither a page nor a PNG, or the model does not read the inputs.
    """
    check_output(output, "look")
    if output.suffix.lower() in OTHER_SUFFIXES:
        raise ArgumentError(
            "look",
            received=f"-o {str(output)!r}",
            expected="a file name that ends in .html for a page, or in .png for a picture",
            hint=f"Rename it: -o {output.with_suffix(PICTURE_SUFFIX)}.",
        )
    as_picture = output.suffix.lower() == PICTURE_SUFFIX
    if as_picture:
        from regard.cli.head_figures import draw_heads  # before the model runs: Matplotlib may be missing
    media = _read_media(options, more)
    run, record = _run(printer, options, media, more.num_generated)
    with printer.progress("Drawing the heads" if as_picture else "Building the page"):
        if as_picture:
            figure = draw_heads(run.recording, run.title, image=run.inputs.image, has_text=bool(run.tokens))
        else:
            pictured = {} if run.inputs.image is None else {"image": run.inputs.image}
            page = run.recording.page(run.tokens, key_tokens=run.key_tokens, title=run.title, **pictured)
    if as_picture:
        save_file(printer, run.title, output, show, record, figure.savefig)
    else:
        save_page(printer, page, output, show, record)
    return 0


def _read_media(options: ModelOptions, more: LookOptions) -> Media:
    """Read the text; beside an image or sound there need not be one."""
    is_alone = more.image is None and more.audio is None
    text = None
    if is_alone and options.text is None and options.file is None:
        raise ArgumentError(
            "look",
            received="no text, image or sound",
            expected="--text, --file, --image or --audio",
            hint='For a text: --text "…", --file FILE, or --file - for standard input.',
        )
    if is_alone or options.text is not None or options.file is not None:
        text = read_text(options.text, options.file, "look")
    if text is not None and more.audio is not None and more.num_generated is not None:
        raise ArgumentError(
            "look",
            received="a transcript of the sound and --generate",
            expected="one of them",
            hint="Omit --text to let the model transcribe, or --generate to see how it reads this transcript.",
        )
    return Media(text, more.image, more.audio)


def _run(
    printer: Printer, options: ModelOptions, media: Media, num_generated: int | None
) -> tuple[LookRun, dict[str, Any]]:
    """Load the model and run it; return the run, and the facts about it for --json."""
    with printer.progress(f"Loading {Path(options.model).name}"):
        loaded = load(options.model, trust_remote_code=options.trust, dtype=options.dtype, part="whole")
        inputs = prepare_inputs(loaded, media, options.max_tokens, "look")
        if num_generated is not None:
            prepare_generation(inputs, num_generated, "look")
    loaded, text = inputs.loaded, inputs.text
    for note in (*loaded.notes, *inputs.notes):
        printer.warn(note)
    if text is not None:
        warn_if_truncated(printer, text, options.max_tokens)
    if inputs.is_encoder_decoder and num_generated is None and inputs.decoder_ids.shape[1] == 1:
        printer.warn("The decoder reads its start token only; --generate N lets it continue.")
    results: list[GeneratedText] = []

    def run(advance: Callable[[], None]) -> None:
        if num_generated is not None:
            results.append(generate(inputs, num_generated, "look", advance))
        elif text is not None and not inputs.is_encoder_decoder:
            for _ in loaded.forward_chunks(text):
                advance()
        else:
            inputs.forward("look")

    num_chunks = 1 if text is None or inputs.is_encoder_decoder else loaded.num_chunks(text)
    total = num_generated or (num_chunks if num_chunks > 1 else None)
    recording, seconds = record_run(printer, loaded, options.layers, inputs.description, run, total=total)
    generated = results[0] if results else None
    description = inputs.description
    if generated is not None:
        description += f" and {generated.ids.shape[1] - generated.num_given:,} generated"
    print_run(printer, options.model, loaded, description, recording, seconds)
    # Pages are shared, so the title has only the end of a folder's path.
    name = escape_unprintable("/".join(Path(options.model).parts[-2:]).strip("/"))
    look_run = LookRun(inputs, recording, generated, f"{name} on {inputs.description}")
    record = describe_run(loaded, recording, seconds) | {"inputs": description}
    record["notes"] += inputs.notes
    record["tokens"] = len(look_run.tokens or ())
    if text is not None:
        record["text_tokens"] = text.full_length
    if generated is not None:
        record["generated"] = generated.text
        printer.print(style_text(("generated: ", "dim"), generated.text))
        words = _find_words(look_run)
        if words is not None:
            record["words"] = [{name: row[name] for name in ("word", "start", "end")} for row in words]
            rows = [[row["word"].strip(), row["start"], row["end"]] for row in words]
            printer.table(["word", "start", "end"], rows)
    return look_run, record


def _find_words(run: LookRun) -> Table | None:
    """Return the table of words with their times, if the model names the heads that align; else None."""
    loaded, generated = run.inputs.loaded, run.generated
    heads = getattr(getattr(loaded.model, "generation_config", None), "alignment_heads", None)
    seconds, mask = run.inputs.seconds, run.inputs.arguments.get("attention_mask")
    cross_attention = [name for name in run.recording if "encoder_attn" in name]
    is_whole = len(cross_attention) == getattr(loaded.model.config, "decoder_layers", None)
    if not heads or not is_whole or generated is None or seconds is None or mask is None:
        return None
    call = run.recording.calls(cross_attention[0])[0]
    # The last token of the prompt reads the sound of the first word, so it is aligned, too.
    num_frames, prompt = call.shape[-1], generated.num_given - 1
    alignment = run.recording.align(
        generated.ids[:, prompt:],
        heads=heads,
        prompt=prompt,
        frames=max(1, int(mask.sum()) * num_frames // mask.shape[-1]),
        seconds_per_frame=seconds / num_frames,
        filter_width=loaded.model.config.median_filter_width,
    )
    return alignment.words(loaded.text_tokenizer)
