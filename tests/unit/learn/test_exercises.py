"""The exercises: correct answers in every format, partial answers, nonsense, tasks and solutions."""

from __future__ import annotations

import re

import numpy as np
import pytest

from regard import ArgumentError
from regard.learn import cat, exercises
from regard.learn.exercises import catalog, check, show, solution
from regard.learn.exercises.catalog import EXERCISES

NUMBERS = range(1, 9)
S = [1, 2, 2, 1, 1.5]  # scores of "sat"
H = [0.5, 1, 1, 0.5, 0.75]  # … scaled
W = [0.1519, 0.2505, 0.2505, 0.1519, 0.1951]
STEPS = {"scores": S, "scaled": H, "weights": W, "output": [0.2495, 0.3481, 0.3481, 0.2495]}
THE = [0.0546, 0.4036, 0.1485, 0.1485, 0.2448]  # weights of "The" without scaling
SELF = {"itself": False, "most": ["t0", "t1", "t1"], "weights": [0.2119, 0.5761, 0.2119], "change": "b"}
C = np.tril(np.ones((5, 5), bool))
P = (np.arange(5) < np.array([[3], [5]]))[:, None, None]


def right(n):
    """Return the answer that the code of the solution computes."""
    names: dict[str, object] = {}
    exec(EXERCISES[n - 1].code, names)
    return names["answer"]


# -- Correct answers in every format ---------------------------------------------------------------------------


def called(n):
    """Return the values of a solution that consists of functions."""
    return {p.name: right(n)[p.name](*p.calls[0]) for p in EXERCISES[n - 1].parts}


def vectorised(query, key, value, mask=None):
    """Compute attention over the visible keys only, and return lists."""
    mask = np.broadcast_to(True if mask is None else mask, (len(query), len(key)))
    output = []
    for q, seen in zip(query, mask, strict=True):
        scores = key[seen] @ q / np.sqrt(len(q))
        exponentials = np.exp(scores - scores.max(initial=-1e300))
        output.append((exponentials / max(exponentials.sum(), 1e-300) @ value[seen]).tolist())
    return output


def in_heads(query, key, value, num_heads, mask=None):
    query, key, value = (x.reshape(len(x), num_heads, -1).swapaxes(0, 1) for x in (query, key, value))
    masks = np.broadcast_to(True if mask is None else mask, (num_heads, query.shape[1], key.shape[1]))
    outputs = [vectorised(*head) for head in zip(query, key, value, masks, strict=True)]
    return np.concatenate(outputs, axis=-1).tolist()


RIGHT = [
    *((n, right(n)) for n in NUMBERS),
    (1, STEPS),
    (1, tuple(STEPS.values())),
    (1, {name: np.array([x]).round(3) for name, x in STEPS.items()}),  # a table of one row, three digits
    (2, {"weights": THE, "sharper": [1.356], "spread": 22.63, "ratio": 6.7e9}),
    (3, SELF),
    (3, {**SELF, "itself": "No", "most": np.array([0, 1, 1]), "change": "B"}),
    (
        4,
        {
            "weights": [0.1065, 0.787, 0.1065],
            "output": [0.959, 5.041],
            "across": [0.333] * 3,
            "length": 3.252,
        },
    ),
    (5, {"variance": 5184, "scale": 0.01389, "keys_only": 0.04167}),
    (5, {"variance": lambda d, s: d * s**2, "scale": lambda d, s: d**-0.5 / s, "keys_only": 1 / 24}),
    (6, called(6)),
    (6, {"causal": C.tolist(), "padding": P, "both": (C & P).tolist()}),
    (7, called(7)),
    (
        7,
        {
            "split": lambda x, h: np.stack(np.split(x, h, axis=-1)),
            "merge": lambda s: np.concatenate(list(s), -1),
        },
    ),
    (8, {"attention": vectorised, "many_heads": in_heads}),
]


@pytest.mark.parametrize(("n", "answer"), RIGHT)
def test_a_right_answer_passes(n, answer):
    result = check(n, answer)
    assert result.correct, result.message
    assert result.hint == ""
    assert "right" in str(result)


def test_tensors_are_accepted():
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in STEPS.items()}
    assert check(1, tensors).correct
    masks = {name: torch.from_numpy(x.copy()) for name, x in called(6).items()}
    assert check(6, masks).correct
    assert "inverted" in check(6, {"causal": ~masks["causal"]}).hint


# -- Partial and wrong answers, and nonsense -----------------------------------------------------------------------


def test_parts_can_be_checked_one_by_one():
    result = check(1, {"scores": S, "scaled": H})
    assert not result.correct
    assert "Right so far: scores, scaled." in result.message
    assert result.hint.startswith("Still missing is weights")


@pytest.mark.parametrize("n", NUMBERS)
def test_ellipsis_marks_a_missing_part(n):
    first, *others = [part.name for part in EXERCISES[n - 1].parts]
    assert check(n, dict.fromkeys([first, *others], ...)).hint.startswith(f"Still missing is {first}")
    result = check(n, {**dict.fromkeys(others, ...), first: right(n)[first]})
    assert f"Right so far: {first}." in result.message
    assert result.hint.startswith(f"Still missing is {others[0]}")


@pytest.mark.parametrize("n", [5, 6, 7, 8])
def test_a_function_without_return_gets_a_hint(n):
    def to_fill_in(query, key, value, mask=None): ...

    for body in (to_fill_in,) if n == 8 else (lambda *args: None, lambda *args: ...):
        assert (
            "nothing yet: end the function with return."
            in check(n, {EXERCISES[n - 1].parts[0].name: body}).hint
        )


@pytest.mark.parametrize(
    ("value", "words"),
    [(W, "Right so far: weights."), (cat.Q @ cat.K[2], 'the column of "sat"'), ([1, 2], "got (2,)")],
)
def test_an_unnamed_value_is_matched_to_a_part(value, words):
    assert words in check(1, value).message


def test_the_first_wrong_part_is_named():
    result = check(
        1, {"scores": S, "scaled": H, "weights": [0.15, 0.25, 0.25, 0.15, 0.3], "output": [1, 2, 3, 4]}
    )
    assert "Right so far: scores, scaled." in result.message
    assert result.hint.startswith("weights: ") and "the first at [" in result.hint


def test_every_fault_of_an_answer_is_reported():
    """Faults of type, shape, value and name, in all parts at once."""
    wrong = {"causal": "lower", "padding": np.ones((2, 5)), "both": C ^ P, "mask": 1}
    hints = check(6, wrong).hints
    assert [hint.partition(":")[0] for hint in hints] == ["causal", "padding", "both", "answer"]
    assert "Expected numbers, got str 'lower'." in hints[0]
    assert "a boolean mask" in hints[1] and "got (2, 5)" in hints[1]
    assert "That is ^" in hints[2] and "no part 'mask'" in hints[3]
    floats = C.astype(float)
    floats[0, 1] = floats[2, 0] = 0.5
    (hint,) = check(6, {"causal": floats}).hints
    assert "a boolean mask" in hint and "One entry is wrong, the first at [0, 1]" in hint


@pytest.mark.parametrize("n", NUMBERS)
def test_a_part_of_the_wrong_type_hides_no_other(n):
    first, *others = [part.name for part in EXERCISES[n - 1].parts]
    solved = right(n)
    result = check(n, {**solved, first: object()})
    assert [hint.partition(":")[0] for hint in result.hints] == [first]
    assert result.right_parts == tuple(others)
    result = check(n, dict.fromkeys([first, *others], object()))
    assert [hint.partition(":")[0] for hint in result.hints] == [first, *others]


def test_a_part_that_follows_from_a_mistake_has_no_hint_of_its_own():
    unscaled = {"scores": S, "scaled": S, "weights": np.exp(S) / np.exp(S).sum()}
    (hint,) = check(1, unscaled).hints
    assert hint.startswith("scaled: The scale is missing")


def test_a_hint_is_short_and_can_be_printed():
    hints = check(3, {"itself": "no" * 10**6, "change": "\ud800", "\ud800": 1}).hints
    assert len(hints) == 3 and max(map(len, hints)) < 2100 and "\n".join(hints).encode()

    def fail(seq_len):
        raise ValueError("\ud800\n" * 10**6)

    (hint,) = check(6, {"causal": fail}).hints
    assert len(hint) < 500 and hint.encode() and "\n" not in hint


def test_a_function_that_ends_python_is_a_wrong_answer():
    assert "raised SystemExit" in check(6, {"causal": lambda n: exit(3)}).hint


NONSENSE = [
    None, "x", 3, 1j, True, float("nan"), [], {}, (), object(), [[1, 2], [3]], {"what": 1}, {1: 2}, len, print,
    lambda: 1, lambda *args, **options: None, lambda query, key, value, mask=None: 1 / 0, np.zeros((2, 3, 4)),
    np.array(["a"]), np.array([None]), [np.inf] * 5, set(), dict.fromkeys(["scores", "weights", "split", "causal"]),
]  # fmt: skip


@pytest.mark.parametrize("n", NUMBERS)
def test_nonsense_does_not_raise(n):
    for nonsense in NONSENSE:
        named = {part.name: nonsense for part in EXERCISES[n - 1].parts}
        for answer in (nonsense, named):
            result = check(n, answer)
            assert not result.correct
            assert result.hint


@pytest.mark.parametrize("ask", [show, solution, lambda n: check(n, {})])
@pytest.mark.parametrize("n", [0, 9, -1, "1", 1.5, None, True])
def test_an_unknown_exercise_raises(ask, n):
    with pytest.raises(ArgumentError, match="from 1 to 8"):
        ask(n)


# -- Tasks and solutions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", NUMBERS)
def test_a_task_names_its_parts(n):
    task = show(n)
    for face in (str(task), repr(task), task._repr_markdown_()):
        assert f"Exercise {n}." in face
        for part in EXERCISES[n - 1].parts:
            assert part.name in face and part.format.split(",")[0].split("(")[0] in re.sub(r"\s+", " ", face)
    assert max(map(len, str(task).splitlines())) <= 100


@pytest.mark.parametrize("n", NUMBERS)
def test_markdown_has_no_headings_and_keeps_line_breaks(n):
    faces = [show(n)._repr_markdown_(), solution(n)._repr_markdown_()]
    outside = [
        re.sub(r"```.*?```", "", face, flags=re.DOTALL) for face in faces
    ]  # a comment in code is not a heading
    assert not any(line.startswith("#") for face in outside for line in face.splitlines())
    for line in EXERCISES[n - 1].task.split("\n")[:-1]:
        assert f"{line}  \n" in faces[0]


@pytest.mark.parametrize("n", NUMBERS)
def test_a_solution_is_text_and_code(n):
    found = solution(n)
    assert found.text in str(found) and found.code in found._repr_markdown_()
    assert ": Any" not in found.code and "->" not in found.code


def test_a_solution_is_computed_when_called(monkeypatch):
    assert "3.2522" in solution(4).text
    monkeypatch.setattr(catalog, "KEYS", catalog.KEYS * 3)
    assert "its scores are [0, 36, 0]" in solution(4).text


def test_only_vectors_of_one_length_attend_most_to_themselves():
    holds = {
        letter: (compute().argmax(axis=-1) == range(3)).all()
        for letter, (_, compute) in catalog.CHANGES.items()
    }
    assert [letter for letter, true in holds.items() if true] == [right(3)["change"]]


def test_public_names_exist():
    assert exercises.__all__ == sorted(exercises.__all__)
    assert all(hasattr(exercises, name) for name in exercises.__all__)


def test_inputs_can_be_modified():
    show(4).given["K"][:] = 0
    assert show(4).given["K"].any() and check(4, right(4)).correct

    def split(x, num_heads):
        x *= 0
        return x

    assert not check(7, {"split": split}).correct
    assert check(7, right(7)).correct
