"""The ServerApp."""

from vitfleet.flower.server.server_app import app

__all__ = ["app"]
