"""The ServerApp."""

from vitfleet.flower.server_app import app

__all__ = ["app"]
