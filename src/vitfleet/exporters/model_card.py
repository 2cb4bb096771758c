"""The model card: ``README.md`` in the form of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vitfleet import __version__
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config
from vitfleet.exporters.write import Export
from vitfleet.inference.classifier import Classifier

CLASSES_LISTED = 200
_LIBRARIES = {"safetensors": "timm", "torch-export": "pytorch"}  # of the hub, where it is not the format's name
_USES = {
    "timm": 'import timm\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True)',
    "safetensors": "import vitfleet\n\n"
    'model = vitfleet.load_model("FOLDER/model.safetensors")\nmodel.predict("cat.jpg")',
    "onnx": 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("FOLDER/model.onnx")\n'
    'logits, = session.run(["logits"], {"images": images})  # [batch, channels, height, width], pixels in 0…1',
    "torch-export": 'import torch\n\nmodel = torch.export.load("FOLDER/model.pt2").module()',
    "executorch": "from executorch.runtime import Runtime\n\n"
    'forward = Runtime.get().load_program("FOLDER/model.pte").load_method("forward")',
}


def model_card(model: Classifier, export: Export, config: Config | None, summary: Mapping[str, Any] | None) -> str:
    """Return the card of an exported model, with the run that trained it, if that is known."""
    info = model.info
    whose = "the server's model" if info.client is None else f"client {info.client}'s own model"
    if info.averaged_clients:
        whose += f"; what only clients have is the mean over {info.averaged_clients} of them"
    parameters = sum(tensor.numel() for tensor in model.vit.parameters())
    sections = [
        _front_matter(model, export, summary),
        f"# {info.model['name']}, trained with {info.method['name']} on {info.data.name}",
        f"Image classifier, trained by federated learning with vitfleet {__version__}: {whose}, "
        f"after round {info.rounds}; {parameters:,} parameters.",
        _use(export),
        _data(model),
        _method(info.method),
        _fleet(config),
        _accuracy(export, summary),
        _costs(summary),
        _privacy(info.client),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(model: Classifier, export: Export, summary: Mapping[str, Any] | None) -> str:
    tags = ["image-classification", "federated-learning", "vitfleet", str(model.info.method["name"])]
    lines = [
        f"library_name: {_LIBRARIES.get(export.format, export.format)}",
        "pipeline_tag: image-classification",
        f"tags: {json.dumps(tags)}",
        "metrics: [accuracy]",
    ]
    accuracy = _model_accuracy(summary) if model.info.client is None else None
    if accuracy is not None:
        dataset = json.dumps(model.info.data.name)
        lines += [
            "model-index:",
            f"- name: {json.dumps(model.info.model['name'])}",
            "  results:",
            "  - task: {type: image-classification}",
            f"    dataset: {{name: {dataset}, type: {dataset}, split: {model.info.data.eval_split}}}",
            f"    metrics: [{{type: accuracy, value: {accuracy:.4f}}}]",
        ]
    return "\n".join(["---", *lines, "---"])


def _model_accuracy(summary: Mapping[str, Any] | None) -> float | None:
    """Return the accuracy of the server's model; of a mean over clients it is in an entry of its own."""
    if summary is None:
        return None
    accuracy: float | None = summary.get("server_model", summary["accuracy"]).get(
        "accuracy", summary["accuracy"]["global"]
    )
    return accuracy


def _use(export: Export) -> str:
    checked = (
        f"Compared with the original on {export.compared} images: logits differ by at most {export.max_difference:.1e}."
    )
    return f"## Use\n\n```python\n{_USES[export.format]}\n```\n\n{checked}"


def _data(model: Classifier) -> str:
    info, data = model.info, model.info.data
    names = ", ".join(data.classes[:CLASSES_LISTED]) + (", …" if len(data.classes) > CLASSES_LISTED else "")
    return (
        f"## Data\n\n{data.name}: {len(data.classes)} classes: {names}.\n\n"
        f"An image is cropped to a square at its centre, resized to {data.image_size} x {data.image_size} pixels "
        f"({data.channels} channels), then to the network's {info.input_size} x {info.input_size}, and normalised with "
        f"mean {list(info.mean)} and standard deviation {list(info.std)} of pixels in 0…1."
    )


def _method(method: Mapping[str, Any]) -> str:
    name = method["name"]
    summary = METHODS[name].summary if name in METHODS.names() else ""
    keys = "".join(f"\n- `method.{key} = {value}`" for key, value in method.items() if key != "name")
    return f"## Method\n\n`{name}`: {summary}{keys and chr(10) + keys}"


def _fleet(config: Config | None) -> str:
    if config is None:
        return ""
    fleet, train = config.fleet, config.train
    kind = "simulated in one process" if fleet.kind == "simulation" else "real machines"
    partition = "a stream of tasks per client" if config.data.tasks else f"partition `{config.data.partition.kind}`"
    return (
        f"## Fleet\n\n{fleet.clients} clients ({kind}), {fleet.per_round} per round, {config.rounds} rounds, "
        f"{partition}, seed {config.seed}. A client's round: {train.epochs} epochs, batches of {train.batch_size}, "
        f"{train.optimizer} with a learning rate of {train.lr}."
    )


def _accuracy(export: Export, summary: Mapping[str, Any] | None) -> str:
    lines = []
    if summary is not None:
        accuracy = summary["accuracy"]
        split = summary.get("eval_split", "test")
        if accuracy["global"] is not None:
            what = "mean of clients' models" if "server_model" in summary else "the server's model"
            lines.append(f"- common {split} images, {what}: {accuracy['global']:.2%}")
        if "server_model" in summary:
            lines.append(f"- common {split} images, the server's model: {summary['server_model']['accuracy']:.2%}")
        if accuracy["local"] is not None:
            lines.append(f"- clients' own models on their own {split} images: {accuracy['local']:.2%}")
        if (continual := summary.get("continual")) and continual["average_accuracy"] is not None:
            lines.append(f"- average over all tasks: {continual['average_accuracy']:.2%}")
    if export.quantised is not None:
        lines.append(f"- eight-bit weights: {quantised_text(export)}")
    return "## Accuracy\n\n" + ("\n".join(lines) or "Not measured.")


def quantised_text(export: Export) -> str:
    """Return what eight-bit weights cost, as a sentence."""
    quantised = export.quantised
    assert quantised is not None
    size = f"{quantised.bytes / 2**20:.1f} instead of {quantised.original_bytes / 2**20:.1f} MiB"
    same = f"the same class for {quantised.agreement:.2%} of images"
    if quantised.accuracy is None or quantised.original_accuracy is None:
        return f"{size}, {same}; accuracy was not measured, there are no labelled images"
    change = 100 * (quantised.accuracy - quantised.original_accuracy)
    return (
        f"{size}, accuracy {quantised.accuracy:.2%} instead of {quantised.original_accuracy:.2%} "
        f"({change:+.2f} points) on {quantised.images:,} images, {same}"
    )


def _costs(summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return ""
    message, total, client = summary["message"], summary["total"], summary["client"]
    return (
        f"## Costs\n\nPer client and round: {message['up_bytes'] / 2**20:.2f} MiB up, "
        f"{message['down_bytes'] / 2**20:.2f} MiB down. "
        f"All clients: {total['up_bytes'] / 2**20:.1f} MiB up, {total['down_bytes'] / 2**20:.1f} MiB down, "
        f"{total['train_gflops']:.4g} GFLOPs of training. {client['trainable_params']:,} of {client['params']:,} "
        f"parameters are trained."
    )


def _privacy(client: int | None) -> str:
    text = (
        "Training images stayed with the clients; what clients sent is described under *Method*. Federated learning "
        "alone is no guarantee: weights can reveal what they were trained on. No differential privacy is stated for "
        "this model."
    )
    if client is not None:
        text += " This is one client's own model, trained on its images: publish it only if its owner agrees."
    return f"## Privacy\n\n{text}"
