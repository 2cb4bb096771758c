"""The report: one HTML page that holds everything it shows and opens offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from vitfleet import __version__
from vitfleet.report.figure_types import Figure, plain
from vitfleet.report.run_figures import common_figures, detail_figures, partitions
from vitfleet.report.runs import Group, finished
from vitfleet.report.table import Column, columns_of

REFRESH_SECONDS = 5


def report_figures(groups: Sequence[Group]) -> dict[str, list[Figure]]:
    """Return a report's figures, by the place on the page where they stand."""
    details = {detail_id(place): detail_figures(group, detail_id(place)) for place, group in enumerate(groups)}
    return {"common": common_figures(groups), "partitions": partitions(groups), **details}


def detail_id(place: int) -> str:
    """Return the id of a configuration's own part of the page."""
    return f"configuration-{place + 1}"


def render(groups: Sequence[Group], figures: dict[str, list[Figure]], live: bool = False) -> str:
    """Return the page; a live one loads itself again every few seconds."""
    data = {
        "groups": [{"label": group.label} for group in groups],
        "figures": {place: [plain(figure) for figure in found] for place, found in figures.items()},
    }
    assets = files("vitfleet.report")
    names = ", ".join(group.label for group in groups[:3]) + (" …" if len(groups) > 3 else "")
    own_title = groups[0].runs[0].config["title"] if len(groups) == 1 else ""
    values = {
        "refresh": f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">\n' if live else "",
        "title": escape(own_title or names),
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "subtitle": _subtitle(groups, live),
        "table": _table(groups),
        "details": "\n".join(_detail(group, detail_id(place)) for place, group in enumerate(groups)),
        "version": escape(__version__),
        # The data stands inside a script element: nothing in it may look like that element's end.
        "data": json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"),
        "script": (assets / "page.js").read_text(encoding="utf-8"),
    }
    page = (assets / "page.html").read_text(encoding="utf-8")
    parts = page.split("{")
    # Each value is put in once and never looked at again: what a run is called cannot name a place of the page.
    filled = [values[name] + rest for name, _, rest in (part.partition("}") for part in parts[1:])]
    return parts[0] + "".join(filled)


def _subtitle(groups: Sequence[Group], live: bool) -> str:
    runs = [run for group in groups for run in group.runs]
    data = sorted({run.config["data"]["name"] for run in runs})
    fleet = runs[0].config["fleet"]
    text = f"{', '.join(data)} · {fleet['clients']} clients, {fleet['per_round']} a round · {len(runs)} run"
    text = escape(text + ("" if len(runs) == 1 else "s"))
    if not finished(groups):
        done = sum(len(run.records) for run in runs)
        of = sum(int(run.config["rounds"]) for run in runs)
        text += f' · <span class="live">{"live: " if live else ""}{done} of {of} rounds</span>'
    return text


def _table(groups: Sequence[Group]) -> str:
    columns = columns_of(groups)
    heads = "".join(
        f'<th scope="col" title="{escape(column.meaning)}">{escape(column.name)}</th>' for column in columns
    )
    rows = []
    for place, group in enumerate(groups):
        cells = "".join(_cell(column, place) for column in columns)
        rows.append(
            f'<tr><th scope="row"><a href="#{detail_id(place)}-runs">{escape(group.label)}</a></th>{cells}</tr>'
        )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="summary"><table><thead><tr><th></th>{heads}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(column: Column, place: int) -> str:
    best = ' class="best"' if place == column.best else ""
    return f"<td{best}>{escape(column.cells[place])}</td>"


def _detail(group: Group, id: str) -> str:
    run = group.runs[0]
    seeds = f"seed {run.seed}"
    if len(group.runs) > 1:
        seeds = f"seeds {', '.join(str(one.seed) for one in group.runs)}; shown is seed {run.seed}"
    config = json.dumps(run.config, indent=2, ensure_ascii=False)
    command = run.about.get("command", f"vitfleet run {run.path / 'config.json'}")
    versions = ", ".join(f"{name} {one}" for name, one in run.about.get("versions", {}).items() if one)
    return (
        f'<details id="{id}-runs" open><summary>{escape(group.label)} '
        f"<small>{escape(run.config['method']['name'])}, {escape(seeds)}</small></summary>"
        f'<div class="grid" id="{id}"></div>'
        f'<p>To reproduce ({escape(versions)}):</p><div class="reproduce"><pre>{escape(command)}</pre>'
        f'<button class="copy" type="button">copy</button></div>'
        f"<details><summary>configuration</summary><pre>{escape(config)}</pre></details></details>"
    )
