"""The Flower app of vitfleet."""
