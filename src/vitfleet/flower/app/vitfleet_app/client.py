"""The ClientApp."""

from vitfleet.flower.device.client_app import app

__all__ = ["app"]
