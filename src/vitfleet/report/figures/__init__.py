"""Figures as data (``types``): the page draws them in the browser, ``files`` with matplotlib.

``curves`` compares configurations; ``runs`` shows single runs, with the figures that ``methods`` declare; ``folder``
draws what a run puts into its own folder.
"""
