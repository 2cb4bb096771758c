"""The page of a report, one HTML file: ``page`` writes it, the scripts draw its figures.

Not here: which figures there are (``report/figures``).
"""
