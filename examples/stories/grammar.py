"""Stories made by a grammar, in which copying pays: a name, colour or thing comes back after other words.

Each template has one or more places marked `|`: the word after it was mentioned before, and nothing else in the story
tells it. What `is_held_out` names, pairs of a template and a name or two jobs, and one made-up name in ten, does not
occur in the training text, and is what the tests ask for.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from random import Random


def _words(text: str) -> list[str]:
    return text.split()


GIRLS = _words(
    "Lily Mia Sara Anna Emma Lucy Amy Sue Ella Zoe Nina Jane Kate Rosa Lola Eva Ida Ruby Ivy May Lisa Molly Clara "
    "Alice Grace Daisy Maria Sophie Hana Nora Tara Wendy"
)
BOYS = _words(
    "Tom Max Ben Tim Sam Jack Leo Bob Dan Joe John Fred Ned Paul Adam Noah Finn Hugo Oscar Peter Mark Billy Timmy Jim "
    "Theo Omar Luke Carl Otto Felix Henry Victor"
)
ANIMALS = _words(
    "cat dog bird fox bear frog duck mouse rabbit owl pig cow horse sheep goat turtle lion monkey"
)
COLOURS = _words("red blue green yellow white black brown pink purple orange grey golden")
THINGS = _words(
    "ball hat kite boat drum book box cup bag key lamp bell coat car doll cake apple flower stone shell spoon ring "
    "chair table bike rope sock shoe blanket basket pencil bucket balloon mirror clock pillow ladder candle whistle"
)
PLACES = _words(
    "park garden forest house school beach farm river hill kitchen shop zoo barn field lake market library bridge "
    "tower cave meadow village island castle"
)
FOODS = _words("soup bread cheese jam rice cookies milk honey pears berries nuts eggs corn pie carrots")
# Who has what: the second names the first.
JOBS = {
    "artist": "brush", "musician": "guitar", "baker": "loaf", "farmer": "cow", "doctor": "bandage", "painter": "ladder",
    "cook": "pan", "sailor": "boat", "teacher": "book", "gardener": "shovel", "dancer": "ribbon", "king": "crown",
    "singer": "song", "fisherman": "net", "builder": "hammer", "clown": "balloon",
}  # fmt: skip
STARTS, MIDDLES, ENDS = "BDFGJKLMNPRSTVWZ", "aeiou", "bdklmnprtvxz"

# {N} is a name, {k} its kind, {S} She or He, {s} she or he, {h} her or his; {c}, {t}, {p} a colour, thing, place.
NAME_TEMPLATES = (
    'There was a {k} named {N}. {S} had a {c} {t}. A bird asked, "What is your name?" "My name is |{N}," said the {k}.',
    "Once upon a time, there was a little {k} called {N}. {S} lived near the {p}. Everyone in the {p} knew |{N}.",
    "A {k} named {N} found a {c} {t} in the {p}. The {c} {t} now belongs to |{N}.",
    '{N} was a happy {k} who liked the {p}. One day {h} mom called, "Where are you, |{N}?"',
    "One day, {N} lost {h} {t}. {S} looked in the {p} and in the house. A {a} found the {t} and gave it back to |{N}.",
    'The {k} in the {p} is {N}. {S} has a {c} {t}. "I like your {t}," said the {a} to |{N}.',
    "{N} wanted to go to the {p}. {S} put on a {c} coat and took a {t}. At the {p}, a {a} was waiting for |{N}.",
    "Once there was a {k}. The {k} was named {N}. It was a sunny day, and the {a} wanted to play with |{N}.",
    '"Hello, I am {N}," said the {k}. "I have a {c} {t}." The {a} smiled and said, "Hello, |{N}!"',
    "The {a} had a friend. The friend was a {k} named {N}. Every day the {a} went to the {p} to see |{N}.",
    "{N} made a big cake. It was {c} and sweet. The {a} ate the cake and said thank you to |{N}.",
    "In a house by the {p} lived a {k}. The sign on the door said {N}. So the {k} in the house was |{N}.",
    'Mom had a {c} {t} for {N}. She put it in a box. On the box she wrote, "For |{N}."',
    "{N} hid behind the {t}. The {a} looked in the {p}. The {a} looked under the table. At last the {a} found |{N}.",
    "It was the birthday of {N}. The {a} came with a {c} {t}. They all sang a song for |{N}.",
    "There once was a {k} named {N} who had no {t}. The {a} had a {c} one. The {a} gave the {t} to |{N}.",
    'The teacher asked, "Who has the {c} {t}?" {N} had it. "It is here," said |{N}.',
    "A letter came from the {p}. It was for a {k} named {N}. The {a} took the letter and ran to |{N}.",
    "{N} was sad, because {s} had lost a {c} {t}. The {a} wanted to help, and gave a hug to |{N}.",
    "Who is the {k} with the {c} {t}? It is {N}. The {a} in the {p} likes |{N}.",
)
# Two names; the story says which one is meant.
TWO_NAME_TEMPLATES = (
    "{N} and {M} went to the {p}. {N} had a {t}, and gave it to |{M}. {M} said thank you to |{N}.",
    "{M} and {N} played in the {p}. {M} threw the {c} ball to |{N}. Then {N} threw it back to |{M}.",
    "{N} has a {c} {t}, and {M} has a {d} {u}. The {c} {t} is for {N}. The {d} {u} is for |{M}.",
    "{N} met {M} at the {p}. {N} waved to |{M}, and {M} waved to |{N}.",
)
# Never with a cat, so that "The cat sat on the" is new to the model.
MAT_TEMPLATES = (
    "The {a} sat on the mat. The mat was {c}. The {b} sat on the |mat, too.",
    "A {a} and a {b} sat on the mat. {N} gave them {f}.",
    "The {c} {a} was tired. It lay down on the mat, and it slept on the |mat all day.",
)
# Colours, things and places that come back.
OTHER_TEMPLATES = (
    "{N} had a {c} {t}. {S} took it to the {p}. Everyone looked at the |{c} |{t}.",
    'The {t} of {N} was {c}. "What colour is your {t}?" asked the {a}. "It is |{c}," said {N}.',
    "{N} put the {t} in the {p}. The next day {s} did not know where it was. Then {s} saw it in the |{p}.",
    "There was a {t} and a {u} on the table. {N} took the {u}. Now only the |{t} was there.",
    'Dad lost his {t}. "Where is my |{t}?" he asked. {N} had seen the |{t} in the {p}.',
    "The {a} liked {f}, and the {b} liked {g}. {N} gave {f} to the |{a} and {g} to the |{b}.",
    "{N} saw a {a} on the way to the {p}. {S} was not afraid of the |{a}. At the |{p}, the |{a} was gone.",
    # The order tells nothing: what one of them had decides.
    "The {j} met the {i} in the {p}. One of them had a {J}. It was the |{j}.",
    "The {j} met the {i} in the {p}. One of them had a {I}. It was the |{i}.",
    "The {j} saw the {i}. One of them had a {J}. It was the |{j}.",
    "The {j} saw the {i}. One of them had a {I}. It was the |{i}.",
    *MAT_TEMPLATES,
)
# Words that are said again.
ECHO_TEMPLATES = (
    '"{w}," said {N}. "|{w}," said the {a}.',
    'The song went, "{w}." {N} sang it again: "|{w}."',
    "{N} wrote {w} on the wall. The {a} read it aloud: |{w}.",
    "The magic words were {w}. {N} did not forget them. {S} said: |{w}. And the {c} door opened.",
)
CODE_TEMPLATES = (
    "def {v}({x}, {y}):\n  return |{x} + {y}",
    "{x} = {n}\n{y} = {m}\nprint(|{x})",
    "def {v}({x}):\n  {y} = {n}\n  return |{x} * {y}\nprint(|{v}({m}))",
    "for {x} in {v}:\n  {y} = |{x} + {n}\nprint({y})",
)
FILLERS = (
    "It was a sunny day.", "The sky was blue.", "They were very happy.", "It was cold outside.", "The wind was strong.",
    "They laughed and played.", "It was time for lunch.", "The birds were singing.", "It was a secret.",
    "It was a long way.", "Then it began to rain.", "They had a lot of fun.", "The day was over soon.",
)  # fmt: skip
CODE_SHARE = 0.1
MORE_NAMES = _words(
    "Spot Sally Sarah Kitty Fluffy Benny Buddy Mary Penny Andy Sammy Bella Whiskers Jenny Jerry"
)
NAME = rf"\b(?:{'|'.join(sorted({*GIRLS, *BOYS, *MORE_NAMES} - {'May'}))})\b"  # May is a word, too


def draw_made_up_name(rng: Random) -> str:
    """Draw a name that does not exist, such as Zobi."""
    name = rng.choice(STARTS) + rng.choice(MIDDLES) + rng.choice(ENDS) + rng.choice(MIDDLES)
    return name + (rng.choice(ENDS) if rng.random() < 0.4 else "")


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def is_held_out_name(name: str) -> bool:
    """Return whether a made-up name is kept for tests."""
    return name not in (*GIRLS, *BOYS) and _hash(name) % 10 == 0


def is_held_out(template: str, name: str) -> bool:
    """Return whether a template with this name, or with these two jobs, is kept for tests."""
    return is_held_out_name(name) or _hash(f"{template}: {name}") % 6 == 0


def draw_slots(rng: Random, words: Sequence[str]) -> dict[str, str]:
    """Draw what fills the slots of a template: names (N, M) that differ, things, and words to repeat (w)."""
    is_girl = rng.random() < 0.5
    if rng.random() < 0.6:
        names = [draw_made_up_name(rng) for _ in range(2)]
    else:
        names = [rng.choice(GIRLS if is_girl else BOYS), rng.choice(GIRLS + BOYS)]
    if names[0] == names[1]:
        return draw_slots(rng, words)
    slots = dict(zip("NM", names, strict=True))
    for keys, choices in (("cd", COLOURS), ("tu", THINGS), ("ab", ANIMALS), ("fg", FOODS), ("p", PLACES)):
        slots |= dict(zip(keys, rng.sample(choices, len(keys)), strict=True))
    slots["k"] = rng.choice(["girl", "child"] if is_girl else ["boy", "child"])
    slots |= {"S": "She", "s": "she", "h": "her"} if is_girl else {"S": "He", "s": "he", "h": "his"}
    slots["j"], slots["i"] = rng.sample(sorted(JOBS), 2)
    slots["J"], slots["I"] = JOBS[slots["j"]], JOBS[slots["i"]]
    count = rng.randint(3, 24)
    said = (draw_made_up_name(rng).lower() if rng.random() < 0.2 else rng.choice(words) for _ in range(count))
    slots["w"] = " ".join(said)
    slots |= {key: draw_made_up_name(rng).lower() for key in "vxy"}
    return slots | {"n": str(rng.randint(2, 9)), "m": str(rng.randint(2, 9))}


def fill(template: str, slots: dict[str, str]) -> str:
    """Fill the slots; the marks stay."""
    text = re.sub(r"\{(\w)\}", lambda match: slots[match[1]], template)
    return re.sub(r"\b([Aa]) (\|?[aeiou])", r"\1n \2", text)


def draw_story(rng: Random, words: Sequence[str]) -> str:
    """Draw one to three templates about the same persons and things, with other sentences between them."""
    slots = draw_slots(rng, words)
    if rng.random() < CODE_SHARE:
        return fill(rng.choice(CODE_TEMPLATES), slots).replace("|", "")
    pools = (NAME_TEMPLATES, TWO_NAME_TEMPLATES, OTHER_TEMPLATES, ECHO_TEMPLATES)
    chosen = [rng.choice(pool) for pool in rng.choices(pools, (5, 2, 3, 5), k=rng.randint(1, 3))]
    has_cat = "cat" in (slots["a"], slots["b"])
    if any(
        is_held_out(template, name) or (has_cat and template in MAT_TEMPLATES)
        for template in chosen
        for name in (slots["N"], slots["M"], f"{slots['j']} {slots['i']}")
    ):
        return draw_story(rng, words)
    parts = []
    for template in chosen:
        parts.append(fill(template, slots).replace("|", ""))
        if rng.random() < 0.5:
            parts.append(rng.choice(FILLERS))
    return " ".join(parts)


def draw_stories(count: int, seed: int, words: Sequence[str]) -> list[str]:
    """Draw stories that contain nothing that is held out.

    Args:
        count: Number of stories.
        seed: Seed of the drawing.
        words: Words that characters of the stories repeat.

    Returns:
        The stories; those of code have several lines.
    """
    rng = Random(seed)
    return [draw_story(rng, words) for _ in range(count)]


def rename(text: str, seed: int) -> str:
    """Replace the names in a text by made-up ones, the same for each name in 40 lines, which are a few stories.

    Args:
        text: Stories, one paragraph on each line.
        seed: Seed of the drawing.

    Returns:
        The text with other names, none of them held out.
    """
    rng, lines = Random(seed), text.split("\n")

    def draw() -> str:
        name = draw_made_up_name(rng)
        return draw() if is_held_out_name(name) else name

    parts = []
    for start in range(0, len(lines), 40):
        names: defaultdict[str, str] = defaultdict(draw)
        part = "\n".join(lines[start : start + 40])
        parts.append(re.sub(NAME, lambda match, names=names: names[match[0]], part))
    return "\n".join(parts)
