"""Clients that learn one task after the other: stored samples, penalties, projections, sparse knowledge."""
