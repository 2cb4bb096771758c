"""The server: a run's requests on Flower's grid, and the processes that clients connect to.

``serve`` starts the ``processes`` (SuperLink, ``proxy`` with its ``connections``, `flwr`) and shows the rounds, which
``server_app`` runs; ``progress_file`` connects the two. ``fleet`` is a fleet like the simulated one: an ``exchange``
of messages with the ``nodes``.
"""
