"""The public Python API: train, compare, load, cost, predict, evaluate, export. The commands use the same functions.

What it does is done below: rounds in ``run``, loaded models in ``inference``, pages in ``report``. Here are the
arguments of users (``request``), and the values that they get back (``run``, ``comparison``).

import vitfleet

run = vitfleet.train("digits", method="transfl", overrides={"rounds": 5})
run.records          # one row per round, a pandas DataFrame where pandas is installed
run.model()          # the trained model, a torch.nn.Module
"""

from vitfleet.api.best_trials import BestTrial
from vitfleet.api.comparison import Comparison, compare, load_comparison
from vitfleet.api.models import evaluate, export, load_model, predict
from vitfleet.api.run import Run, cost, load_run, train
from vitfleet.exporters.write import Export
from vitfleet.inference.classifier import Classifier, ImagePrediction, Prediction
from vitfleet.inference.evaluate import Evaluation
from vitfleet.report.result_table import ResultTable, result_table

__all__ = [
    "BestTrial",
    "Classifier",
    "Comparison",
    "Evaluation",
    "Export",
    "ImagePrediction",
    "Prediction",
    "ResultTable",
    "Run",
    "compare",
    "cost",
    "evaluate",
    "export",
    "load_comparison",
    "load_model",
    "load_run",
    "predict",
    "result_table",
    "train",
]
