"""Model families: the builders of their models, and where the parts of these are.

``vit``, ``t2t`` and ``cvt`` are modules of our own; ``timm_families`` is a table of those whose modules are timm's,
which is imported when one is built: a device that trains others needs no timm. ``request`` is what every builder is
given, and the checks that they share. A family that does not say where its parts are has them where timm's naming
suggests.
"""

from vitfleet.models.families import cvt, t2t, timm_families, vit

__all__ = ["cvt", "t2t", "timm_families", "vit"]
