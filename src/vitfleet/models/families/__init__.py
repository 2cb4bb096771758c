"""Model families: one file each, with the builder of its models and the layout of their parts.

A family without a layout of its own has the one that timm's naming suggests. Those of timm import it when a model is
built: a device that trains others needs no timm.
"""

from vitfleet.models.families import cait, cvt, deit, levit, pit, pvt, swin, t2t, vit

__all__ = ["cait", "cvt", "deit", "levit", "pit", "pvt", "swin", "t2t", "vit"]
