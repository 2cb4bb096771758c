"""The page without a mouse and on paper, in Chromium; and its table and curves while runs are not finished."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser, chromium
from made_runs import MakeRun
from vitfleet.report.figures.curves import comparison_figures
from vitfleet.report.figures.files import draw_files
from vitfleet.report.html.page import compared_names, cost_columns, render, report_figures, result_columns
from vitfleet.report.runs import read_groups
from vitfleet.run.records import read_records

PDF_TEXT = shutil.which("pdftotext")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
CURVES = (
    "Test accuracy",
    "Local test accuracy",
    "Test loss",
    "Training loss",
    "Upload per round",
    "Download per round",
)
HEADINGS = ("Learning curves", "Data partition", "Configurations")


def write_page(tmp_path: Path, *runs: Path) -> Path:
    groups = read_groups(runs)
    page = tmp_path / "report.html"
    page.write_text(render(groups, report_figures(groups), target=0.4))
    return page


def press(browser: Browser, key: str) -> None:
    codes = {"Tab": 9, "ArrowRight": 39, "ArrowDown": 40, "End": 35}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])


@needs_chromium
def test_charts_are_read_with_the_keyboard(make_run: MakeRun, tmp_path: Path) -> None:
    page = write_page(tmp_path, make_run("a"), make_run("c", method="transfl", tasks=2), make_run("d", method="eftvit"))
    with chromium(tmp_path / "profile") as browser:
        browser.open(page, 1200)
        reached = set()
        for _ in range(120):
            press(browser, "Tab")
            focused = "document.activeElement.closest('figure')?.id"
            if browser.value("document.activeElement.tagName") == "svg":
                reached.add(browser.value(focused))
        charts = set(browser.value("[...document.querySelectorAll('figure:has(.plot > svg)')].map((f) => f.id)"))
        assert reached == charts  # every chart is reached with the tab key alone
        browser.value("document.querySelector('#accuracy svg').focus()")
        for _ in range(2):
            press(browser, "ArrowRight")
        spoken = "document.querySelector('#accuracy .spoken').textContent"
        assert browser.value(spoken) == "round 2; FedAvg  20.0 %; TransFL  20.0 %; EFTViT  20.0 %"
        press(browser, "End")
        assert browser.value(spoken).startswith("round 5; FedAvg  50.0 %")
        assert browser.value("document.querySelector('#accuracy .tooltip').hidden") is False
        browser.value("document.querySelector('#partition-1 svg').focus()")
        for key in ("ArrowRight", "ArrowDown"):
            press(browser, key)
        counts = read_groups([tmp_path / "a"])[0].runs[0].partition
        assert counts is not None
        heard = browser.value("document.querySelector('#partition-1 .spoken').textContent")
        assert heard == f"client 1, class class 0; {counts['counts'][1][0]}"
        browser.value("document.querySelector('#accuracy .values summary').click()")
        browser.wait_for("document.querySelectorAll('#accuracy .values tbody tr').length === 5")
        row = browser.value("document.querySelector('#accuracy .values tbody tr:last-child').innerText")
        assert row.split("\t") == ["5", "50.0 %", "50.0 %", "50.0 %"]
        headings = "document.querySelector('#accuracy .values thead').innerText"
        by_round = browser.value(headings)
        browser.value("document.querySelector('#accuracy .axes button:last-child').click()")
        assert browser.value(headings) != by_round  # the open table follows the axis
        assert browser.errors == []


@needs_chromium
def test_no_labels_of_an_axis_overlap(make_run: MakeRun, tmp_path: Path) -> None:
    """The boxes of all texts of a line chart: "cross-entropy" was drawn over the highest tick."""
    page = write_page(tmp_path, make_run("a"), make_run("b", method="transfl"))
    texts_of = (
        "['test-loss', 'train-loss', 'upload'].flatMap((id) => [...document.querySelectorAll(`#${id} svg text`)])"
    )
    box = "((t, {left, right, top, bottom}) => [left, right, top, bottom, t.textContent])(t, t.getBoundingClientRect())"
    with chromium(tmp_path / "profile") as browser:
        for width in (400, 1400):
            browser.open(page, width)
            texts = [text for text in browser.value(f"{texts_of}.map((t) => {box})") if text[4]]
            assert "cross-entropy" in {text[4] for text in texts}
            for index, first in enumerate(texts):
                for second in texts[index + 1 :]:
                    beside = first[1] <= second[0] or second[1] <= first[0]
                    above = first[3] <= second[2] or second[3] <= first[2]
                    assert beside or above, f"{first[4]} overlaps {second[4]} at {width} px"


@needs_chromium
@pytest.mark.skipif(PDF_TEXT is None, reason="pdftotext is not installed (Debian: apt-get install poppler-utils)")
def test_printed_report_has_legends_the_whole_table_and_no_heading_at_the_end_of_a_page(
    make_run: MakeRun, tmp_path: Path
) -> None:
    runs = [make_run("a", seed=0), make_run("b", seed=1), *(make_run(m, method=m) for m in ("transfl", "eftvit"))]
    page, printed = write_page(tmp_path, *runs), tmp_path / "report.pdf"
    with chromium(tmp_path / "profile") as browser:
        browser.open(page, 1400)
        headings = browser.value("[...document.querySelectorAll('main > .scroll thead th')].map((t) => t.innerText)")
        browser.print_pdf(printed)
    assert PDF_TEXT is not None
    text = subprocess.run([PDF_TEXT, "-layout", printed, "-"], capture_output=True, text=True, check=True).stdout
    pages = [page for page in text.split("\f") if page.strip()]
    assert len(pages) > 1
    words = re.sub(r"[\s\xa0]+", "", pages[0])
    for heading in headings:  # a cut-off column would be missing
        assert set(re.findall(r"\w+", heading)) <= set(re.findall(r"\w+", pages[0])), heading
    assert "40%" in words  # the accuracy that rounds and traffic are counted to
    assert any(title in pages[0] for title in CURVES), "half of the first page is empty"
    names = ("FedAvg", "TransFL", "EFTViT")
    pages_with_curves = 0
    for content in pages:
        lines = [line.strip() for line in content.splitlines() if line.strip()]
        assert not lines[-1].startswith(HEADINGS)
        assert not any(lines[-1].startswith(f"{name} ") for name in names)  # the title of a configuration
        if curves := [title for title in CURVES if title in content]:
            pages_with_curves += 1
            for name in names:  # a legend below each chart
                assert content.count(name) >= len(curves), f"{name} is not in every legend of {curves}"
    assert pages_with_curves > 1


def test_live_table_fills_with_the_rounds_so_far(make_run: MakeRun) -> None:
    groups = read_groups([make_run("a", finished_rounds=3), make_run("b", method="transfl")])
    shown = (*result_columns(groups, target=0.3), *cost_columns(groups))
    columns = {column.heading: column.cells for column in shown}
    assert columns["rounds"] == ["3 of 5", "5 of 5"]
    assert columns["test accuracy, %"] == ["30.0", "50.0"]
    assert columns["local test accuracy, %"] == ["15.0", "25.0"]
    assert columns["upload"] == ["1000 B", "1000 B"]
    assert columns["rounds to 30%"] == ["3.0", "3.0"]
    assert columns["trained parameters"] == ["–", "50"]  # of a finished run only


def test_a_seed_that_missed_the_target_leaves_no_mean(make_run: MakeRun) -> None:
    groups = read_groups([make_run("a"), make_run("b", seed=1, finished_rounds=2)])
    columns = {column.heading: column.cells for column in result_columns(groups, target=0.4)}
    assert "rounds to 40%" not in columns
    assert columns["test accuracy, %"] == ["35.5 ± 20.5"]  # 50 % after five rounds, 21 % after two


def test_local_accuracy_at_the_end_of_the_curve_is_that_of_the_table(make_run: MakeRun) -> None:
    """The last accuracy of every client counts, also of clients that were not in the last round."""
    run = make_run("a")
    lines = (run / "records.jsonl").read_text().splitlines()
    lines[-1] = lines[-1].replace('"client":1,', '"client":5,').replace('"client": 1,', '"client": 5,')
    (run / "records.jsonl").write_text("\n".join(lines) + "\n")
    (run / "summary.json").unlink()
    last: dict[int, float] = {}
    for record in read_records(run):
        last |= {client.client: client.accuracy for client in record.clients if client.accuracy is not None}
    assert set(last) == {0, 1, 2, 5}
    groups = read_groups([run])
    chart = next(figure for figure in comparison_figures(groups) if figure.id == "local-accuracy")
    end = chart.views[0].curves[0].y[-1]
    assert end is not None
    assert end == pytest.approx(statistics.mean(last.values()))
    columns = {column.heading: column.cells for column in (*result_columns(groups), *cost_columns(groups))}
    assert columns["local test accuracy, %"] == [f"{100 * end:.1f}"]


def test_files_of_figures_have_the_method_in_their_names(make_run: MakeRun, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    groups = read_groups([make_run("a"), make_run("b", method="transfl")])
    figures = report_figures(groups)
    written = draw_files(figures["curves"][0], tmp_path, compared_names(groups), endings=("pdf",))
    assert "accuracy-by-rounds-fedavg-transfl.pdf" in {path.name for path in written}
    assert all(figure.id.startswith("transfl-") for figure in figures["configuration-2"])
    many = groups * 8
    assert compared_names(many) == "16-configurations"
    ids = [figure.id for section in report_figures(many).values() for figure in section]
    assert len(ids) == len(set(ids))  # also of configurations with the same label
