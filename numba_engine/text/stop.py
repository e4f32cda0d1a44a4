"""StopMatcher: finds stop strings in text that arrives in pieces, holding back as little as possible."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of some stop string in the automaton of Aho and Corasick (1975)."""

    depth: int
    match: str | None = None
    """The longest stop that ends here."""
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    """The longest proper suffix of this prefix that is itself a prefix of some stop; None at the root."""


class StopMatcher:
    """Watches one sequence's text for stop strings.

    The stop that is complete first wins; if several complete with the same character, the longest. What is emitted and
    which stop matches do not depend on how the text is cut into pieces. Costs O(characters), whatever the stops are.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string would match before any text"
        self._root = self._state = _build(stops)
        self._held = ""  # the longest suffix of the text so far that is a proper prefix of some stop
        self._matched = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns (text that is safe to emit, the stop that matched or None).

        On a match the emitted text ends where the match begins, and nothing may be pushed after it.
        """
        assert not self._matched, "text after a match"
        if not self._root.children:
            return text, None
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._step(self._state, char)
            if (stop := self._state.match) is not None:
                self._matched = True
                self._held = ""
                return seen[: end - len(stop)], stop
        safe = len(seen) - self._state.depth
        self._held = seen[safe:]
        return seen[:safe], None

    def flush(self) -> str:
        """The text held back, when no more follows; empty after a match."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _step(self, state: _Node, char: str) -> _Node:
        while (following := state.children.get(char)) is None:
            if state.fallback is None:
                return state
            state = state.fallback
        return following


def _build(stops: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(node.depth + 1))
        node.match = stop
    waiting = deque([root])
    while waiting:  # breadth first, so that a node's fallback is finished before the node
        parent = waiting.popleft()
        for char, node in parent.children.items():
            fallback = parent.fallback
            while fallback is not None and char not in fallback.children:
                fallback = fallback.fallback
            node.fallback = root if fallback is None else fallback.children[char]
            node.match = node.match or node.fallback.match
            waiting.append(node)
    return root
