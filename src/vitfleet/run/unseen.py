"""Unseen clients: a share of the clients (``fleet.unseen``) that never trains."""

from __future__ import annotations

import numpy as np

from vitfleet.config.schema import Config
from vitfleet.randomness import Address, Purpose


def unseen_clients(config: Config) -> list[int]:
    """Return the clients that never train, in ascending order. They depend on the seed and their number alone."""
    if not config.fleet.num_unseen:
        return []
    rng = Address(config.seed, Purpose.UNSEEN_CLIENTS).generator()
    chosen = rng.choice(config.fleet.clients, config.fleet.num_unseen, replace=False)
    return [int(client) for client in np.sort(chosen)]


def training_clients(config: Config) -> list[int]:
    """Return all other clients, in ascending order."""
    unseen = set(unseen_clients(config))
    return [client for client in range(config.fleet.clients) if client not in unseen]
