"""Import torch and transformers on demand, and keep transformers quiet."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def import_optional(module: str, extra: str) -> Any:
    """Import an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"load: {module} is not installed. pip install 'regard[{extra}]'") from error


@contextmanager
def silence_transformers(transformers: Any) -> Iterator[None]:
    """Suppress progress bars and warnings of transformers; what matters is reported in `LoadedModel.notes`."""
    logging = transformers.utils.logging
    verbosity, progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if progress_bar:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the class of an error without one."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
