"""Numbers with their nouns, for sentences that a person reads: `1 update`, `1,200 updates`, `every step`."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """The number and its noun. `plural`: the noun for any number but 1, if an s does not make it."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def every(count: int, noun: str) -> str:
    """`every step`, or `every 10 steps`."""
    return f"every {noun}" if count == 1 else f"every {counted(count, noun)}"
