"""A fleet on real machines, on Flower: the fleet, the clients, and the processes of both."""
