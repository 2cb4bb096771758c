"""What a trained model must be told of the data it was trained on: class names and the form of the images."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vitfleet.config.data import EvalSplit
from vitfleet.data.images import DataSet
from vitfleet.errors import UserError
from vitfleet.files import read_json, write_atomically

DATA_FILE = "data.json"


@dataclass(frozen=True)
class DataInfo:
    """A run's data set.

    Attributes
    ----------
    classes
        Names of the classes, in the order of the labels.
    channels, image_size
        Colour channels and side in pixels of the stored images.
    eval_split
        The images that every accuracy was measured on.
    """

    name: str
    classes: tuple[str, ...]
    channels: int
    image_size: int
    eval_split: EvalSplit = "test"


def describe_data(data: DataSet, eval_split: EvalSplit) -> DataInfo:
    """Return the description of a run's data."""
    return DataInfo(data.name, tuple(data.classes), data.train.channels, data.train.image_size, eval_split)


def write_data_info(data: DataSet, eval_split: EvalSplit, folder: Path) -> None:
    """Write the description of a run's data into its folder."""
    info = describe_data(data, eval_split)
    write_atomically(folder / DATA_FILE, json.dumps(asdict(info), indent=2).encode())


def read_data_info(folder: Path) -> DataInfo:
    """Read the description of a run's data."""
    path = folder / DATA_FILE
    if not path.is_file():
        raise UserError(f"{folder}: has no {DATA_FILE}; the run was never set up: `vitfleet resume {folder}`")
    tree = read_json(path)
    try:
        return DataInfo(**{**tree, "classes": tuple(tree["classes"])})
    except (TypeError, LookupError):
        raise UserError(f"{path}: is damaged; `vitfleet resume {folder}` writes it again") from None
