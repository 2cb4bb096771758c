"""The built-in partitions; each is a function from labels to owners, registered with its parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import Field

from vitfleet.config.base import PartitionParams
from vitfleet.config.registry import register_partition
from vitfleet.data.client_indices import Ints
from vitfleet.data.partition import (
    Floats,
    Owners,
    Partition,
    PartitionInput,
    Random,
    assign_by_shares,
    shuffled_by_label,
)
from vitfleet.data.partition_io import load_partition_for
from vitfleet.errors import ConfigError


class IidPartition(PartitionParams):
    """Every client draws from the same distribution."""

    imbalance: float = Field(0.0, ge=0, le=5, description="log-normal σ of the clients' sample counts; 0: equal")


@register_partition("iid", IidPartition)
def iid(params: IidPartition, data: PartitionInput) -> Ints:
    """Assign samples at random, in numbers drawn from a log-normal distribution."""
    sizes = _largest_remainder(data.rng.lognormal(0.0, params.imbalance, data.clients), len(data.labels))
    give, need = _level(sizes, 1)
    owners = np.repeat(np.arange(data.clients), sizes - give + need)
    return data.rng.permutation(owners)


class DirichletPartition(PartitionParams):
    """Each class is spread over the clients by Dirichlet(β): small β, few classes per client."""

    beta: float = Field(0.5, gt=0, description="concentration β of the Dirichlet distribution")
    min_samples: int = Field(0, ge=0, description="every client gets at least this many; 0 allows empty clients")


@register_partition("dirichlet", DirichletPartition)
def dirichlet(params: DirichletPartition, data: PartitionInput) -> Ints:
    """Draw the shares of each class from a Dirichlet distribution."""
    most = len(data.labels) // data.clients
    if params.min_samples > most:
        remedy = f"must be between 0 and {most}: {len(data.labels)} training images for {data.clients} clients"
        raise ConfigError("data.partition.min_samples", params.min_samples, remedy)
    shares = dirichlet_shares(params.beta, data.classes, data.clients, data.rng)
    owners = assign_by_shares(data.labels, shares, data.rng)
    return _at_least(owners, data.clients, params.min_samples, data.rng)


def dirichlet_shares(beta: float, classes: int, clients: int, random: Random) -> Floats:
    """Draw ``[classes, clients]`` shares, each row from a symmetric Dirichlet(β), for any β > 0.

    A Dirichlet draw is a row of normalised Gamma(β) draws. For small β all of them underflow to 0, and 0 / 0
    is NaN; so below 1 the draws are made as logarithms, with Gamma(β) = Gamma(β + 1) · U^(1/β), and the row
    is normalised by a softmax whose division by β comes after the largest entry is subtracted.
    """
    size = (classes, clients)
    scale = min(beta, 1.0)
    if beta < 1:
        logs = beta * np.log(random.standard_gamma(beta + 1, size)) - random.standard_exponential(size)
    else:
        logs = np.log(random.standard_gamma(beta, size))
    with np.errstate(over="ignore"):  # a gap of -inf is a share of 0, as it should be
        shares: Floats = np.exp((logs - logs.max(axis=1, keepdims=True)) / scale)
    shares /= shares.sum(axis=1, keepdims=True)
    return shares


class ClassesPartition(PartitionParams):
    """Each client holds a fixed number of classes, whose samples it shares evenly with other holders."""

    per_client: int = Field(2, ge=1, description="classes per client")


@register_partition("classes", ClassesPartition)
def by_classes(params: ClassesPartition, data: PartitionInput) -> Ints:
    """Give every client the classes that have the fewest holders so far."""
    # Only classes that have images are assigned: holding an empty one would not be holding a class.
    present = np.unique(data.labels)
    wanted = params.per_client
    least = -(-len(present) // data.clients)
    if not least <= wanted <= len(present):
        why = f"{data.clients} clients have to hold all {len(present)} classes of the training images"
        remedy = f"must be between {least} and {len(present)}: {why}"
        raise ConfigError("data.partition.per_client", wanted, remedy)
    held = np.zeros((len(present), data.clients))
    holders = np.zeros(len(present))
    for client in range(data.clients):
        # The least held classes, ties at random: the numbers of holders never differ by more than one.
        chosen = np.argsort(holders + data.rng.random(len(present)), kind="stable")[:wanted]
        held[chosen, client] = 1
        holders[chosen] += 1
    shares = np.full((data.classes, data.clients), 1 / data.clients)
    shares[present] = held / holders[:, None]
    return assign_by_shares(data.labels, shares, data.rng)


class ShardsPartition(PartitionParams):
    """Sorted by label, cut into equal shards, assigned to the clients (McMahan et al., 2017)."""

    per_client: int = Field(2, ge=1, description="shards per client")


@register_partition("shards", ShardsPartition)
def shards(params: ShardsPartition, data: PartitionInput) -> Ints:
    """Assign shards of samples that are sorted by label."""
    samples, count = len(data.labels), data.clients * params.per_client
    if count > samples:
        why = f"{samples} training images for {data.clients} clients"
        raise ConfigError(
            "data.partition.per_client",
            params.per_client,
            f"must be between 1 and {samples // data.clients}: {why}",
        )
    # np.array_split's sizes: nothing is dropped, the first few shards are one larger.
    sizes = np.full(count, samples // count) + (np.arange(count) < samples % count)
    owners = np.empty(samples, np.int64)
    owners[shuffled_by_label(data.labels, data.rng)] = np.repeat(
        data.rng.permutation(count) // params.per_client, sizes
    )
    return owners


class SourcePartition(PartitionParams):
    """One client per source: the folder, session or writer each image came from."""


@register_partition("source", SourcePartition)
def by_source(params: SourcePartition, data: PartitionInput) -> Owners:
    """Assign each image to the client of its source; test images of other sources follow the training shares."""
    if data.sources is None:
        remedy = (
            "the data does not say where its images came from; a folder laid out as "
            "train/<source>/<class>/* and a parquet file with a column source, client, writer or user do"
        )
        raise ConfigError("data.partition.kind", "source", remedy)
    known, owners = np.unique(data.sources, return_inverse=True)
    if len(known) != data.clients:
        raise ConfigError("fleet.clients", data.clients, f"must be {len(known)}: the data has {len(known)} sources")
    train = owners.reshape(-1).astype(np.int64)
    if data.test_sources is None:
        return Owners(train)
    place = np.minimum(np.searchsorted(known, data.test_sources), len(known) - 1)
    return Owners(train, np.where(known[place] == data.test_sources, place, -1).astype(np.int64))


class FilePartition(PartitionParams):
    """A partition saved by an earlier run."""

    path: str = Field(description="a run folder, or its partition.safetensors")


@register_partition("file", FilePartition)
def from_file(params: FilePartition, data: PartitionInput) -> Partition:
    """Read a partition and check that it was made for these images."""
    path = Path(params.path).expanduser()
    return load_partition_for(path, data.clients, data.labels, data.test_labels, data.classes)


def _largest_remainder(weights: Floats, total: int) -> Ints:
    """Round ``total`` shared by weights to whole numbers that sum to it."""
    exact = weights / weights.sum() * total
    whole: Ints = np.floor(exact).astype(np.int64)
    order = np.argsort(whole - exact, kind="stable")  # the largest remainder first
    whole[order[: total - whole.sum()]] += 1
    return whole


def _level(sizes: Ints, least: int) -> tuple[Ints, Ints]:
    """Return how many samples each client gives and needs so that everybody has at least ``least``.

    It comes to the same as moving one sample at a time from whoever is largest at that moment: the largest
    clients are cut down to one common level (some keep one more), nobody else gives anything.
    """
    need = np.maximum(least - sizes, 0)
    wanted = int(need.sum())
    low, high = least, max(int(sizes.max()), least)
    while low < high:  # the highest level that frees enough; the caller has checked that `least` does
        middle = (low + high + 1) // 2
        if np.maximum(sizes - middle, 0).sum() >= wanted:
            low = middle
        else:
            high = middle - 1
    give = np.maximum(sizes - low, 0)
    give[np.flatnonzero(give)[: int(give.sum()) - wanted]] -= 1
    return give, need


def _at_least(owners: Ints, clients: int, least: int, random: Random) -> Ints:
    """Move samples from the largest clients until every client has at least ``least``.

    How many each gives is :func:`_level`'s; which ones is drawn, so that a giver keeps its mix of classes.
    They are handed on giver by giver to the needy in their order: a client filled up mostly resembles
    one giver instead of the average, which keeps the partition as skewed as it was meant to be.
    """
    sizes = np.bincount(owners, minlength=clients)
    give, need = _level(sizes, least)
    order = random.permutation(len(owners))
    grouped = order[np.argsort(owners[order], kind="stable")]
    holder = owners[grouped]
    rank = np.arange(len(owners)) - (np.cumsum(sizes) - sizes)[holder]
    moved = owners.copy()
    moved[grouped[rank < give[holder]]] = np.repeat(np.arange(clients), need)
    return moved
