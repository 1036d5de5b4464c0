"""The made-up reviews: reproducible, balanced, and told apart by what they say."""

from __future__ import annotations

from collections import Counter

from raybench.data.reviews import NUM_CLASSES, review


def test_a_review_depends_on_seed_and_number_alone():
    assert [review(i, 3) for i in range(20)] == [review(i, 3) for i in reversed(range(20))][::-1]
    assert [review(i, 3) for i in range(20)] != [review(i, 4) for i in range(20)]


def test_classes_are_balanced_and_texts_differ():
    drawn = [review(i, 42) for i in range(2000)]
    counts = Counter(label for _, label in drawn)
    assert set(counts) == set(range(NUM_CLASSES))
    assert min(counts.values()) > 0.8 * 2000 / NUM_CLASSES
    assert len({text for text, _ in drawn}) > 1900


def test_no_word_alone_tells_the_class_but_the_words_do():
    """Naive Bayes over words tells most held-out reviews, and not all: some praise in order to complain."""
    import math

    words: dict[int, Counter[str]] = {label: Counter() for label in range(NUM_CLASSES)}
    for index in range(2000):
        text, label = review(index, 1)
        words[label].update(set(text.lower().replace(".", "").replace(",", "").split()))
    right = 0
    for index in range(5000, 5500):
        text, label = review(index, 1)
        own = set(text.lower().replace(".", "").replace(",", "").split())
        scores = {c: sum(math.log((words[c][w] + 1) / 500) for w in own) for c in words}
        right += max(scores, key=lambda c: scores[c]) == label
    assert 0.8 < right / 500 <= 1.0
