"""What the commands print: ``progress`` while a run goes on, ``results`` and ``costs`` as tables of 80 columns.

Not here: which command prints what (``cli``).
"""
