"""A page as headless Chromium shows it, without a network."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--window-size=1400,900",
)
_CONSOLE = re.compile(r":CONSOLE[:(]\d+\)?\] \"(.*?)\", source:")

CONTROL = "the console is being read"

_HARNESS = """<!DOCTYPE html><meta charset="utf-8"><body>{frames}<pre id="result"></pre><script>
function facts(frame) {{
  const view = frame.contentWindow, page = frame.contentDocument, rects = new Map();
  const shown = [...page.querySelectorAll("svg.plot")].filter(svg => svg.getBoundingClientRect().height > 40);
  const textSizes = shown.flatMap(svg => [...svg.querySelectorAll("text")].map(text =>
    parseFloat(view.getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width));
  const outside = shown.flatMap(svg => [...svg.querySelectorAll("text")].filter(text => {{
    const inner = text.getBoundingClientRect(), outer = svg.getBoundingClientRect();
    return inner.left < outer.left - 2 || inner.right > outer.right + 2;
  }}).map(text => text.textContent));
  const mark = page.querySelector("[id$='narrow-point-decode-linear'] use, [id$='wide-point-decode-linear'] use");
  return {{
    plots: shown.map(svg => svg.closest("section").id),
    smallest_text_px: Math.min(...textSizes),
    text_outside: outside,
    overflow_px: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    background: view.getComputedStyle(page.body).backgroundColor,
    text_color: view.getComputedStyle(page.body).color,
    mark_color: view.getComputedStyle(mark).fill,
    resources: view.performance.getEntriesByType("resource").map(entry => entry.name),
    cells: page.querySelectorAll("td").length,
  }};
}}
onload = () => {{
  console.log({control});
  const all = [...document.querySelectorAll("iframe")].map(frame => [frame.width, facts(frame)]);
  document.getElementById("result").textContent = JSON.stringify(Object.fromEntries(all));
}};
</script>"""


def look_at(page: str, widths: tuple[int, ...], folder: Path, *, dark: bool) -> tuple[dict[str, Any], list[str]]:
    """What is to be seen at each width (by its digits), and what the console says.

    The console holds CONTROL, once, or it was not read.
    """
    assert CHROMIUM is not None
    frames = "".join(f'<iframe width="{width}" height="800" srcdoc="{html.escape(page)}"></iframe>' for width in widths)
    file = folder / "harness.html"
    file.write_text(_HARNESS.format(frames=frames, control=json.dumps(CONTROL)), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [CHROMIUM, *_FLAGS, scheme, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = re.search(r'<pre id="result">(.*?)</pre>', run.stdout, re.DOTALL)
    assert result is not None, run.stderr
    return json.loads(html.unescape(result.group(1))), _CONSOLE.findall(run.stderr)
