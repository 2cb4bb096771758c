"""Commands for a fleet on real machines. Slow imports are inside the commands, so that help is quick."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from vitfleet.cli import options
from vitfleet.cli.base import (
    INTERRUPTED,
    app,
    console,
    create_confirmed,
    error_console,
    interrupt_once,
    say,
    warn,
    with_options,
)
from vitfleet.cli.train import print_summary
from vitfleet.errors import ConfigError, UserError, how_to_install
from vitfleet.files import CONFIG_FILE, RECORDS_FILE, make_folder

if TYPE_CHECKING:
    from vitfleet.flower.server.processes import ServerSettings
    from vitfleet.run.output.folder import RunFolder

PORT = 9092
LOCK_TIMEOUT_S = 30.0  # the processes of a killed server release the run's folder within this time
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No encryption and no authentication; only for trying things out.")
]
Limits = Annotated[
    list[str],
    typer.Option(metavar="NAME=VALUE", help="Most that a server may ask for: `--limit epochs=5`. May be repeated."),
]
Pretrained = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Published weights. With EFTViT no features of another local module leave this machine."
    ),
]
CERTS_DIR = Path("fleet")


@app.command()
def export_data(
    source: Annotated[
        str, typer.Argument(metavar="PRESET|FILE", help="Configuration of the data and of its partition.")
    ],
    out: Annotated[Path, typer.Option(help="Output folder, with one subfolder per client.")],
    override: options.Overrides = [],  # noqa: B006  (typer copies it)
    plugin: options.Plugins = [],  # noqa: B006
    names: Annotated[str, typer.Option(help="The clients' names, as a,b,c; default: 0, 1, 2, …")] = "",
    to: Annotated[
        str, typer.Option(metavar="folders|parquet", help="PNG files by class, or tables that keep the images' order.")
    ] = "folders",
    data_dir: options.DataDir = None,
) -> None:
    """Write each client's images to a folder of its own, to try out a fleet whose clients have no images yet.

    Example: `vitfleet export-data digits --out shards --names kitchen,garden,porch`
    """
    from vitfleet.config import load_config
    from vitfleet.data.export import ExportFormat, export_clients
    from vitfleet.data.partitions.assign import assign_images
    from vitfleet.data.sources.load import load_dataset

    if to not in get_args(ExportFormat):
        raise UserError(f"--to {to}: must be {' or '.join(get_args(ExportFormat))}")
    client_names = _split_names(names)
    if len(set(client_names)) < len(client_names):
        raise UserError(f"--names {names}: each client needs a name of its own")
    keys = with_options(override, {"data.dir": data_dir, **_fleet_size(client_names)})
    config = load_config(source, keys, plugins=plugin)
    if client_names and config.fleet.clients != len(client_names):
        raise ConfigError(
            "fleet.clients", config.fleet.clients, f"--names has {len(client_names)}; leave out one of them"
        )
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out {out}: is not empty; choose another --out")
    data = load_dataset(config.data)
    clients = config.fleet.clients
    folders = client_names or [str(client) for client in range(clients)]
    assigned = assign_images(config, data)
    export_clients(data, assigned, folders, make_folder(out), cast(ExportFormat, to))
    say(f"images of {clients} clients written to {out}")


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Output folder, on the server.")] = CERTS_DIR,
    host: Annotated[list[str], typer.Option(help="A host name or address of the server. May be repeated.")] = [],  # noqa: B006
    names: Annotated[str, typer.Option(help="The clients' names, as a,b,c.")] = "",
) -> None:
    """Create a fleet's certificates and keys. A second call adds missing ones and keeps the others.

    Example: `vitfleet certs fleet --host fleet.example.org --names kitchen,garden,porch`

    Copy two files to each client: `DIR/ca.crt` and `DIR/nodes/NAME`.
    """
    _require("flower", "cryptography", "flwr")
    from vitfleet.flower.certificates import make_certs

    is_new = not folder.exists()
    fleet_certs = make_certs(folder, host, _split_names(names))
    say(f"authority and server: {fleet_certs.ca}, {fleet_certs.server}")
    for name in fleet_certs.names():
        say(f"client {name}: copy {fleet_certs.ca} and {fleet_certs.node_key(name)} to it")
    if not fleet_certs.names():
        warn("note: no client has a key yet; add them with --names, as --names kitchen,garden")
    if is_new and not host:
        warn("note: clients on other machines need the server's address in its certificate; add it with --host")


@app.command()
def server(
    source: Annotated[
        str, typer.Argument(metavar="PRESET|FILE|DIR", help="Configuration to run, or the folder of a run to resume.")
    ],
    override: options.Overrides = [],  # noqa: B006
    plugin: options.Plugins = [],  # noqa: B006
    out: options.Out = None,
    data_dir: options.DataDir = None,
    seed: options.Seed = None,
    certs: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the certificates made by `vitfleet certs`.")
    ] = CERTS_DIR,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0: all addresses of this machine.")
    ] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port that clients connect to.", min=1, max=2**16 - 1)] = PORT,
    names: Annotated[str, typer.Option(help="The clients, as a,b,c; default: all that have a key.")] = "",
    insecure: Insecure = False,
    yes: options.Yes = False,
    trust_plugins: options.TrustPlugins = False,
) -> None:
    """Run a configuration on clients on other machines: start the server, run all rounds, stop the server.

    Examples
    --------
    * `vitfleet server eftvit-digits --certs fleet`
    * `vitfleet server runs/eftvit-digits-eftvit-001` resumes a run that was stopped
    """
    _require("flower", "cryptography", "flwr")
    from vitfleet.api.request import RunRequest
    from vitfleet.api.run import discard_unstarted
    from vitfleet.data.sources.load import check_listing
    from vitfleet.flower.certificates import Certs
    from vitfleet.flower.server.processes import ServerSettings, check_address

    fleet_certs = Certs(certs.resolve())
    if insecure:
        _warn_insecure()
    else:
        fleet_certs.check_server()
    check_address(host, port)
    settings = ServerSettings(host, port, fleet_certs.home, None if insecure else fleet_certs)
    if (Path(source) / CONFIG_FILE).exists():
        _serve(_open_fleet_run(Path(source)), settings)
        return
    client_names = _split_names(names) or ([] if insecure else fleet_certs.names())
    keys = _fleet_keys(override, data_dir, client_names)
    command = ["vitfleet", *sys.argv[1:]]
    request = RunRequest(source, seed=seed, overrides=keys, plugins=plugin, out=out, command=command)
    run_folder = create_confirmed(request, yes)
    try:
        check_listing(run_folder.config().data)
        _serve(run_folder, settings)
    except Exception:
        discard_unstarted(run_folder)
        raise


@app.command()
def client(
    server: Annotated[str, typer.Option(metavar="HOST[:PORT]", help="Address of the server.")],
    data: Annotated[Path, typer.Option(help="This client's images: a folder of class folders, or parquet files.")],
    name: Annotated[str, typer.Option(help="This client's name, as registered with the server.")],
    certs: Annotated[Path, typer.Option(metavar="DIR", help="Folder of `ca.crt` and `nodes/NAME`.")] = CERTS_DIR,
    state: Annotated[
        Path | None, typer.Option(help="Folder of this client's own files; default: ~/.vitfleet/NAME.")
    ] = None,
    device: options.Device = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's own.", min=1)] = None,
    limit: Limits = [],  # noqa: B006
    pretrained: Pretrained = None,
    plugin: options.Plugins = [],  # noqa: B006
    insecure: Insecure = False,
) -> None:
    """Join a fleet as a client with this machine's images, until stopped. It can be restarted at any time.

    Example: `vitfleet client --server fleet.example.org --data ~/photos --name kitchen`
    """
    _require("client", "cryptography", "flwr")
    from vitfleet.flower.activity import ACTIVITY_FILE
    from vitfleet.flower.certificates import Certs
    from vitfleet.flower.device.limits import ClientLimits
    from vitfleet.flower.device.preflight import check_settings
    from vitfleet.flower.device.server_address import check_server, parse_address
    from vitfleet.flower.device.supernode import SUPERNODE_LOG, client_command, ending_cause, run_forever
    from vitfleet.flower.processes import check_client_name

    fleet_certs = Certs(certs.resolve())
    check_client_name(name)
    limits = ClientLimits.parse(limit)
    if insecure:
        _warn_insecure()
    else:
        fleet_certs.check_client(name)
    if not data.exists():
        raise UserError(f"--data {data}: no such file or folder")
    if pretrained is not None and not pretrained.is_file():
        raise UserError(f"--pretrained {pretrained}: no such file")
    home = (state or Path.home() / ".vitfleet" / name).resolve()
    if home.exists() and not home.is_dir():
        raise UserError(f"--state {home}: is no folder; name one for this client's own files")
    address = parse_address(server, PORT)
    machine: dict[str, str | int] = {"device": device} if threads is None else {"device": device, "threads": threads}
    used_certs = None if insecure else fleet_certs
    look = partial(check_server, address, None if insecure else fleet_certs.ca)
    interrupt_once()
    try:
        silence = look()
        check_settings(data.resolve(), device, plugin)
        make_folder(home, "--state")
        command = client_command(address, name, data.resolve(), home, used_certs, machine, plugin, limit, pretrained)
        log, why = home / "flower" / SUPERNODE_LOG, f" ({silence})" if silence else ""
        warn(f"{name}: waiting for {address}{why}; files in {home}; Flower's log: {log}")
        _say_what_may_leave(limits.shown_share)
        explain = partial(ending_cause, name=name, key=None if insecure else fleet_certs.node_key(name))
        run_forever(command, home / "flower", home / "runs" / ACTIVITY_FILE, warn, explain, look)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _say_what_may_leave(shown_share: float) -> None:
    """Say what a device cannot check: a server that receives features can rebuild images."""
    if shown_share:
        warn(
            f"note: a server that runs EFTViT receives features of {shown_share:.0%} of each image's patches in a "
            "round, and can rebuild these patches from them; --limit shown_share=0 refuses it"
        )


def _open_fleet_run(path: Path) -> RunFolder:
    """Open a run to resume it on a fleet."""
    from vitfleet.run.output.folder import open_run_folder

    run_folder = open_run_folder(path, LOCK_TIMEOUT_S)
    if run_folder.config().fleet.kind != "flower":
        raise UserError(f"{path}: is a run in one process; `vitfleet resume {path}` resumes it")
    return run_folder


def _serve(run_folder: RunFolder, settings: ServerSettings) -> None:
    """Run all remaining rounds on a fleet and show them."""
    from vitfleet.config.run_title import run_title
    from vitfleet.flower.server.serve import serve
    from vitfleet.report.console.progress import RoundDisplay
    from vitfleet.report.figures.folder import draw_results
    from vitfleet.run.output.summary import read_summary
    from vitfleet.run.records import read_records

    interrupt_once()
    folder, config = run_folder.path.resolve(), run_folder.config()
    names = [config.fleet.name_of(client) for client in range(config.fleet.clients)]
    run_folder.release()  # Flower's server process locks it
    if settings.certs is not None:
        settings.certs.check_server(names)

    def show_address() -> None:
        title, clients = run_title(config.model_dump(mode="json")), ", ".join(names)
        say(f"{title}; waiting for {clients} at port {settings.port}; run folder: {folder}")
        holds = (
            "weights are clipped around each round's median" if config.defends else "off: what is sent counts as it is"
        )
        say(f"defence against devices that lie (aggregate.defence = {config.aggregate.defence}): {holds}")

    try:
        done = sum(1 for _ in read_records(folder))
        with RoundDisplay(console, config.rounds, done, name_of=config.fleet.name_of) as display:
            serve(settings, folder, names, display.show_round, show_address, display, say)
    except KeyboardInterrupt:
        warn(f"\nStopped. To resume from the last checkpoint: vitfleet server {shlex.quote(str(folder))}")
        raise typer.Exit(INTERRUPTED) from None
    draw_results(folder)
    summary = read_summary(folder)
    print_summary(summary, config, folder)
    if summary["total"]["failures"] == summary["total"]["participations"]:
        raise UserError(f"no client's reply could be used; see {folder / RECORDS_FILE}")


def _split_names(text: str) -> list[str]:
    from vitfleet.flower.processes import check_client_name

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        check_client_name(name)
    return names


def _fleet_keys(override: list[str], data_dir: str | None, names: list[str]) -> dict[str, Any]:
    """Return the keys that are given, and those of a fleet of these clients."""
    # The clients have their own images: a folder of the server's is not split into training and test images.
    own = {"fleet.kind": "flower", "fleet.names": names or None, "data.test_only": True}
    keys = with_options(override, {"data.dir": data_dir, **own, **_fleet_size(names)})
    if keys["fleet.kind"] != "flower":
        remedy = "`vitfleet server` runs on other machines, `vitfleet run` in one process"
        raise ConfigError("fleet.kind", keys["fleet.kind"], remedy)
    return keys


def _fleet_size(names: list[str]) -> dict[str, Any]:
    """Return the configuration keys of a fleet of these clients: all of them in every round, unless -o changes it."""
    return {"fleet.clients": len(names), "fleet.per_round": len(names)} if names else {}


def _warn_insecure() -> None:
    text = "warning: --insecure: no encryption; anyone who reaches the port can join, read messages, or send false ones"
    error_console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _require(extra: str, *packages: str) -> None:
    """Raise an error that names the extra of the installation, if one of its packages is missing."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise UserError(f"this command needs {', '.join(missing)}; {how_to_install(extra)}")
