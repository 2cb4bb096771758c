"""Vision transformers with named parts."""

from vitfleet.models.compat import ensure_torchvision

ensure_torchvision()  # before any module of this package imports timm
