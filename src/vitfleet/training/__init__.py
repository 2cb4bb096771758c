"""A client's training: what a method asks for, and the trainer that owns the loop."""
