"""What a run computes on: device, precision, determinism, memory, and mends of torch's compiler."""
