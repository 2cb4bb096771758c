"""Checkpoints: ``manifest`` is their form on the disk, ``store`` writes and reads them.

Not here: what a checkpoint contains (``run/state.py``), and how a state becomes bytes (``wire``).
"""
