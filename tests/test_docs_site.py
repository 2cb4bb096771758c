"""The documentation's site in a real browser: commands and names can be read where the window is 1,280 pixels wide."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from browser import CHROMIUM, chromium

ROOT = Path(__file__).parents[1]

SCROLLING = """
[...document.querySelectorAll('article pre > code')].filter((code) => code.scrollWidth > code.clientWidth + 1)
  .map((code) => code.textContent.slice(0, 80))
"""
# One word without a hyphen, so one line: more boxes than one are a word that is broken.
BROKEN = """
[...document.querySelectorAll('article td code, article th code')]
  .filter((code) => /^[A-Za-z0-9_.+]{1,24}$/.test(code.textContent) && code.getClientRects().length > 1)
  .map((code) => code.textContent)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_every_page_can_be_read_without_scrolling_sideways(tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)], cwd=ROOT, check=True)
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    assert site / "methods.html" in pages
    with chromium(tmp_path / "profile") as browser:
        for page in pages:
            browser.open(page, 1280)
            assert browser.value(SCROLLING) == [], page.name
            assert browser.value(BROKEN) == [], page.name
