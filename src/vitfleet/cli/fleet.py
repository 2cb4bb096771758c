"""The commands of a fleet on real machines. Help is quick here too: what computes is imported by who needs it."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitfleet.cli.base import DataDir, Out, Overrides, app, complaints, configure, console, interrupt, say
from vitfleet.errors import UserError

if TYPE_CHECKING:
    from vitfleet.flower.processes import Endpoint
    from vitfleet.run.folder import RunFolder

PORT = 9092
PATIENCE = 30.0  # seconds in which the processes of a server that was killed end too
Insecure = Annotated[bool, typer.Option("--insecure", help="No encryption, no keys: only to try things out.")]
HOME = Path("fleet")


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE", help="Whose images, and how they are dealt.")],
    out: Annotated[Path, typer.Option(help="The folder; every client gets one in it.")],
    override: Overrides = [],  # noqa: B006  (typer copies it)
    names: Annotated[str, typer.Option(help="The clients' names, as a,b,c; default: 0, 1, 2, …")] = "",
    data_dir: DataDir = None,
) -> None:
    """Write every client's images into a folder of its own: a fleet to try out, where devices have no images yet.

    Example: `vitfleet export digits --out shards --names kitchen,garden,porch`
    """
    from vitfleet.data.assignment import assign_images
    from vitfleet.data.export import export_clients
    from vitfleet.data.sources import load

    listed = _names(names)
    config = configure(source, override, None, data_dir, _fleet_of(listed))
    data = load(config.data)
    clients = config.fleet.clients
    export_clients(data, assign_images(config, data), listed or [str(client) for client in range(clients)], out)
    say(console, f"{clients} clients' images are in {out}")


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where they shall lie, on the server.")] = HOME,
    host: Annotated[list[str], typer.Option(help="A name or address of the server. May be repeated.")] = [],  # noqa: B006
    names: Annotated[str, typer.Option(help="The devices' names, as a,b,c.")] = "",
) -> None:
    """Make a fleet's certificates and keys; called again, add what is missing.

    Example: `vitfleet certs fleet --host fleet.example.org --names kitchen,garden,porch`

    Give each device two of the files: `DIR/ca.crt`, and `DIR/nodes/NAME` as its own.
    """
    from vitfleet.flower.certificates import make_certs

    made = make_certs(folder, host, _names(names))
    say(console, f"authority and server: {made.ca}, {made.server}")
    for name in made.names():
        say(console, f"device {name}: give it {made.ca} and {made.node_key(name)}")


@app.command()
def server(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE|DIR", help="What to run; a run's folder goes on.")],
    override: Overrides = [],  # noqa: B006
    out: Out = None,
    data_dir: DataDir = None,
    seed: Annotated[int | None, typer.Option(help="The same as -o seed=N.")] = None,
    certs: Annotated[Path, typer.Option(metavar="DIR", help="The fleet's folder, made by `vitfleet certs`.")] = HOME,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0: all of this machine's.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="The port that devices connect to.")] = PORT,
    names: Annotated[str, typer.Option(help="The devices, as a,b,c; default: all that have a key.")] = "",
    insecure: Insecure = False,
) -> None:
    """Run a configuration on devices: open the door to them, conduct the run, close the door.

    Examples
    --------
    * `vitfleet server eftvit-digits --certs fleet`
    * `vitfleet server runs/eftvit-digits-eftvit-001` goes on with a run that was stopped
    """
    from vitfleet.flower.certificates import Certs
    from vitfleet.flower.processes import Endpoint
    from vitfleet.run.folder import create, reopen

    known = Certs(certs.resolve())
    if insecure:
        _warn()
    else:
        known.check_server()
    if (Path(source) / "config.json").exists():
        held = reopen(Path(source), PATIENCE)
    else:
        listed = _names(names) or ([] if insecure else known.names())
        given = {"fleet.kind": "flower", **_fleet_of(listed), **({"fleet.names": listed} if listed else {})}
        config = configure(source, override, seed, data_dir, given)
        held = create(config, out, Path(source).stem, ["vitfleet", *sys.argv[1:]])
    _serve(held, Endpoint(host, port, known.home, None if insecure else known))


@app.command()
def client(
    server: Annotated[str, typer.Option(metavar="HOST[:PORT]", help="Where the server is.")],
    data: Annotated[Path, typer.Option(help="This device's images: a folder of class folders, or parquet files.")],
    name: Annotated[str, typer.Option(help="This device's name, as the server knows it.")],
    certs: Annotated[Path, typer.Option(metavar="DIR", help="Where `ca.crt` and `nodes/NAME` lie.")] = HOME,
    state: Annotated[Path | None, typer.Option(help="Where it keeps its own; default: ~/.vitfleet/NAME.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's own.")] = None,
    insecure: Insecure = False,
) -> None:
    """Join a fleet with this machine's images, and stay; what it keeps is on disk, so it can be restarted any time.

    Example: `vitfleet client --server fleet.example.org --data ~/photos --name kitchen`
    """
    from vitfleet.flower.certificates import Certs
    from vitfleet.flower.processes import client_command, stay

    known = Certs(certs.resolve())
    if insecure:
        _warn()
    else:
        known.check_client(name)
    if not data.exists():
        raise UserError(f"--data {data}: no such file or folder")
    home = (state or Path.home() / ".vitfleet" / name).resolve()
    address = server if ":" in server else f"{server}:{PORT}"
    machine: dict[str, str | int] = {"device": device} if threads is None else {"device": device, "threads": threads}
    command = client_command(address, name, data.resolve(), home, None if insecure else known, machine)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        stay(command, home / "flower", lambda text: say(complaints, text))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _serve(held: RunFolder, endpoint: Endpoint) -> None:
    """Conduct a run on devices and show it."""
    from vitfleet.flower.server import serve
    from vitfleet.report.run_plots import draw_results
    from vitfleet.report.tables import summary_table
    from vitfleet.report.terminal import RoundDisplay
    from vitfleet.run.records import read_records

    signal.signal(signal.SIGTERM, interrupt)
    folder, config = held.path.resolve(), held.config()
    names = [config.fleet.name_of(client) for client in range(config.fleet.clients)]
    held.release()  # Flower's process takes it

    def ready() -> None:
        say(
            console,
            f"{config.method.name}: waiting for {', '.join(names)} at port {endpoint.port}; run folder: {folder}",
        )

    try:
        done = sum(1 for _ in read_records(folder))
        with RoundDisplay(console, config.rounds, done) as display:
            serve(endpoint, folder, names, display.show_round, ready, display)
    except KeyboardInterrupt:
        say(complaints, f"\nStopped. To go on from the last checkpoint: vitfleet server {shlex.quote(str(folder))}")
        raise typer.Exit(130) from None
    draw_results(folder)
    summary = json.loads((folder / "summary.json").read_text())
    console.print(summary_table(summary, config.title))
    say(console, f"run folder: {folder}")
    if summary["total"]["failures"] == summary["total"]["participations"]:
        raise UserError(f"no device's reply could be used; {folder / 'records.jsonl'} says why")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _fleet_of(names: list[str]) -> dict[str, Any]:
    """Return what so many devices make of a preset's fleet: all of them, every round, unless -o says otherwise."""
    return {"fleet.clients": len(names), "fleet.per_round": len(names)} if names else {}


def _warn() -> None:
    text = "warning: --insecure: nothing is encrypted, and whoever reaches the port can join, listen, or lie"
    complaints.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)
