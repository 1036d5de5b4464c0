"""Labelled reviews that a seeded grammar makes up: text to classify where nothing can be downloaded.

They stand in for Yelp Review Full (Zhang et al., 2015): one to five stars, told by words of five strengths about what a
review praises and complains of. Nobody wrote them, and an accuracy on them says nothing of accuracy on real text.
"""

from __future__ import annotations

import random

NUM_CLASSES = 5

_PLACES = ["diner", "bakery", "hotel", "garage", "salon", "bookshop", "cinema", "pharmacy", "brewery", "gym"]
_ASPECTS = {
    "food": ["soup", "bread", "pasta", "coffee", "dessert", "salad", "breakfast"],
    "service": ["waiter", "staff", "manager", "cashier", "host"],
    "place": ["room", "terrace", "parking", "music", "lighting", "kitchen"],
    "value": ["price", "bill", "menu", "discount"],
}
_OPINIONS = (
    ["horrible", "disgusting", "filthy", "insulting", "unbearable", "atrocious"],
    ["poor", "disappointing", "slow", "stale", "careless", "overpriced"],
    ["average", "ordinary", "acceptable", "plain", "unremarkable", "passable"],
    ["good", "pleasant", "tasty", "friendly", "tidy", "reliable"],
    ["superb", "wonderful", "delightful", "flawless", "outstanding", "magnificent"],
)
_ENDINGS = (
    ("I will never come back.", "Stay away from here.", "I want my money back."),
    ("I doubt that I will return.", "There are better ones nearby.", "I expected more."),
    ("It does the job.", "Neither good nor bad.", "I may come again."),
    ("I would come again.", "Worth a visit.", "We left content."),
    ("I cannot wait to return.", "The best in town.", "Everybody should come here."),
)
_NEUTRAL = (
    "We came on a {day} with my {person}.",
    "My {person} chose the {item}.",
    "They open at {hour} on a {day}.",
    "It was our {count} visit to this {place}.",
)
_WORDS = {
    "day": ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"],
    "person": ["brother", "neighbour", "colleague", "daughter", "friend", "cousin"],
    "hour": ["seven", "eight", "nine", "ten", "noon"],
    "count": ["first", "second", "third", "fourth"],
}


def review(index: int, seed: int) -> tuple[str, int]:
    """Text and label (0 to 4: one to five stars) of review `index`, which depends on the seed and the index alone."""
    draw = random.Random(f"{seed}/{index}")
    label = draw.randrange(NUM_CLASSES)
    place = draw.choice(_PLACES)
    sentences = [_opinion(draw, label) for _ in range(draw.randint(1, 4))]
    sentences += [_neutral(draw, place) for _ in range(draw.randint(0, 3))]
    draw.shuffle(sentences)
    if draw.random() < 0.5:
        sentences.append(draw.choice(_ENDINGS[label]))
    return " ".join(sentences), label


def _opinion(draw: random.Random, label: int) -> str:
    """A sentence about one thing, or about two of which the second weighs more."""
    item, other = (draw.choice(_ASPECTS[draw.choice(list(_ASPECTS))]) for _ in range(2))
    word = draw.choice(_OPINIONS[label])
    if draw.random() < 0.25:
        aside = draw.choice(_OPINIONS[min(max(label + draw.choice((-1, 1)), 0), NUM_CLASSES - 1)])
        return f"The {other} was {aside}, but above all the {item} was {word}."
    return draw.choice((f"The {item} was {word}.", f"What a {word} {item}.", f"We found the {item} {word}."))


def _neutral(draw: random.Random, place: str) -> str:
    item = draw.choice(_ASPECTS[draw.choice(list(_ASPECTS))])
    words = {name: draw.choice(values) for name, values in _WORDS.items()}
    return draw.choice(_NEUTRAL).format(item=item, place=place, **words)
