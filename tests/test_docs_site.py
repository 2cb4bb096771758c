"""The documentation's site in a real browser: commands and tables can be read in wide and in narrow windows."""

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
# Words of tables without a hyphen that are in more than one line.
BROKEN = """
[...document.querySelectorAll('article td, article th')].flatMap((cell) => {
  const found = [], texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    for (const word of texts.currentNode.textContent.matchAll(/[A-Za-z0-9_.+]{2,24}/g)) {
      const range = document.createRange();
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) found.push(word[0]);
    }
  }
  return found;
})
"""
# Whether the page itself can be scrolled sideways; a wide table scrolls inside its own box.
WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


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
            for width in (1280, 390):
                browser.open(page, width)
                assert browser.value(SCROLLING) == [], page.name
                assert browser.value(BROKEN) == [], page.name
                assert not browser.value(WIDER), page.name
