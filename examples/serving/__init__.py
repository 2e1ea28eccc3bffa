"""The small GPT that comes with regard, served by vLLM: which source did the answer read?

`records` holds what the plugin wrote for one request of `ask.py` to a real server; the guide reads them.
"""

from pathlib import Path

RECORDS = Path(__file__).parent / "records"

DOCUMENTS = {
    "first document": "Zobi and Rumo went to the park.",
    "second document": "Lily and Tom went to the store.",
}
QUESTION = "Then Lily had a cake, and gave it to"
PROMPT = "\n".join([*DOCUMENTS.values(), QUESTION])
