"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitfleet.config import trust

Overrides = Annotated[
    list[str],
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="Set a key: `-o train.lr=1e-3`. May be repeated."),
]
Plugins = Annotated[
    list[Path],
    typer.Option(
        "--plugin", metavar="FILE", help="A Python file of your own methods, data sets, metrics, …. May be repeated."
    ),
]


def _trust(wanted: bool) -> bool:
    if wanted:
        trust.ask = lambda what: True
    return wanted


TrustPlugins = Annotated[
    bool,
    typer.Option(
        "--trust-plugins", callback=_trust, help="Run the plug-ins that the run names, also those of somebody else."
    ),
]
Out = Annotated[Path | None, typer.Option(help="Output folder. Default: the next free one in runs/.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one line of JSON at the end; everything else goes to standard error.")
]
Jobs = Annotated[
    int,
    typer.Option(
        min=1,
        help="Number of runs at a time, each in a process of its own. On a GPU each has an equal share of its memory.",
    ),
]
DataDir = Annotated[
    str | None, typer.Option(envvar="VITFLEET_DATA", help="Folder of the data sets, one subfolder each.")
]
Yes = Annotated[
    bool, typer.Option("--yes", "-y", help="Start it even if it would take days, or more memory or disk than is free.")
]
Seed = Annotated[int | None, typer.Option(help="The same as -o seed=N.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images at a time.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs and comparisons.")]
Model = Annotated[
    Path, typer.Argument(metavar="RUN|MODEL", help="Folder of a run, or a model file such as a device's own.")
]
Client = Annotated[int | None, typer.Option(help="Use this client's own model. Default: the server's model.")]
