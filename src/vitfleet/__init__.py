"""vitfleet trains vision transformers across a fleet of edge devices.

The names below are the public API. Importing the package is cheap: each name is imported when it is first used, and
torch with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitfleet.torchvision_operators import install_finder

__version__ = "0.2.0"

install_finder()  # before anybody imports timm

if TYPE_CHECKING:
    from vitfleet.api import *  # noqa: F403
    from vitfleet.config import Config as Config
    from vitfleet.config import load_config as load_config
    from vitfleet.config.registry import register_aggregation as register_aggregation
    from vitfleet.config.registry import register_callback as register_callback
    from vitfleet.config.registry import register_dataset as register_dataset
    from vitfleet.config.registry import register_method as register_method
    from vitfleet.config.registry import register_metric as register_metric
    from vitfleet.config.registry import register_model as register_model
    from vitfleet.config.registry import register_partition as register_partition
    from vitfleet.config.registry import register_server_optimizer as register_server_optimizer
    from vitfleet.config.registry import register_tracker as register_tracker
    from vitfleet.config.trust import trust_plugins as trust_plugins
    from vitfleet.run.callbacks import BestModel as BestModel
    from vitfleet.run.callbacks import Callback as Callback
    from vitfleet.run.callbacks import EarlyStopping as EarlyStopping
    from vitfleet.run.callbacks import StopRun as StopRun

_HOMES = {
    "vitfleet.api": (
        "BestTrial", "Classifier", "Comparison", "Evaluation", "Export", "ImagePrediction", "Prediction", "ResultTable",
        "Run", "compare", "cost", "evaluate", "export", "load_comparison", "load_model", "load_run", "predict",
        "result_table", "train",
    ),
    "vitfleet.config": ("Config", "load_config"),
    "vitfleet.config.trust": ("trust_plugins",),
    "vitfleet.config.registry": (
        "register_aggregation", "register_callback", "register_dataset", "register_method", "register_metric",
        "register_model", "register_partition", "register_server_optimizer", "register_tracker",
    ),
    "vitfleet.run.callbacks": ("BestModel", "Callback", "EarlyStopping", "StopRun"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'vitfleet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
