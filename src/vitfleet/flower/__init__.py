"""A fleet on real machines, on Flower.

``server/`` carries a run's requests to clients, ``device/`` is a client on its own machine, ``transport/`` is what they
send each other. Both use ``certificates`` and ``processes``; ``app/`` is the Flower app, which `flwr run` starts.

Training is not here: a device runs the same client runtime as a simulation (:mod:`vitfleet.fleet.client_runtime`).
"""
