from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from browser import CHROMIUM, chromium
from conftest import TINY, Command
from made_runs import MakeRun
from vitfleet.report.figures.types import AxisView, Curve, LineChart
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


def test_runs_of_different_fleets_are_named_in_the_subtitle(make_run: MakeRun) -> None:
    def subtitle(*runs: Path) -> str:
        found = re.search(r"</header>\s*<p>(.*?)</p>", page_of(*runs))
        assert found is not None
        return found[1]

    fleet = subtitle(make_run("a")).split(" · ")[1]
    assert re.fullmatch(r"\d+ clients, \d+ per round", fleet)
    assert f" · {fleet} · 2 runs" in subtitle(make_run("b"), make_run("c", method="transfl"))
    mixed = subtitle(make_run("d", method="transfl"), make_run("e", tasks=2))
    assert f" · {fleet} (TransFL) · {fleet}, 2 tasks (FedAvg) · 2 runs" in mixed


def test_every_configuration_is_described_in_a_sentence(make_run: MakeRun) -> None:
    page = page_of(make_run("a"), make_run("b", method="transfl", seed=7))
    assert "<li>FedAvg: 50.0% accuracy; every client sends the whole model.</li>" in page
    assert "<li>TransFL: 57.0% accuracy, 7.0 points more than FedAvg.</li>" in page
    assert "<li>" not in page_of(make_run("c"))
    assert "<li>" not in page_of(make_run("d"), make_run("e", method="transfl", finished_rounds=2))


def test_axis_of_accuracies_begins_near_the_curves() -> None:
    def chart(*values: float, percent: bool = True) -> float:
        view = AxisView("rounds", "round", [Curve("a", 0, range(len(values)), values)])
        return LineChart("id", "title", "label", [view], percent).floor

    assert chart(0.82, 0.96) == 0.8
    assert chart(0.8, 0.96) == 0.7  # the lowest point is not on the axis
    assert chart(0.34, 0.96) == 0.3
    assert chart(0.2, 0.96) == 0  # little of it is empty
    assert chart(0.05, 0.06) == 0
    assert chart(0.9, 2.0, percent=False) == 0


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_tables_of_the_usual_columns_fit_into_1280_pixels(vitfleet: Command, tmp_path: Path) -> None:
    """With runs on tasks beside others, every column has values."""
    small = ["-o", "data.limit=150", "-o", "rounds=1", "-o", "train.epochs=1", "--yes"]
    runs = []
    for preset in ("start-fedavg", "start-eftvit", "start-fedavg-tasks"):
        tasks = "tasks" in preset
        keys = ["-o", "data.tasks.rounds_per_task=1", "-o", "train.epochs=1"] if tasks else small
        done = vitfleet(tmp_path, "run", preset, *keys, "--out", preset)
        assert done.returncode == 0, done.stderr
        runs.append(tmp_path / preset)
    page = tmp_path / "report.html"
    groups = read_groups(runs)
    page.write_text(render(groups, report_figures(groups), target=0.1))
    with chromium(tmp_path / "profile") as browser:
        browser.open(page, 1280)
        hidden = "[...document.querySelectorAll('.scroll')].slice(0, 2).map((of) => of.scrollWidth - of.clientWidth)"
        assert browser.value(hidden) == [0, 0]


def test_a_comparison_has_its_command_once_and_that_of_each_run(vitfleet: Command, tmp_path: Path) -> None:
    small = [part for override in (*TINY, "rounds=1") for part in ("-o", override)]
    methods = ["--method", "fedavg", "--method", "fedprox mu=0.1"]
    done = vitfleet(tmp_path, "compare", "digits", *methods, *small, "--out", "my runs")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "my runs" / "report.html").read_text()
    assert page.count("vitfleet compare digits") == 1
    assert "<pre>vitfleet run &#x27;my runs/fedavg-s0/config.json&#x27;</pre>" in page
    assert vitfleet(tmp_path, "run", "my runs/fedavg-s0/config.json", "--out", "again").returncode == 0
