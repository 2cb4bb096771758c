"""A run: its rounds, and everything that they leave in its folder.

``setup`` opens a run as a ``RunContext`` (``context``: what does not change). ``loop`` takes a ``RunState`` (``state``:
what a round changes) from round to round: ``round_plan`` chooses the clients, ``round`` trains them, aggregates and
evaluates, and what is known of it is a record (``records``). ``clients`` has what a simulation gives its clients. Each
folder is one subject: ``evaluate`` (accuracy and metrics), ``checkpoints``, ``output`` (what people and other programs
read) and ``comparison`` (several runs).

Not here: how a client trains (``training``, ``methods``), how it is reached (``fleet``, ``flower``), and how results
are shown (``report``).
"""
