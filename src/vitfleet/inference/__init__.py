"""Trained models in use: loading them from a run's folder or a file, predicting, evaluating, explaining.

Not here: evaluation during a run (``run.evaluation``), with which this one shares its core, ``training.evaluator``;
figures and tables of evaluations (``report``).
"""
