"""Clients that learn one task after the other.

`replay/` trains on stored samples of earlier tasks, `gradients/` takes no step against the gradients of earlier tasks,
`penalties/` holds weights that earlier tasks need. Beside them are methods of no such group, and what several of them
share: stored samples, sparse weights. What counts as a task, and how forgetting is measured, does not live here:
`data/tasks.py`, `run/evaluate/continual.py`.
"""
