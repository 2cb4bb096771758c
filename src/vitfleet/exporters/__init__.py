"""Trained models in the formats of other software: graphs, weights, and the model card.

A format's packages are imported when a model is written in it. What is written is loaded again and compared with the
original (``write``). Loading models is in ``inference``.
"""
