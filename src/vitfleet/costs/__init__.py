"""The cost of a client's round, without training: FLOPs, memory, bytes, time on a hardware profile."""
