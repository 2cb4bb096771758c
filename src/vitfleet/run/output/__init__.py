"""What people and other programs read of a run: its folder, summary and model files, and experiment trackers.

Not here: the lines of ``records.jsonl`` (``run/records.py``), which the run itself reads again; checkpoints, which
nobody else reads; tables and pages (``report``).
"""
