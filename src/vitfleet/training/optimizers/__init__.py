"""The optimiser of clients and server, its learning-rate schedule, gradients and their clipping."""
