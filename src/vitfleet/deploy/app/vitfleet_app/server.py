"""What runs on the server."""

from vitfleet.deploy.server_app import app

__all__ = ["app"]
