"""The optimiser of clients and server, and its learning-rate schedule. Where gradients come from: `passes.py`."""
