"""Plain ViTs that a method turns into another architecture, with a forward pass of its own.

``task_tokens`` is DyTox's, ``external_keys`` is LVT's. What only adds weights to a model is in
:mod:`vitfleet.models.adapters`.
"""
