"""What runs on a device."""

from vitfleet.deploy.client_app import app

__all__ = ["app"]
