"""The survey: a model over a corpus, to Parquet rows of constant size for each document, layer and head.

Its face is `regard.survey` and `regard.open_survey`. What is written is told in `regard._survey._schema`.
"""

from __future__ import annotations

from regard._survey._job import Progress, survey
from regard._survey._measurer import SurveyError
from regard._survey._opened import Survey, open_survey

__all__ = ["Progress", "Survey", "SurveyError", "open_survey", "survey"]
