"""Which cases of the kernel tests ``make test`` runs: a fixed choice that meets every pair; ``--all-cases`` runs all.

A kernel test is a product of storage formats, shapes, rows and instruction sets, and each new format multiplies it.
Most faults show in one value or in a pair of them (Kuhn et al. 2004), so the choice holds, of each file,

- every test function with every value of each of its parameters but the format,
- every pair of values of two parameters that meet in some test, formats included,
- every format.

It is worked out from the list of cases alone, in their order, so it is the same everywhere until a case is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

_FORMAT = "format"


def chosen(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Of the cases of one file: repeatedly the case that meets most of what no other has met yet."""
    wanted = {item: set(_meetings(item)) for item in items}
    left = set().union(*wanted.values())
    choice = set()
    while left:
        best = max(items, key=lambda item: len(wanted[item] & left))
        choice.add(best)
        left -= wanted[best]
    return choice


def _meetings(item: pytest.Item) -> Iterator[tuple[object, ...]]:
    """What the case is there for: its function, its values, and their pairs."""
    function = getattr(item, "originalname", item.name)
    yield (function,)
    values = _values(item)
    for name, value in values:
        yield (_FORMAT, value) if name.startswith(_FORMAT) else (function, name, value)
    yield from combinations(values, 2)


def _values(item: pytest.Item) -> list[tuple[str, str]]:
    spec = getattr(item, "callspec", None)
    if spec is None:
        return []
    return [(name, repr(getattr(value, "name", value))) for name, value in sorted(spec.params.items())]
