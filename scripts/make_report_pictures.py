"""Take the pictures of a report that the documentation shows, in Chromium: wide, dark, narrow and printed.

Example::

    vitfleet run --out runs/first
    python scripts/make_report_pictures.py runs/first/report.html docs/img

It needs Chromium and, for the printed pages, pdftoppm.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import Browser, chromium

WIDE, NARROW = (1280, 1060), (390, 844)
PRINTED_PAGES = 2
DOTS_PER_INCH = 75
GAP = 12  # pixels between two printed pages
# The first curves with what the keyboard reads from them.
READ_FOURTH_POINT = """
const chart = document.querySelector('.plot svg');
chart.focus({ preventScroll: true });
for (let i = 0; i < 4; i += 1) chart.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }));
"""


def print_pages(browser: Browser, folder: Path) -> Image.Image:
    """Print the page and return its first pages beside each other."""
    pdf = folder / "report.pdf"
    browser.print_pdf(pdf)
    count = ["-l", str(PRINTED_PAGES), "-r", str(DOTS_PER_INCH)]
    subprocess.run(["pdftoppm", "-png", *count, str(pdf), str(folder / "page")], check=True)
    pages = [Image.open(path).convert("RGB") for path in sorted(folder.glob("page-*.png"))]
    width = sum(page.width for page in pages) + GAP * (len(pages) - 1)
    beside = Image.new("RGB", (width, pages[0].height), "#949494")
    left = 0
    for page in pages:
        beside.paste(page, (left, 0))
        left += page.width + GAP
    return beside


def main() -> None:
    """Take all pictures."""
    report, out = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with chromium(folder / "profile") as browser:
            for picture, size, dark in (("report", WIDE, False), ("report-dark", WIDE, True)):
                browser.open(report, *size, dark=dark)
                browser.value(READ_FOURTH_POINT)
                browser.screenshot(out / f"{picture}.png", whole=False)
            browser.open(report, *NARROW)
            browser.screenshot(out / "report-narrow.png", whole=False)
            browser.open(report, *WIDE)
            print_pages(browser, folder).save(out / "report-printed.png", optimize=True)


if __name__ == "__main__":
    main()
