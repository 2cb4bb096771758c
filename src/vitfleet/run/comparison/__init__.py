"""Several runs compared: ``manifest`` says which, ``jobs`` runs some at a time, ``results`` reads what came out.

Not here: how the runs are put together from methods, sweeps and seeds (``api``), and tables of results (``report``).
"""
