"""The HTML report: figures where they belong, nothing from elsewhere, readable in a real browser."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from numba_engine.profiling.html_report import render_html
from numba_engine.profiling.journey import counted_journey, token_journey
from numba_engine.profiling.phases import phase_profiles
from numba_engine.profiling.plots import NUM_OP_COLORS, op_keys
from numba_engine.profiling.recorder import summarize
from tests.profiling.chromium import CHROMIUM, CONTROL, look_at
from tests.profiling.sample_profile import (
    ATTENTION,
    COUNTED_STEPS,
    COUNTED_SUMMARY,
    DECODE_STEP,
    LINEAR,
    MODEL,
    PREFILL_STEP,
    STEPS,
    SUMMARY,
    peaks,
)

VOID = {"meta", "link", "br", "img", "input", "hr"}
LINKS = {"src", "href", "srcset", "xlink:href", "action", "data", "poster"}


class Page(HTMLParser):
    """Elements checked for balance; links, ids and the text of table cells collected."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in LINKS]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def row(self, name: str, occurrence: int = 0) -> list[str]:
        return [row for row in self.rows if row and row[0] == name][occurrence]


@pytest.fixture(scope="module")
def text() -> str:
    return render_html(MODEL, STEPS, SUMMARY)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def svg(text: str, section: str, width: str = "wide") -> ElementTree.Element:
    inside = text[text.index(f'<section id="{section}"') :]
    inside = inside[inside.index(f'<div class="{width}">') :]
    return ElementTree.fromstring(inside[inside.index("<svg") : inside.index("</svg>") + len("</svg>")])


def group(drawing: ElementTree.Element, id: str) -> ElementTree.Element:
    return next(element for element in drawing.iter() if element.get("id") == id)


def path_of(element: ElementTree.Element) -> list[tuple[float, float]]:
    path = next(element.iter("path")).attrib["d"]
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", path)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def span(element: ElementTree.Element) -> tuple[float, float]:
    """Left and right end of a bar."""
    xs = [x for x, _ in path_of(element)]
    return min(xs), max(xs)


# ---- one file that needs nothing else --------------------------------------------------------------------------------


def test_nothing_is_loaded_from_anywhere(text: str, page: Page) -> None:
    assert not re.search(r"https?://|//[a-z0-9.-]+/|@import|url\((?!#)", text)
    assert page.links, "the marks of the plots are references inside the page"
    assert all(link.startswith("#") for link in page.links)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert "default-src 'none'" in text


def test_ids_are_unique_and_references_have_their_target(text: str, page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    targets = {link[1:] for link in page.links} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert len(targets) > 4
    assert targets <= set(page.ids)


def test_names_cannot_become_markup(text: str) -> None:
    assert "&lt;tiny&gt; &amp; co" in text
    assert "<tiny>" not in text


def test_the_same_profile_gives_the_same_page(text: str) -> None:
    assert render_html(MODEL, STEPS, SUMMARY) == text


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_headline_numbers(text: str) -> None:
    values = dict(re.findall(r'<dt>(.*?)</dt>\s*<dd class="value">(.*?)</dd>', text))
    assert values == {
        "decode": "97.1 tok/s",
        "prefill": "333.3 tok/s",
        "read bandwidth": "31.0 GB/s",
        "bytes a token": "93.0 MB",
        "floor": "3.00 ms",
        "share of the floor": "29%",
        "arithmetic peak": "400 GFLOP/s",
        "arithmetic idle": "95.7%",
        "launch gaps": "0.0 µs",
        "decode bandwidth": "8.6 GB/s",
        "decode intensity": "2.00",
        "host": "13.4%",
        "cost of looking": "200.0 µs",
    }


def test_every_figure_says_where_it_is_from(text: str, page: Page) -> None:
    bases = re.findall(r'class="basis">(.*?)<', text)
    assert all("measured" in basis or "by formula" in basis or "counted" in basis for basis in bases[:14])
    for row in (row for row in page.rows if row[0] in ("op", "level", "step")):
        for cell in row[1:]:
            said = ("measured", "by formula", "counted", "calibrated")
            assert any(basis in cell for basis in said) or cell == "phase"


def test_tables_hold_the_numbers(page: Page) -> None:
    prefill, decode = page.row("1 linear"), page.row("1 linear", 1)
    assert prefill[1:4] == ["61", "15.00 ms", "71.4%"]
    assert decode[1:] == [
        "183", "18.00 ms", "54.7%", "270.0 MB", "0 B", "900.0 kB", "541.8 M", "2.00", "30.10", "15.05",
        "49% latency",
    ]  # fmt: skip
    assert page.row("host", 1)[2:4] == ["4.40 ms", "13.4%"]
    assert page.row("main memory")[1:] == ["90.0 MB", "3.0 MB", "0 B", "93.0 MB", "3.00 ms"]
    assert page.row("registers")[1:5] == ["90.0 MB", "3.0 MB", "992.2 kB", "94.0 MB"]
    assert page.row("3")[1:8] == ["decode", "1", "1", "12.30 ms", "9.50 ms", "2.80 ms", "200.0 µs"]


@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_roofline_points_lie_where_their_numbers_say(text: str, width: str) -> None:
    """The bandwidth line gives the scale: it goes from half the least intensity to the ridge."""
    drawing = svg(text, "roofline", width)
    line = path_of(group(drawing, f"roofline-{width}-bandwidth-line"))
    points = {
        "point-prefill-linear": (14.0, 84.28),
        "point-prefill-attention": (2.0, 1.8),
        "point-decode-linear": (2.0, 30.1),
        "point-decode-attention": (2.0, 2.4),
    }
    intensities = [LINEAR.flops * 7 / LINEAR.total_bytes, ATTENTION.flops / ATTENTION.total_bytes]
    assert intensities == [14.0, 2.0]
    (x0, y0), (x1, y1) = line[0], line[-1]
    for name, (intensity, gflops) in points.items():
        use = next(group(drawing, f"roofline-{width}-{name}").iter("use"))
        x = x0 + (x1 - x0) * math.log(intensity / 1.0) / math.log(400 / 31)
        y = y0 + (y1 - y0) * math.log(gflops / 31.0) / math.log(400 / 31)
        assert (float(use.attrib["x"]), float(use.attrib["y"])) == pytest.approx((x, y), abs=0.01)
    level = path_of(group(drawing, f"roofline-{width}-arithmetic-line"))
    assert level[0] == pytest.approx((x1, y1), abs=0.01)
    assert level[-1] == pytest.approx((x0 + (x1 - x0) * math.log(28.0) / math.log(400 / 31), y1), abs=0.01)
    ids = {element.get("id") or "" for element in drawing.iter()}
    assert not any("store_kv" in id for id in ids), "without arithmetic there is no such point"
    assert "Without arithmetic, and so not here: store_kv." in text


def test_points_and_bars_carry_a_note(text: str) -> None:
    note = next(group(svg(text, "roofline"), "roofline-wide-point-decode-linear").iter("title")).text
    assert note == "linear, decode: 2 FLOP/byte, 30.1 GFLOP/s, 15.0 GB/s"
    share = next(group(svg(text, "phases"), "phases-wide-share-prefill-host").iter("title")).text
    assert share == "host, prefill: 2.00 ms, 9.5%"


def test_bars_are_as_long_as_the_shares(text: str) -> None:
    drawing = svg(text, "phases")
    shares = {"prefill": {"linear": 15, "attention": 4, "host": 2}}
    shares["decode"] = {"linear": 18, "attention": 9, "store_kv": 1.5, "host": 4.4}
    for phase, times in shares.items():
        spans = {name: span(group(drawing, f"phases-wide-share-{phase}-{name}")) for name in times}
        whole = max(right for _, right in spans.values()) - min(left for left, _ in spans.values())
        for name, (left, right) in spans.items():
            assert (right - left) / whole == pytest.approx(times[name] / sum(times.values()), abs=1e-4)
        at = min(left for left, _ in spans.values())
        for left, right in sorted(spans.values()):
            assert left == pytest.approx(at, abs=0.01)
            at = right


def test_the_journey_has_the_bytes_of_each_level(text: str) -> None:
    drawing = svg(text, "journey")

    def length(level: str, kind: str) -> float:
        left, right = span(group(drawing, f"journey-wide-bytes-{level}-{kind}"))
        return right - left

    weights = length("main-memory", "weights")
    assert length("main-memory", "kv") / weights == pytest.approx(3_046_080 / 90_000_000, abs=1e-4)
    assert length("main-memory", "activations") == 0
    assert length("caches", "activations") / weights == pytest.approx(992_160 / 90_000_000, abs=1e-4)
    assert length("registers", "weights") == pytest.approx(weights, abs=0.01)


def test_a_gpu_has_other_levels() -> None:
    names = [level.name for level in token_journey(STEPS[1].ops, 1, "ptx")]
    assert names == ["device memory", "L2 cache", "shared memory", "registers"]
    assert counted_journey(STEPS[1].ops, 1) == ()


def test_the_timeline_has_every_step_in_its_length(text: str) -> None:
    drawing = svg(text, "timeline")
    spans = [span(group(drawing, f"timeline-wide-step-{index}")) for index in range(4)]
    lengths = [right - left for left, right in spans]
    assert [length / lengths[0] for length in lengths] == pytest.approx([1, 10.3 / 21, 10.3 / 21, 12.3 / 21], abs=1e-3)
    for (_, right), (left, _) in itertools.pairwise(spans):
        assert left == pytest.approx(right, abs=0.01)
    assert any(element.get("id") == "timeline-wide-floor-line" for element in drawing.iter())


def test_a_floor_of_a_token_is_none_of_a_step_with_more() -> None:
    batch = replace(DECODE_STEP, num_seqs=3, num_decode_tokens=3)
    text = render_html(MODEL, [batch], summarize([batch], peaks=peaks(31.0)))
    assert "timeline-wide-floor-line" not in text


def test_prefill_alone_and_no_bandwidth() -> None:
    text = render_html(MODEL, [PREFILL_STEP], summarize([PREFILL_STEP], peaks=peaks(0.0)))
    page = Page(text)
    assert [row[0] for row in page.rows if row[0][0].isdigit()] == ["1 linear", "2 attention", "0"]
    assert 'id="journey"' not in text
    assert "bandwidth-line" not in text
    assert page.row("1 linear")[-1] == "–"


def test_more_ops_than_colours_share_one() -> None:
    ops = tuple(replace(LINEAR, name=f"op_{number}", time_s=0.02 - number / 1000) for number in range(11))
    step = replace(DECODE_STEP, ops=ops, time_s=0.2)
    keys = op_keys(phase_profiles([step]))
    assert [key.number for key in keys.values()] == list(range(1, 12))
    assert [key.variable for key in keys.values()][NUM_OP_COLORS - 1 :] == ["op7", "other", "other", "other", "other"]
    text = render_html(MODEL, [step], summarize([step], peaks=peaks(31.0)))
    left, right = span(group(svg(text, "phases"), "phases-wide-share-decode-other-ops"))
    host_left, host_right = span(group(svg(text, "phases"), "phases-wide-share-decode-host"))
    other_s = sum(op.time_s for op in ops[7:])
    assert (right - left) / (host_right - host_left) == pytest.approx(other_s / step.host_time_s, rel=1e-3)
    assert "other ops: op_7, op_8, op_9, op_10" in text


# ---- to be seen ------------------------------------------------------------------------------------------------------


def palettes(text: str) -> list[dict[str, str]]:
    return [
        dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", text, re.S)
    ]


def contrast(a: str, b: str) -> float:
    """WCAG 2.2 contrast ratio."""

    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_in_light_and_dark(text: str) -> None:
    """4.5 for text and for marks that have text on them, as WCAG 2.2 AA has it."""
    light, dark = palettes(text)
    assert light.keys() == dark.keys()
    assert all(light[name] != dark[name] for name in light)
    for palette in (light, dark):
        for name, color in palette.items():
            if name not in ("page", "surface", "grid"):
                assert contrast(color, palette["surface"]) >= 4.5, name
        for name in ("ink", "muted"):
            assert contrast(palette[name], palette["page"]) >= 4.5
    used = set(re.findall(r"var\(--([a-z0-9]+)\)", text))
    assert used <= light.keys()


def test_no_colour_is_fixed_in_a_plot(text: str) -> None:
    colors = {
        value for block in re.findall(r"<svg.*?</svg>", text, re.S) for value in re.findall(r"#[0-9a-f]{6}\b", block)
    }
    assert colors == set()


in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")


@in_browser
@pytest.mark.parametrize(
    ("dark", "background", "ink", "op1"),
    [
        (False, "rgb(244, 245, 247)", "rgb(22, 25, 29)", "rgb(31, 102, 193)"),
        (True, "rgb(14, 17, 22)", "rgb(232, 234, 237)", "rgb(110, 168, 255)"),
    ],
    ids=["light", "dark"],
)
def test_in_a_browser_without_network(
    text: str, tmp_path: Path, dark: bool, background: str, ink: str, op1: str
) -> None:
    seen, console = look_at(text, (360, 1200), tmp_path, dark=dark)
    assert console == [CONTROL], "the page itself gives the console nothing to say"
    for width in ("360", "1200"):
        facts = seen[width]
        assert facts["plots"] == ["roofline", "phases", "journey", "timeline"]
        assert facts["smallest_text_px"] >= 9.5
        assert facts["text_outside"] == []
        assert facts["overflow_px"] == 0
        assert facts["resources"] == []
        assert (facts["background"], facts["text_color"], facts["mark_color"]) == (background, ink, op1)
        assert facts["cells"] == 3 * 11 + 4 * 11 + 3 * 5 + 4 * 9


@in_browser
def test_what_was_counted_and_each_call_in_a_browser(tmp_path: Path) -> None:
    text = render_html(replace(MODEL, backend="ptx"), COUNTED_STEPS, COUNTED_SUMMARY)
    assert "Times are predicted" in text
    assert "Each launch is taken to cost 1.3 µs" in text
    page = Page(text)
    assert page.row("1 linear", 1) == [
        "1 linear", "61", "90.3 MB", "90.4 MB", "1.0011", "98.0 MB", "40.0 MB", "330", "137.0 MB", "5.0 M",
    ]  # fmt: skip
    assert page.row("L2 cache")[1:] == [
        "90.0 MB", "0 B", "300.0 kB", "90.3 MB", "91.0 MB", "0 B", "7.0 MB", "20 B", "98.0 MB", "–",
    ]  # fmt: skip
    journey = svg(text, "journey")
    left, right = span(group(journey, "journey-wide-counted-l2-cache-weights"))
    of_formula = span(group(journey, "journey-wide-bytes-l2-cache-weights"))
    assert (right - left) / (of_formula[1] - of_formula[0]) == pytest.approx(91 / 90, abs=1e-3)
    calls = svg(text, "calls")
    first, second = (span(group(calls, f"calls-wide-call-{place}-linear")) for place in (0, 1))
    assert (second[0] - first[0]) / (first[1] - first[0]) == pytest.approx(2.0, abs=1e-2)
    seen, console = look_at(text, (360, 1200), tmp_path, dark=False)
    assert console == [CONTROL]
    for width in ("360", "1200"):
        facts = seen[width]
        assert facts["plots"] == ["roofline", "phases", "journey", "timeline", "calls"]
        assert facts["smallest_text_px"] >= 9.5
        assert (facts["text_outside"], facts["overflow_px"], facts["resources"]) == ([], 0, [])


@in_browser
def test_the_browser_would_tell_of_anything_loaded(text: str, tmp_path: Path) -> None:
    with_image = text.replace("<main>", '<main><img src="https://example.invalid/a.png">')
    _, console = look_at(with_image, (360,), tmp_path, dark=False)
    assert any("https://example.invalid/a.png" in message for message in console)
