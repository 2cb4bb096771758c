"""Using trained models: loading them from a run's folder or a file, predicting, evaluating, explaining."""
