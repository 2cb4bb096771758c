"""What a client's round costs, without training: FLOPs, memory, bytes, time on a hardware profile."""
