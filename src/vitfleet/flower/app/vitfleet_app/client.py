"""The ClientApp."""

from vitfleet.flower.client_app import app

__all__ = ["app"]
