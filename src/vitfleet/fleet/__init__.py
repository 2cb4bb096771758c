"""Fleets: where clients run, and how messages reach them."""
