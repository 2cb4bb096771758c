"""A partition by size alone: a few clients hold most of the images."""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vitfleet.config.base import PartitionParams
from vitfleet.config.registry import register_partition
from vitfleet.data.partitions.assign import PartitionInput


class UnequalParams(PartitionParams):
    """Clients hold shares 1, 1/2^a, 1/3^a, … of the images (Zipf), classes mixed."""

    exponent: float = Field(1.0, ge=0, description="exponent a of the shares; 0: all equal")


@register_partition("unequal", UnequalParams)
def unequal(params: UnequalParams, data: PartitionInput) -> NDArray[np.int64]:
    """Return the client of each training image."""
    shares = (1 + np.arange(data.clients)) ** -params.exponent
    edges = np.floor(np.cumsum(shares / shares.sum()) * len(data.labels) + 1e-9).astype(np.int64)
    owners = np.searchsorted(edges, np.arange(len(data.labels)), side="right").clip(max=data.clients - 1)
    return data.rng.permutation(owners)
