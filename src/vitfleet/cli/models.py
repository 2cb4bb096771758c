"""The commands that use trained models."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitfleet.cli import options
from vitfleet.cli.base import app, console, error_console, reserve_stdout, say, warn
from vitfleet.errors import UserError

if TYPE_CHECKING:
    from vitfleet.inference.classifier import ImagePrediction
    from vitfleet.progress import Progress

MAX_NOTES = 20


@app.command()
def predict(
    model: options.Model,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…|FOLDER…", help="Image files, and folders of them.")],
    client: options.Client = None,
    top: Annotated[int, typer.Option(min=1, help="Number of classes to show per image.")] = 5,
    task: Annotated[
        int | None, typer.Option(help="The images' task, of a model trained on tasks: only its classes are candidates.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV: one line per image.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    batch_size: options.BatchSize = 64,
    device: options.Device = "auto",
    plugin: options.Plugins = [],  # noqa: B006
    trust_plugins: options.TrustPlugins = False,
) -> None:
    """Predict the classes of images with a trained model. Files that cannot be read are named, the others predicted.

    Examples
    --------
    * `vitfleet predict runs/first cat.jpg dog.png`
    * `vitfleet predict runs/first photos --client 7 --top 3 --csv > predictions.csv`
    * `vitfleet predict ~/.vitfleet/kitchen/runs/model.safetensors photos --json`
    """
    from vitfleet.api import predict as predict_images

    if as_csv and as_json:
        raise UserError("--csv and --json: choose one of them")
    _prepare(plugin, as_csv or as_json)
    predictions = predict_images(
        model, images, client=client, task=task, batch_size=batch_size, device=device, progress=_progress()
    )
    none_read = all(image.prediction is None for image in predictions)
    _print_notes([f"{image.path}: {image.note}" for image in predictions if image.note and not none_read])
    if as_json:
        print(json.dumps([_as_tree(image, top) for image in predictions], indent=1))
    elif as_csv:
        print(_as_csv(predictions, top), end="")
    else:
        for image in predictions:
            if image.prediction is not None:
                shown = ", ".join(f"{name} {share:.1%}" for name, share in image.prediction.top(top))
                say(f"{image.path}: {shown}")
    if none_read:
        first, *others = predictions
        more = f"; nor can {len(others)} more images be read" if others else ""
        raise UserError(f"{first.path}: {first.note}{more}")


@app.command()
def evaluate(
    model: options.Model,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="One subfolder per class. Default: the test images of the run's data."),
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="N|all", help="A client's own model, or each client's. Default: the server's.")
    ] = None,
    known_task: Annotated[
        bool, typer.Option("--known-task", help="Tell the model each image's task, where it was trained on tasks.")
    ] = False,
    after_tasks: Annotated[
        bool,
        typer.Option("--after-tasks", help="Compute the accuracies after each task again (data.tasks.keep_models)."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write evaluation.json and figures to this folder.")] = None,
    as_json: options.AsJson = False,
    batch_size: options.BatchSize = 64,
    device: options.Device = "auto",
    plugin: options.Plugins = [],  # noqa: B006
    trust_plugins: options.TrustPlugins = False,
) -> None:
    """Evaluate a trained model on labelled images: accuracy, per class, confusion matrix, calibration.

    Examples
    --------
    * `vitfleet evaluate runs/first`
    * `vitfleet evaluate runs/first --data photos --client all --out evaluation`
    """
    from vitfleet.api import evaluate as evaluate_model
    from vitfleet.report.evaluation import class_table, evaluation_table, write_evaluations

    _prepare(plugin, as_json)
    if after_tasks:
        _show_task_matrix(model, as_json)
        return
    evaluations, notes = evaluate_model(
        model, data, client=_client(client), known_task=known_task, batch_size=batch_size, device=device,
        progress=_progress(),
    )  # fmt: skip
    _print_notes(notes)
    console.print(evaluation_table(evaluations))
    if len(evaluations) == 1:
        console.print()
        console.print(class_table(evaluations[0]))
    if out is not None:
        for path in write_evaluations(evaluations, out):
            say(f"written: {path}")
    if as_json:
        print(json.dumps([evaluation.as_json() for evaluation in evaluations]))


@app.command()
def export(
    model: options.Model,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="safetensors, timm, onnx, executorch, torch-export.")],
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: RUN/export/FORMAT[-client-N].")] = None,
    client: options.Client = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Write ONNX with eight-bit weights too, and measure its accuracy.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Images to compare with. Default: the test images of the run's data."),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="How many of these images to use.")] = 500,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload to the Hugging Face hub; needs a token.")
    ] = None,
    plugin: options.Plugins = [],  # noqa: B006
    trust_plugins: options.TrustPlugins = False,
) -> None:
    """Write a trained model in the format of other software, with class names, preprocessing and a model card.

    What was written is loaded again and compared with the original.

    Examples
    --------
    * `vitfleet export runs/first --to timm`
    * `vitfleet export runs/first --to onnx --int8 --client 7 --out phone`
    """
    from vitfleet.api import export as export_model
    from vitfleet.exporters.model_card import quantised_text

    _prepare(plugin, False)
    default = (model / "export" if model.is_dir() else Path()) / (to if client is None else f"{to}-client-{client}")
    written = export_model(
        model, to, out or default, client=client, int8=int8, data=data, images=images, push_to_hub=push_to_hub,
        progress=_progress(),
    )  # fmt: skip
    for path in [*written.files, written.folder / "README.md"]:
        say(f"written: {path}")
    difference = f"logits differ by at most {written.max_difference:.1e} on {written.compared} images"
    say(f"compared with the original: {difference}")
    if written.quantised is not None:
        say(f"eight-bit weights: {quantised_text(written)}")
    if push_to_hub is not None:
        say(f"uploaded: {push_to_hub}")


@app.command()
def forget(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    client: Annotated[list[int], typer.Option(metavar="N", help="A client to leave out. May be repeated.")],
    out: Annotated[Path | None, typer.Option(help="The new run's folder. Default: RUN-without-N.")] = None,
    plugin: options.Plugins = [],  # noqa: B006
) -> None:
    """Write a run whose model is as if some clients had never taken part: exactly, where a server adds up sums.

    It needs the method closed-form and a simulation. RUN remains: delete it to forget the clients for good.

    Example: `vitfleet forget runs/first --client 3`
    """
    from vitfleet.api import load_run

    _prepare(plugin, False)
    written = load_run(run).forget(client, out=out, progress=_progress())
    forgotten = written.summary["forgotten"]
    say(f"written: {written.path}, accuracy {forgotten['accuracy']:.1%} without {', '.join(map(str, client))}")


@app.command()
def demo(
    model: options.Model,
    clients: Annotated[
        str | None, typer.Option(help="Clients to show, as 3,7. Default: the first two with a model of their own.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at. Default: this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any free one.", min=0, max=2**16 - 1)] = 8765,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    device: options.Device = "auto",
    plugin: options.Plugins = [],  # noqa: B006
    trust_plugins: options.TrustPlugins = False,
) -> None:
    """Open a local page: drop an image, and see what the server's model and two clients' models predict, and why.

    Example: `vitfleet demo runs/first --clients 3,7`
    """
    import webbrowser

    from vitfleet.api.models import demo_server

    _prepare(plugin, False)
    numbers = None if clients is None else _numbers(clients)
    with demo_server(model, numbers, host, port, device) as server:
        if not server.is_local:
            warn(f"warning: --host {host}: everyone who reaches this machine can use the page")
        say(f"demo: {server.address} (stop with Ctrl-C)")
        if browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _show_task_matrix(path: Path, as_json: bool) -> None:
    from vitfleet.api import load_run
    from vitfleet.report.evaluation import task_matrix_table

    matrix = load_run(path).task_matrix(progress=_progress())
    console.print(task_matrix_table(matrix))
    if as_json:
        print(json.dumps({"by_task": matrix.by_task, **matrix.metrics._asdict()}))


def _prepare(plugins: Sequence[Path], reserved: bool) -> None:
    from vitfleet.config.plugins import load_plugins

    reserve_stdout(reserved)
    load_plugins(plugins)


def _progress() -> Progress:
    """Return a progress bar on standard error: standard output may be a file."""
    from vitfleet.report.console.progress import TerminalProgress

    return TerminalProgress(error_console)


def _client(text: str | None) -> Any:
    if text is None or text == "all":
        return text
    if not text.isdecimal():
        raise UserError(f"--client {text}: must be a client's number, or all")
    return int(text)


def _numbers(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise UserError(f"--clients {text}: must be clients' numbers separated by commas, such as 3,7")
    return [int(part) for part in text.split(",")]


def _print_notes(notes: Iterable[str]) -> None:
    """Print remarks on images: a conversion of colours once with the number of images, all others one by one."""
    from vitfleet.inference.image_files import COLOUR_NOTE, GREY_NOTE

    alike: dict[str, list[str]] = {}
    for note in notes:
        conversion = next((text for text in (COLOUR_NOTE, GREY_NOTE) if note.endswith(text)), note)
        alike.setdefault(conversion, []).append(note)
    lines = [same[0] + (f" (and {len(same) - 1} more)" if len(same) > 1 else "") for same in alike.values()]
    for line in lines[:MAX_NOTES]:
        warn(line)
    if len(lines) > MAX_NOTES:
        warn(f"… and {len(lines) - MAX_NOTES} more remarks")


def _as_tree(image: ImagePrediction, top: int) -> dict[str, Any]:
    classes = [] if image.prediction is None else image.prediction.top(top)
    named = [{"class": name, "probability": share} for name, share in classes]
    return {"image": str(image.path), "top": named, "note": image.note}


def _as_csv(predictions: Sequence[ImagePrediction], top: int) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    ranks = [part for rank in range(1, top + 1) for part in (f"class_{rank}", f"probability_{rank}")]
    writer.writerow(["image", *ranks, "note"])
    for image in predictions:
        classes = [] if image.prediction is None else image.prediction.top(top)
        cells = [part for name, share in classes for part in (name, f"{share:.6f}")]
        writer.writerow([image.path, *cells, *[""] * (len(ranks) - len(cells)), image.note or ""])
    return stream.getvalue()
