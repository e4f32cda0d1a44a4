from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from numba_engine.text.stop import StopMatcher


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    """What each piece let out (the flush last), and the stop that matched."""
    matcher = StopMatcher(stops)
    out = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        out.append(text)
        if stop is not None:
            assert matcher.flush() == ""
            return out, stop
    return [*out, matcher.flush()], None


def first_match(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """By definition: the stop whose end comes first, then the longest; with the text before it."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text("abc\n🎉", max_size=30)
some_stops = st.lists(st.text("abc\n🎉", min_size=1, max_size=6), max_size=4).map(tuple)


@given(stops=some_stops, text=letters, data=st.data())
@settings(max_examples=500, deadline=None)
@example(stops=("abab", "b"), text="aabab", data=None)
def test_matches_do_not_depend_on_how_text_is_cut(
    stops: tuple[str, ...], text: str, data: st.DataObject | None
) -> None:
    expected = first_match(stops, text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text))))) if data else []
    edges = [0, *cuts, len(text)]
    for pieces in ([text], list(text), [text[a:b] for a, b in itertools.pairwise(edges)]):
        out, stop = run(stops, pieces)
        assert ("".join(out), stop) == expected


@given(stops=some_stops, text=letters)
@settings(max_examples=300, deadline=None)
def test_only_what_may_become_a_stop_is_held(stops: tuple[str, ...], text: str) -> None:
    text, _ = first_match(stops, text)
    if first_match(stops, text)[1] is not None:
        return
    matcher = StopMatcher(stops)
    out = ""
    for end, char in enumerate(text, start=1):
        out += matcher.push(char)[0]
        held = text[len(out) : end]
        suffixes = (text[i:end] for i in range(end))
        longest = next((s for s in suffixes if any(len(s) < len(p) and p.startswith(s) for p in stops)), "")
        assert held == longest


@pytest.mark.parametrize(
    ("stops", "pieces", "out", "stop"),
    [
        ((), ["a", "", "b"], ["a", "", "b", ""], None),
        (("STOP",), ["go ", "ST", "OP", "!"], ["go ", "", ""], "STOP"),
        (("STOP",), ["ST", "ART"], ["", "START", ""], None),
        (("STOP",), ["ends in ST"], ["ends in ", "ST"], None),
        (("aab",), ["aaa", "b"], ["a", ""], "aab"),
        (("\n\n",), ["x\n", "\ny"], ["x", ""], "\n\n"),
        (("abc", "b"), ["a", "bc"], ["", "a"], "b"),
        (("bc", "abc"), ["xab", "cd"], ["x", ""], "abc"),
        (("ab", "abcd"), ["abcd"], [""], "ab"),
        (("🎉!",), ["hi 🎉", "?"], ["hi ", "🎉?", ""], None),
        (("x", "x"), ["axb"], ["a"], "x"),
    ],
)
def test_examples(stops: tuple[str, ...], pieces: list[str], out: list[str], stop: str | None) -> None:
    assert run(stops, pieces) == (out, stop)


def test_long_stops_cost_no_more() -> None:
    stop = "a" * 1023 + "b"
    out, matched = run((stop,), ["a"] * 20_000 + ["b"])
    assert (len("".join(out)), matched) == (20_000 - 1023, stop)
