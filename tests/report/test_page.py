from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from browser import CHROMIUM, chromium
from made_runs import MakeRun
from vitfleet.report.page import render, report_figures
from vitfleet.report.runs import read_groups
from vitfleet.report.write import report_folder, watch_report, write_report

WIDTHS = (390, 1440)


def page_of(*runs: Path) -> str:
    groups = read_groups(runs)
    return render(groups, report_figures(groups))


def test_the_page_loads_nothing_from_elsewhere(make_run: MakeRun) -> None:
    page = page_of(make_run("a"))
    addresses = set(re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'>)\s]+)""", page))
    assert all(address.startswith(("#", "data:", "`data:")) for address in addresses), addresses


def test_names_cannot_break_out_of_their_place(make_run: MakeRun) -> None:
    page = page_of(make_run("a"))
    assert "<made>" not in page  # of the title
    assert "fedavg &amp; &lt;made&gt;" in page
    data = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["groups"] == [{"label": "fedavg"}]


def test_the_table_marks_the_best_and_leaves_out_what_nobody_has(make_run: MakeRun) -> None:
    page = page_of(make_run("a", seed=0), make_run("b", method="transfl", seed=7), make_run("c", seed=1))
    assert '<td class="best">57.0</td>' in page
    assert "<td>50.5 ± 0.7</td>" in page
    assert "forgetting, %" not in page


def test_the_command_and_the_configuration_are_there(make_run: MakeRun) -> None:
    page = page_of(make_run("a"))
    assert "<pre>vitfleet run made</pre>" in page
    assert "&quot;warmup_rounds&quot;: 0" in page


def test_a_report_lies_with_its_run_and_of_several_in_a_folder_of_its_own(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run, other = make_run("a"), make_run("b", method="fedprox")
    assert write_report([run]).page == run / "report.html"
    assert report_folder([run, other], None) == Path("runs/report-001")
    assert report_folder([run, other], tmp_path / "here") == tmp_path / "here"


def test_a_live_page_loads_itself_again_until_the_run_is_finished(make_run: MakeRun) -> None:
    run, whole = make_run("a", played=2), make_run("whole")
    seen: list[str] = []

    def meanwhile(seconds: float) -> None:
        seen.append((run / "report.html").read_text())
        for name in ("records.jsonl", "summary.json"):
            (run / name).write_bytes((whole / name).read_bytes())

    announced: list[Path] = []
    written = watch_report([run], announce=announced.append, wait=meanwhile)
    assert len(seen) == 1
    assert 'http-equiv="refresh"' in seen[0]
    assert "live: 2 of 5 rounds" in seen[0]
    assert announced == [written.page]
    assert 'http-equiv="refresh"' not in written.page.read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
def test_in_a_real_browser(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        make_run("a", seed=0),
        make_run("b", seed=1),
        make_run("c", method="transfl", tasks=2),
        make_run("d", method="eftvit"),
    ]
    page = tmp_path / "report.html"
    page.write_text(page_of(*runs))
    empty = "[...document.querySelectorAll('figure')].filter((one) => !one.querySelector('.mark')).map((one) => one.id)"
    with chromium(tmp_path / "profile") as browser:
        for width in WIDTHS:
            browser.open(page, width, dark=width == WIDTHS[0])
            assert browser.value("document.documentElement.scrollWidth") == width  # nothing sticks out
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
        assert browser.value("document.querySelector('#accuracy .tip').textContent").startswith("virtual hours")
        assert browser.complaints == []
