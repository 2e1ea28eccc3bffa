"""Small models and tokenizers saved to disk: config.json, model.safetensors, the tokenizer's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf


def build_llama(**options: Any) -> Any:
    """Build a small decoder with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes | options))


def build_byte_tokenizer() -> Any:
    """Build a byte-level tokenizer of transformers without merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend)


def save_llama(path: Path, **options: Any) -> Path:
    """Save a decoder and its tokenizer to a folder, and return the folder."""
    build_llama(**options).save_pretrained(path)
    build_byte_tokenizer().save_pretrained(path)
    return path


_TEXT = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def build_gemma3_vlm() -> Any:
    """Build a small Gemma 3 that reads texts and images of four tokens, with the id 290."""
    torch.manual_seed(0)
    text = _TEXT | {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 32}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    tokens = {"image_token_index": 290, "image_token_id": 290, "boi_token_index": 291, "eoi_token_index": 292}
    vision = _VISION | {"vision_use_head": False}
    config = hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    return hf.Gemma3ForConditionalGeneration(config).eval()


def build_llava() -> Any:
    """Build a small LLaVA: a Llama that reads the output of CLIP's image encoder."""
    torch.manual_seed(0)
    vision = hf.CLIPVisionConfig(**_VISION)
    config = hf.LlavaConfig(text_config=hf.LlamaConfig(**_TEXT), vision_config=vision, image_token_index=290)
    return hf.LlavaForConditionalGeneration(config).eval()


def build_clip() -> Any:
    """Build a small CLIP: a text encoder and an image encoder."""
    torch.manual_seed(0)
    return hf.CLIPModel(hf.CLIPConfig(text_config=_TEXT, vision_config=_VISION, projection_dim=8)).eval()


def build_whisper(**options: Any) -> Any:
    """Build a small Whisper: an encoder of audio, and a decoder of text."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")}
    lengths = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = hf.WhisperConfig(**{"vocab_size": 300} | sizes | lengths | ids | options)
    return hf.WhisperForConditionalGeneration(config).eval()


WHISPER_WORDS = (
    " the",
    " cat",
    " sat",
    " on",
    " mat",
    " bec",
    "ause",
    " it",
    " was",
    " tired",
    " don",
    "'t",
    " été",
)
WHISPER_MARKS = (
    "endoftext",
    "startoftranscript",
    "en",
    "zh",
    "fr",
    "transcribe",
    "translate",
    "notimestamps",
)


def build_whisper_tokenizer() -> Any:
    """Build a tokenizer of Whisper: bytes and a few words, then its special tokens, then timestamps up to 1 second."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {letter: i for i, letter in enumerate(alphabet)}, []
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in WHISPER_WORDS:
        letters = split.pre_tokenize_str(word)[0][0]
        for i in range(1, len(letters)):
            if letters[: i + 1] not in vocabulary:
                vocabulary[letters[: i + 1]] = len(vocabulary)
                merges.append((letters[:i], letters[i]))
    tokenizer = hf.WhisperTokenizer(
        vocab=vocabulary | {"<|endoftext|>": len(vocabulary)},
        merges=merges,
        extra_special_tokens=[f"<|{mark}|>" for mark in WHISPER_MARKS[1:]],
    )
    tokenizer.add_tokens([f"<|{i * 0.02:.2f}|>" for i in range(51)])
    return tokenizer


def build_speaking_whisper(**options: Any) -> tuple[Any, Any]:
    """Build a small Whisper of one second of audio, 50 frames, and its tokenizer; all cross-attention aligns."""
    tokenizer = build_whisper_tokenizer()
    mark_id = {mark: tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for mark in WHISPER_MARKS}
    end = mark_id["endoftext"]
    ids = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    ids |= {"decoder_start_token_id": mark_id["startoftranscript"], "vocab_size": len(tokenizer)}
    model = build_whisper(**{"max_source_positions": 50, "init_std": 0.3} | ids | options)
    settings = model.generation_config
    settings._from_model_config = False  # or a saved one is made again from the configuration
    settings.alignment_heads = [[0, 1], [1, 0], [1, 1]]
    settings.no_timestamps_token_id = mark_id["notimestamps"]
    settings.is_multilingual = True
    settings.lang_to_id = {f"<|{code}|>": mark_id[code] for code in ("en", "zh", "fr")}
    settings.task_to_id = {task: mark_id[task] for task in ("transcribe", "translate")}
    settings.suppress_tokens = settings.begin_suppress_tokens = None
    settings.max_length = model.config.max_target_positions
    return model, tokenizer
