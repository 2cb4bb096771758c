"""How well models do: accuracy on test images, accuracy and forgetting over tasks, and the registered metrics.

Not here: the forward pass over many images (``training/evaluator.py``), and the evaluation of a model on images that
are no part of a run (``inference``).
"""
