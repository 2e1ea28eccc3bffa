"""Measure the heads of a model over a corpus of documents.

`run` writes one Parquet row of constant size per document, layer and head; `open` reads the rows back.
`regard.survey.schema` describes the columns. May import every package below it; only `regard.cli` is above.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.survey.dataset import Survey, open
from regard.survey.driver import run
from regard.survey.errors import SurveyError
from regard.survey.progress import Progress

__all__ = ["Progress", "Survey", "SurveyError", "open", "run"]

set_public_module(globals())
