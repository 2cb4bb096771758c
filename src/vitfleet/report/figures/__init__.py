"""Figures as data (``types``): the page draws them in the browser, ``files`` with matplotlib.

``curves`` compares configurations; ``runs`` shows single runs, with ``metrics`` and ``methods`` for the figures of
those; ``folder`` draws what a run puts into its own folder.
"""
