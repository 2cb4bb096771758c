"""Cached views: what the frozen first part of a model makes of a client's images, computed once and kept."""
