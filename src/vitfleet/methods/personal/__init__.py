"""Clients with a model, or a part of one, of their own: local heads, personal models, training alone."""
