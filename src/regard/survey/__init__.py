"""Measure the heads of a model over a corpus of documents.

`run` writes one Parquet row of constant size per document, layer and head; `open` reads the rows back.
`regard.survey.schema` describes the columns. May import everything below it except `regard.cli`.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.survey.dataset import Survey, open
from regard.survey.driver import Progress, run
from regard.survey.worker_client import SurveyError

__all__ = ["Progress", "Survey", "SurveyError", "open", "run"]

set_public_module(globals())
