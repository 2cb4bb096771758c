from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from browser import CHROMIUM, chromium
from made_runs import MakeRun
from vitfleet.report.html.page import render, report_figures, report_folder, watch_report, write_report
from vitfleet.report.runs import read_groups

WIDTHS = (390, 1440)


def page_of(*runs: Path) -> str:
    groups = read_groups(runs)
    return render(groups, report_figures(groups))


def test_page_has_no_external_resources(make_run: MakeRun) -> None:
    page = page_of(make_run("a"))
    addresses = set(re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'>)\s]+)""", page))
    assert all(address.startswith(("#", "data:", "`data:")) for address in addresses), addresses


def test_page_escapes_names(make_run: MakeRun) -> None:
    page = page_of(make_run("a"))
    assert "<made>" not in page  # the title
    assert "fedavg &amp; &lt;made&gt;" in page
    data = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["groups"] == [{"label": "FedAvg"}]


def test_summary_table_marks_best_and_omits_unknown_columns(make_run: MakeRun) -> None:
    page = page_of(make_run("a", seed=0), make_run("b", method="transfl", seed=7), make_run("c", seed=1))
    assert '<td class="best">57.0</td>' in page
    assert "<td>50.5 ± 0.7</td>" in page
    assert "forgetting, %" not in page


def test_cells_that_print_the_same_are_bold_together(make_run: MakeRun) -> None:
    runs = [make_run("a"), make_run("b", method="transfl"), make_run("c", method="eftvit")]
    for run, accuracy in zip(runs, (0.95411, 0.95433, 0.9), strict=True):
        summary = json.loads((run / "summary.json").read_text())
        summary["accuracy"]["global"] = accuracy
        (run / "summary.json").write_text(json.dumps(summary))
    assert page_of(*runs).count('<td class="best">95.4</td>') == 2


def test_best_is_among_comparable_configurations(make_run: MakeRun) -> None:
    runs = [make_run("a", seed=0), make_run("b", method="transfl", seed=2)]
    on_tasks = make_run("c", method="fed-head", seed=9, tasks=2)
    page = page_of(*runs, on_tasks)
    assert '<td class="best">52.0</td>' in page
    assert "<td>59.0</td>" in page  # higher, but of a run on tasks
    assert "bold: the best of the rows that have the same data" in page
    assert "bold:" not in page_of(*runs)


def test_page_contains_command_and_configuration(make_run: MakeRun) -> None:
    page = page_of(make_run("a"))
    assert "<pre>vitfleet run made</pre>" in page
    assert "&quot;warmup_rounds&quot;: 0" in page


@pytest.mark.usefixtures("without_figure_files")
def test_report_folder_is_that_of_a_single_run_or_a_new_one(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run, other = make_run("a"), make_run("b", method="fedprox")
    assert write_report([run]) == run / "report.html"
    assert report_folder([run, other], None) == Path("runs/report-001")
    assert report_folder([run, other], tmp_path / "here") == tmp_path / "here"


@pytest.mark.usefixtures("without_figure_files")
def test_watched_page_refreshes_until_runs_are_finished(make_run: MakeRun) -> None:
    run, whole = make_run("a", finished_rounds=2), make_run("whole")
    pages: list[str] = []

    def finish_run(seconds: float) -> None:
        pages.append((run / "report.html").read_text())
        for name in ("records.jsonl", "summary.json"):
            (run / name).write_bytes((whole / name).read_bytes())

    announced: list[Path] = []
    page = watch_report([run], announce=announced.append, wait=finish_run)
    assert len(pages) == 1
    assert 'http-equiv="refresh"' in pages[0]
    assert "live: 2 of 5 rounds" in pages[0]
    assert announced == [page]
    assert 'http-equiv="refresh"' not in page.read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)")
def test_page_works_in_chromium(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        make_run("a", seed=0),
        make_run("b", seed=1),
        make_run("c", method="transfl", tasks=2),
        make_run("d", method="eftvit"),
    ]
    page = tmp_path / "report.html"
    page.write_text(page_of(*runs))
    empty = "[...document.querySelectorAll('figure')].filter((f) => !f.querySelector('.mark')).map((f) => f.id)"
    with chromium(tmp_path / "profile") as browser:
        for width in WIDTHS:
            browser.open(page, width, dark=width == WIDTHS[0])
            assert browser.value("document.documentElement.scrollWidth") == width  # nothing overflows
            assert browser.value("document.querySelectorAll('figure').length") >= 15
            assert browser.value(empty) == []
            assert browser.value("document.querySelectorAll('#accuracy path.mark').length") == 3
            assert browser.value("document.querySelectorAll('#accuracy path.band').length") == 1
        before = browser.value("document.querySelector('#accuracy path.mark').getAttribute('d')")
        browser.value("[...document.querySelectorAll('#accuracy .axes button')].at(-1).click()")
        assert "virtual hours" in browser.value("document.querySelector('#accuracy svg').textContent")
        assert browser.value("document.querySelector('#accuracy path.mark').getAttribute('d')") != before
        browser.value("document.querySelector('#chips button').click()")
        assert browser.value("document.querySelectorAll('#accuracy path.mark').length") == 2
        browser.value(
            "document.querySelector('#accuracy svg').dispatchEvent(new PointerEvent('pointermove',"
            " {clientX: document.querySelector('#accuracy svg').getBoundingClientRect().left + 200, clientY: 5}))"
        )
        assert browser.value("document.querySelector('#accuracy .tooltip').textContent").startswith("virtual hours")
        browser.print_pdf(tmp_path / "report.pdf")
        assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
        assert browser.value("document.documentElement.className") == ""  # the layout for paper is removed again
        assert browser.errors == []
