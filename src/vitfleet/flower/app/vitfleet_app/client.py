"""What runs on a device."""

from vitfleet.flower.client_app import app

__all__ = ["app"]
