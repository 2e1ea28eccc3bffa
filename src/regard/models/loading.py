"""Models by name: a folder, a name on the hub, or a function of one's own; and texts as they read them."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument

__all__ = ["LoadedModel", "Text", "named_function", "load"]

LONG, STEP = 8192, 2048  # tokens: beyond how many a text is run in steps, and of how many
DTYPES = ("float32", "bfloat16", "float16", "stored")
_OPEN, _READ = "load", "read"


@dataclass(frozen=True)
class Text:
    """A text as a model reads it: `ids` (1, n), the `tokens` as strings, and how many tokens the text has in `whole`.

    `whole` is more than n where the text was cut.
    """

    ids: Any
    tokens: list[str]
    whole: int

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, in eval mode, with its tokenizer; `read` and `run` need nothing else.

    `tokenizer` is None where there is none: `read` then gives a text's bytes to a model of at most 256 tokens. `notes`
    are sentences that whoever looks at results should know.
    """

    name: str
    model: Any
    tokenizer: Any = None
    notes: tuple[str, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)

    def read(self, text: str, max_tokens: int | None = None) -> Text:
        """The tokens of a text: at most `max_tokens`, and at most as many as the model has positions for."""
        if max_tokens is not None and max_tokens < 1:
            raise ArgumentError(
                _READ,
                received=f"max_tokens {max_tokens}",
                expected="at least 1",
                hint="Leave it out for all.",
            )
        ids, tokens, whole = _tokens(self, text, min(max_tokens or sys.maxsize, self.positions))
        if not tokens:
            raise ArgumentError(
                _READ,
                received="a text without tokens",
                expected="at least one token to run the model on",
                hint="Give a text that is not empty.",
            )
        return Text(_checked_ids(ids, self._vocabulary), tokens, whole)

    def run(self, text: Text) -> Any:
        """What the model returns for a text, without gradients, and with logits for the last token only.

        A model of 100,000 tokens would otherwise write down as many numbers for each token of the text. A long text is
        run in `steps`, through the model's own cache; what is returned is then that of the last one.
        """
        output = None
        for output in self.steps(text):  # noqa: B007 - the last is what is returned
            pass
        return output

    def steps(self, text: Text) -> Iterator[Any]:
        """What the model returns step by step: one step, or for long texts one for every 2,048 tokens.

        So masks and what is inside a layer take memory for that many rows, not for all. It is done where a model of
        transformers generates, and so has a cache.
        """
        import torch

        forward = inspect.signature(self.model.forward).parameters
        spare = {"use_cache": False, "logits_to_keep": 1}
        options = {name: value for name, value in spare.items() if name in forward}
        with torch.no_grad():
            if self.step_count(text) == 1:
                yield self.model(text.ids, **options)
                return
            cache = None
            for ids in text.ids.split(STEP, 1):
                output = self.model(ids, **options | {"use_cache": True, "past_key_values": cache})
                cache = output.past_key_values
                yield output

    def step_count(self, text: Text) -> int:
        """In how many steps a text is run."""
        generates = getattr(self.model, "can_generate", lambda: False)()
        cached = "past_key_values" in inspect.signature(self.model.forward).parameters
        return -(-len(text) // STEP) if generates and cached and len(text) > LONG else 1

    @property
    def positions(self) -> int:
        """The number of tokens the model has positions for, by its configuration; very large where nothing is said."""
        config = getattr(self.model, "config", None)
        said = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
        said.append(getattr(self.tokenizer, "model_max_length", None))
        return min((each for each in said if isinstance(each, int) and each > 0), default=sys.maxsize)

    @property
    def _vocabulary(self) -> int | None:
        """The number of tokens the model knows: the rows of its first embedding."""
        import torch

        first = next((m for m in self.model.modules() if isinstance(m, torch.nn.Embedding)), None)
        return None if first is None else first.num_embeddings


def load(name: str, *, trust_remote_code: bool = False, dtype: str | None = None) -> LoadedModel:
    """A model by its name, in eval mode, with its tokenizer.

    `name` is a folder (config.json, *.safetensors, the tokenizer's files), a name on the hub (transformers' own cache
    and settings), or `module:function`, which returns a model or (model, tokenizer) and may lie in the current
    directory. Weights are read from safetensors only: a pickled file runs what it likes. A model that brings its own
    code is refused unless `trust_remote_code=True`. Weights become `dtype`, float32 by default; "stored" leaves them as
    they are stored, and those of a function of one's own stay as it made them unless a dtype is given. The class is
    the one that config.json names; of a model with encoder and decoder the encoder is opened.

    >>> from regard.models.loading import load
    >>> opened = load("examples.induction:load")
    >>> text = opened.read("the cat, the ")
    >>> text.tokens[:3], opened.run(text).shape
    (['t', 'h', 'e'], torch.Size([1, 13, 128]))
    """
    if dtype not in (*DTYPES, None):
        raise ArgumentError(
            _OPEN,
            received=f"dtype {dtype!r}",
            expected=", ".join(DTYPES),
            hint="float32 is what is taken unasked.",
        )
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
        return _of_transformers(name, str(path), trust_remote_code, dtype or "float32", local=True)
    if path.exists() or name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name:
        raise ArgumentError(
            _OPEN,
            received=f"{name!r}, " + ("which is a file" if path.exists() else "where nothing is"),
            expected="a folder with config.json and *.safetensors, a name on the hub, or module:function",
            hint="Give the folder the model was saved to.",
        )
    if ":" in name:
        return _of_function(name, dtype)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ArgumentError(
            _OPEN,
            received=repr(name),
            expected="a folder, a name on the hub such as gpt2 or owner/model, or module:function",
            hint="Check the name.",
        )
    return _of_transformers(name, name, trust_remote_code, dtype or "float32", local=not _reachable())


# -- A function of one's own --------------------------------------------------------------------------------


def named_function(path: str, operation: str = "load") -> Callable[..., Any]:
    """The function that `module:function` names; a module in the current directory is found too.

    >>> named_function("regard:attention").__name__
    'attention'
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ArgumentError(
            operation, received=repr(path), expected="module:function, as in my_package.attention:forward",
            hint="Write the module as it is imported, a colon, and the name of the function in it.",
        )  # fmt: skip
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ArgumentError(
            operation, received=f"{path!r} ({error})", expected="a module that can be imported",
            hint="Start in the directory it lies in, write it without .py, and install what it imports.",
        ) from error  # fmt: skip
    try:
        return functools.reduce(getattr, name.split("."), module)  # type: ignore[no-any-return]
    except AttributeError:
        public = ", ".join(
            sorted(x for x, value in vars(module).items() if callable(value) and x[0] != "_")[:12]
        )
        raise ArgumentError(
            operation, received=repr(path), expected=f"a function of {module_name}, which has {public or 'none'}",
            hint="Check the name after the colon.",
        ) from None  # fmt: skip


def _of_function(name: str, dtype: str | None) -> LoadedModel:
    torch = _needed("torch", "torch")
    function = named_function(name, _OPEN)
    try:
        made = function()
    except Exception as error:
        raise ArgumentError(
            _OPEN,
            received=f"{name}, which raised {type(error).__name__}: {_first_line(error)}",
            expected="a function without arguments that returns a model, or (model, tokenizer)",
            hint="Call it in Python to see where it fails.",
        ) from error
    model, tokenizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            _OPEN,
            received=f"{describe_argument(model)} from {name}()",
            expected="a torch.nn.Module, or (model, tokenizer)",
            hint="Return the model itself; a pipeline has it as pipeline.model.",
        )
    if tokenizer is not None and not callable(tokenizer) and not hasattr(tokenizer, "encode"):
        raise ArgumentTypeError(
            _OPEN,
            received=f"a tokenizer that is {describe_argument(tokenizer)} from {name}()",
            expected="a tokenizer of transformers, an object with encode and decode, or a function from a text to ids",
            hint="Return (model, tokenizer), or the model alone to have texts read as bytes.",
        )
    if dtype not in ("stored", None):
        model = model.to(getattr(torch, dtype))
    return LoadedModel(name, model.eval(), tokenizer, (), _about(model, None))


# -- A model of transformers --------------------------------------------------------------------------------


def _check_folder(path: Path) -> None:
    """Refuse a folder whose weights would have to be unpickled, or that holds no model."""
    if not (path / "config.json").is_file():
        raise ArgumentError(
            _OPEN,
            received=f"the folder {str(path)!r}, which has no config.json",
            expected="a model as save_pretrained writes it: config.json, *.safetensors, the tokenizer's files",
            hint="Give the folder that holds them; of a model of your own give module:function.",
        )
    if not any(path.glob("*.safetensors")):
        pickled = sorted(
            each.name for kind in ("bin", "pt", "pth", "ckpt") for each in path.glob(f"*.{kind}")
        )
        raise ArgumentError(
            _OPEN,
            received=f"the folder {str(path)!r} with "
            + (f"{pickled[0]} and no *.safetensors" if pickled else "no weights"),
            expected="weights in *.safetensors, since reading a pickled file can run any code",
            hint="If you trust where it comes from, convert it once: "
            "AutoModel.from_pretrained(folder).save_pretrained(new_folder) writes safetensors."
            if pickled
            else "Give the folder that holds them, or fetch them: this may be a checkout without its large files.",
        )


def _of_transformers(name: str, where: str, trust: bool, dtype: str, *, local: bool) -> LoadedModel:
    hf = _needed("transformers", "hf")
    asked = {"trust_remote_code": trust, "local_files_only": local}
    with _quiet(hf):
        with _one_line(name):
            config = hf.AutoConfig.from_pretrained(where, **asked)
            kind = _class_of(hf, config, trust)
        with _one_line(name, weights=True):
            model, told = kind.from_pretrained(
                where, config=config, dtype="auto" if dtype == "stored" else dtype,
                use_safetensors=True, output_loading_info=True, **asked,
            )  # fmt: skip
        try:
            tokenizer = hf.AutoTokenizer.from_pretrained(where, **asked)
        except Exception as error:  # whatever a tokenizer's files hold, the model is there
            tokenizer, why = None, _first_line(error)
    notes = [] if tokenizer is not None else [f"No tokenizer could be opened ({why})."]
    if missing := sorted(told["missing_keys"]):
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        notes.append(f"{len(missing)} weights are not in the file and were drawn at random: {some}.")
    if getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
        notes.append("It has an encoder and a decoder; the encoder reads the text.")
    return LoadedModel(
        name, model.eval(), tokenizer, tuple(notes), _about(model, getattr(config, "dtype", None))
    )


def _class_of(hf: Any, config: Any, trust: bool) -> Any:
    """The class that the configuration names, so that every weight has its place; else the one without a head."""
    own = getattr(config, "auto_map", None) or {}
    if trust and own:
        return hf.AutoModelForCausalLM if "AutoModelForCausalLM" in own else hf.AutoModel
    named = (getattr(hf, each, None) for each in config.architectures or ())
    found = (each for each in named if isinstance(each, type) and issubclass(each, hf.PreTrainedModel))
    return next(found, hf.AutoModel)


@contextmanager
def _one_line(name: str, weights: bool = False) -> Iterator[None]:
    """What transformers says in many lines, said in one, with what to do."""
    try:
        yield
    except Exception as error:  # a broken file fails in as many ways as there are readers
        said, why = str(error), _first_line(error)
        on_hub = isinstance(error, OSError) and not Path(name).expanduser().is_dir()
        expected, hint = "a model that transformers can open", "Check the folder, or the name on the hub."
        if "trust_remote_code" in said:
            why, expected = (
                "it brings code of its own, which would run here",
                "a model of transformers' own classes",
            )
            hint = "If you have read that code and trust it: --trust-remote-code, or trust_remote_code=True."
        elif on_hub and weights:
            why, expected = (
                "no *.safetensors of it are to be had",
                "weights that are read without running code",
            )
            hint = "Take a copy that has them, or convert it once where you trust it: model.save_pretrained(folder)."
        elif on_hub and ("connect" in said or "cache" in said or "offline" in said):
            why, expected = "it is not in the cache, and the hub cannot be reached", "a model that is at hand"
            hint = "Fetch it once with a network, or give a folder with config.json and *.safetensors."
        raise ArgumentError(_OPEN, received=f"{name!r} ({why})", expected=expected, hint=hint) from error


def _reachable() -> bool:
    """Whether the hub can be asked at all: without a network transformers would try for half a minute."""
    import socket
    from urllib.parse import urlsplit

    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


@contextmanager
def _quiet(hf: Any) -> Iterator[None]:
    """Neither bars nor warnings of transformers meanwhile: what matters is told as notes."""
    log = hf.utils.logging
    before, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()


def _about(model: Any, stored: Any) -> dict[str, Any]:
    """Plain facts of a model."""
    weights = list(model.parameters())
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in weights})
    about = {
        "class": type(model).__name__,
        "parameters": sum(each.numel() for each in weights),
        "dtype": ", ".join(dtypes),
    }
    if stored is not None:
        about["stored"] = str(stored).removeprefix("torch.")
    return about


def _needed(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{_OPEN}: {module} is not installed. pip install 'regard[{extra}]'") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


# -- Texts --------------------------------------------------------------------------------------------------


def _tokens(opened: LoadedModel, text: str, most: int) -> tuple[list[int], list[str], int]:
    """The ids and the tokens of a text, at most so many, and how many there are in all."""
    tokenizer = opened.tokenizer
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        hf = _needed("transformers", "hf")
        with _quiet(hf):
            ids = tokenizer(text, truncation=False)["input_ids"]
            whole = len(ids)
            if whole > most:
                # Asked again, so that what a tokenizer puts at the end of a text is still there.
                ids = tokenizer(text, truncation=True, max_length=most)["input_ids"]
        tokens = [str(each) for each in tokenizer.convert_ids_to_tokens(ids)]
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        return ids, list(map(_of_bytes, tokens)) if type(decoder).__name__ == "ByteLevel" else tokens, whole
    if tokenizer is None:
        vocabulary = opened._vocabulary
        if vocabulary is None or vocabulary > 256:
            raise ArgumentError(
                _READ,
                received=f"a text for {opened.name}, which has no tokenizer and "
                + ("no embedding" if vocabulary is None else f"knows {vocabulary:,} tokens"),
                expected="a tokenizer, or a model of at most 256 tokens, which reads bytes",
                hint="Put the tokenizer's files into the folder, or return (model, tokenizer) from module:function.",
            )
        ids = list(text.encode(errors="surrogateescape"))
        return ids[:most], [_byte(each) for each in ids[:most]], len(ids)
    ids = _flat(tokenizer.encode(text) if hasattr(tokenizer, "encode") else tokenizer(text))
    decode = getattr(tokenizer, "decode", None)
    shown = [str(each) if decode is None else str(decode([each])) for each in ids[:most]]
    return ids[:most], shown, len(ids)


def _flat(ids: Any) -> list[int]:
    """The ids of one text, whatever a tokenizer of one's own returned: a list, an array, a batch of one."""
    ids = getattr(ids, "ids", ids)
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    while len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    return [int(each) for each in ids]


def _byte(value: int) -> str:
    r"""A byte as a token: its character where it has one, else how Python writes it.

    >>> [_byte(each) for each in "a\né".encode()]
    ['a', '\\n', '\\xc3', '\\xa9']
    """
    return chr(value) if 32 <= value < 127 else repr(bytes([value]))[2:-1]


@functools.cache
def _alphabet() -> dict[str, int]:
    """The letters in which byte-level tokenizers write bytes: those that show stand for themselves, the rest follow."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _of_bytes(token: str) -> str:
    """A token of a byte-level tokenizer, its letters put together again; the mark Ġ of a space stays.

    >>> [_of_bytes(each) for each in ("Ġcat", "ĠÃ©tÃ©", "Ã")]
    ['Ġcat', 'Ġété', 'Ã']
    """
    mark = token[:1] if token[:1] in ("Ġ", "Ċ", "ĉ") else ""
    try:
        return mark + bytes(_alphabet()[letter] for letter in token[len(mark) :]).decode()
    except (KeyError, UnicodeDecodeError):  # a special token, or a part of a letter
        return token


def _checked_ids(ids: list[int], vocabulary: int | None) -> Any:
    import torch

    if vocabulary is not None and max(ids) >= vocabulary:
        raise ArgumentError(
            _READ,
            received=f"a token with the id {max(ids):,}",
            expected=f"ids below {vocabulary:,}, which are all the model knows",
            hint="Take the tokenizer the model was trained with; of a model that reads bytes below 128 give ASCII.",
        )
    return torch.tensor([ids])
