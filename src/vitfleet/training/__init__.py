"""Local training: the objective that a method states, and the trainer that runs it."""
