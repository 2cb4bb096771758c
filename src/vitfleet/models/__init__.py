"""Vision transformers with named parts, as functions of their weights.

``zoo`` builds a model by its name, from ``families/`` or timm, and loads pretrained weights into it. ``parts`` says
which weight belongs to which part. ``net`` is what the rest of the package sees: an architecture that is called with
weights, of one client or of several stacked; how it runs is in ``forward/``. ``adapters`` (prompts, low-rank factors)
and ``variants/`` change an architecture for a method.

Losses, gradients and optimisers are not here: see ``training/``.
"""
