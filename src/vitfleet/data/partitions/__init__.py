"""Which client has which images.

``client_indices`` is the result as two flat arrays, ``assign`` makes it, ``partitioners`` has the built-in partitions,
``saved`` writes it (and streams of tasks) to a run's folder. How a client's images are divided into tasks is in
:mod:`vitfleet.data.tasks`.
"""
