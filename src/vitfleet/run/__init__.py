"""A run: setting it up, conducting its rounds, keeping its records and its checkpoints."""
