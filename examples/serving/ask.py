"""Ask a server a question about two documents, and print which one each token of the answer read.

python -m examples.serving.ask http://localhost:8000 stories
"""

import json
import sys
import urllib.request

import regard.vllm
from examples.serving import DOCUMENTS, PROMPT, QUESTION


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def ask(url: str, model: str) -> str:
    """Ask the question, print the record that the server has, and return the id of the response."""
    parts = DOCUMENTS | {"question": QUESTION}
    spans = regard.vllm.find_spans(PROMPT, parts, url=url, model=model)
    response = post(
        f"{url}/v1/completions",
        {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": 12,
            "temperature": 0,
            "vllm_xargs": {"regard": json.dumps({"spans": spans, "keep": True})},
        },
    )
    print(response["choices"][0]["text"])
    with urllib.request.urlopen(f"{url}/regard/{response['id']}") as answer:
        ((record,), *_) = json.load(answer)
    for number, shares in enumerate(record["tokens"]["shares"]):
        print(
            f"token {number}:",
            {name: round(share, 3) for name, share in zip(record["names"], shares, strict=True)},
        )
    return response["id"]


if __name__ == "__main__":
    ask(*sys.argv[1:])
