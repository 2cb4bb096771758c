"""How steps are run: one operation after the other, or captured once in a CUDA graph and replayed."""
