"""Trained models in the formats of other software: one file per kind of format, and the model card.

A format's packages are imported when a model is written in it. What is written is loaded again and compared with the
original (``write``). Loading models is in ``inference``.
"""
