"""A local page on which images are dropped and several models of a run predict them side by side.

Which models are shown is chosen in ``api.models``.
"""
