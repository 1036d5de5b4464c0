"""Numbers in sentences."""


def count(amount: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"
