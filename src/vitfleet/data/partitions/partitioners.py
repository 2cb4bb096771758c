"""The built-in partitions: functions from labels to the client of each sample, registered with their parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import Field

from vitfleet.config.base import PartitionParams
from vitfleet.config.registry import register_partition
from vitfleet.data.partitions.assign import Floats, Owners, PartitionInput, assign_by_shares, sort_by_label
from vitfleet.data.partitions.client_indices import Ints, Partition
from vitfleet.data.partitions.saved import load_partition_for
from vitfleet.errors import ConfigError


class IidPartition(PartitionParams):
    """Every client draws from the same distribution."""

    imbalance: float = Field(0.0, ge=0, le=5, description="log-normal σ of the clients' sample counts; 0: equal")


@register_partition("iid", IidPartition)
def iid(params: IidPartition, data: PartitionInput) -> Ints:
    """Assign samples at random, in numbers drawn from a log-normal distribution."""
    sizes = _largest_remainder(data.rng.lognormal(0.0, params.imbalance, data.clients), len(data.labels))
    sent, received = _transfers(sizes, 1)
    owners = np.repeat(np.arange(data.clients), sizes - sent + received)
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
    shares = dirichlet_shares(params.beta, data.num_classes, data.clients, data.rng)
    owners = assign_by_shares(data.labels, shares, data.rng)
    return _ensure_min_samples(owners, data.clients, params.min_samples, data.rng)


def dirichlet_shares(beta: float, num_classes: int, clients: int, rng: np.random.Generator) -> Floats:
    """Draw ``[classes, clients]`` shares, each row from a symmetric Dirichlet(β), for any β > 0.

    A Dirichlet draw is a row of normalised Gamma(β) draws. For small β all of them underflow to 0, and 0 / 0 is NaN.
    Below 1 the logarithms are drawn instead, with Gamma(β) = Gamma(β + 1) · U^(1/β), and the row is normalised by a
    softmax that divides by β after the largest entry has been subtracted.
    """
    size = (num_classes, clients)
    scale = min(beta, 1.0)
    if beta < 1:
        logs = beta * np.log(rng.standard_gamma(beta + 1, size)) - rng.standard_exponential(size)
    else:
        logs = np.log(rng.standard_gamma(beta, size))
    with np.errstate(over="ignore"):  # a difference of -inf is a share of 0, which is right
        shares: Floats = np.exp((logs - logs.max(axis=1, keepdims=True)) / scale)
    shares /= shares.sum(axis=1, keepdims=True)
    return shares


class ClassesPartition(PartitionParams):
    """Each client holds a fixed number of classes, whose samples it shares evenly with other holders."""

    per_client: int = Field(2, ge=1, description="classes per client")


@register_partition("classes", ClassesPartition)
def by_classes(params: ClassesPartition, data: PartitionInput) -> Ints:
    """Give every client the classes that have the fewest holders so far."""
    # Only classes that have images are assigned: a client with an empty class would have one class too few.
    present = np.unique(data.labels)
    fewest = -(-len(present) // data.clients)
    if not fewest <= params.per_client <= len(present):
        reason = f"{data.clients} clients have to hold all {len(present)} classes of the training images"
        remedy = f"must be between {fewest} and {len(present)}: {reason}"
        raise ConfigError("data.partition.per_client", params.per_client, remedy)
    is_holder = np.zeros((len(present), data.clients))
    holders = np.zeros(len(present))
    for client in range(data.clients):
        # The classes with the fewest holders, ties at random: the numbers of holders differ by at most one.
        drawn = np.argsort(holders + data.rng.random(len(present)), kind="stable")[: params.per_client]
        is_holder[drawn, client] = 1
        holders[drawn] += 1
    shares = np.full((data.num_classes, data.clients), 1 / data.clients)
    shares[present] = is_holder / holders[:, None]
    return assign_by_shares(data.labels, shares, data.rng)


class ShardsPartition(PartitionParams):
    """Sorted by label, cut into equal shards, assigned to the clients (McMahan et al., 2017)."""

    per_client: int = Field(2, ge=1, description="shards per client")


@register_partition("shards", ShardsPartition)
def shards(params: ShardsPartition, data: PartitionInput) -> Ints:
    """Assign shards of samples that are sorted by label."""
    samples, count = len(data.labels), data.clients * params.per_client
    if count > samples:
        most = samples // data.clients
        remedy = f"must be between 1 and {most}: {samples} training images for {data.clients} clients"
        raise ConfigError("data.partition.per_client", params.per_client, remedy)
    # Sizes as of np.array_split: nothing is dropped, the first shards are one larger.
    sizes = np.full(count, samples // count) + (np.arange(count) < samples % count)
    owners = np.empty(samples, np.int64)
    owners[sort_by_label(data.labels, data.rng)] = np.repeat(data.rng.permutation(count) // params.per_client, sizes)
    return owners


class SourcePartition(PartitionParams):
    """One client per source: the folder, session or writer each image came from."""


@register_partition("source", SourcePartition)
def by_source(params: SourcePartition, data: PartitionInput) -> Owners:
    """Assign each image to the client of its source; test images of other sources follow the training shares."""
    if data.sources is None:
        remedy = (
            "the data set does not record the sources of its images; use a folder with the layout <source>/<class>/*, "
            "or parquet files with a column source, client, writer, user or domain, or set data.source_column"
        )
        raise ConfigError("data.partition.kind", "source", remedy)
    sources, owners = np.unique(data.sources, return_inverse=True)
    if len(sources) != data.clients:
        remedy = f"must be {len(sources)}: the data has {len(sources)} sources"
        raise ConfigError("fleet.clients", data.clients, remedy)
    train = owners.reshape(-1).astype(np.int64)
    if data.test_sources is None:
        return Owners(train)
    nearest = np.minimum(np.searchsorted(sources, data.test_sources), len(sources) - 1)
    return Owners(train, np.where(sources[nearest] == data.test_sources, nearest, -1).astype(np.int64))


class FilePartition(PartitionParams):
    """A partition saved by an earlier run."""

    path: str = Field(description="a run folder, or its partition.safetensors")


@register_partition("file", FilePartition)
def from_file(params: FilePartition, data: PartitionInput) -> Partition:
    """Load a partition and check that it was made for these images."""
    path = Path(params.path).expanduser()
    return load_partition_for(path, data.clients, data.labels, data.test_labels, data.num_classes)


def _largest_remainder(weights: Floats, total: int) -> Ints:
    """Divide ``total`` in proportion to weights, rounded to integers that sum to it."""
    exact = weights / weights.sum() * total
    rounded: Ints = np.floor(exact).astype(np.int64)
    order = np.argsort(rounded - exact, kind="stable")  # the largest remainder first
    rounded[order[: total - rounded.sum()]] += 1
    return rounded


def _transfers(sizes: Ints, min_samples: int) -> tuple[Ints, Ints]:
    """Return how many samples each client gives and receives so that every client has at least ``min_samples``.

    The result is the same as moving one sample at a time from the client that is largest at that moment: the largest
    clients are reduced to one common level (some keep one more), and no other client gives anything.
    """
    received = np.maximum(min_samples - sizes, 0)
    needed = int(received.sum())
    low, high = min_samples, max(int(sizes.max()), min_samples)
    while low < high:  # the highest level that frees enough; the caller has checked that `min_samples` does
        middle = (low + high + 1) // 2
        if np.maximum(sizes - middle, 0).sum() >= needed:
            low = middle
        else:
            high = middle - 1
    sent = np.maximum(sizes - low, 0)
    sent[np.flatnonzero(sent)[: int(sent.sum()) - needed]] -= 1
    return sent, received


def _ensure_min_samples(owners: Ints, clients: int, min_samples: int, rng: np.random.Generator) -> Ints:
    """Move samples from the largest clients until every client has at least ``min_samples``.

    How many samples each client gives follows from :func:`_transfers`. Which ones is drawn, so that the giver keeps its
    mix of classes. A receiving client gets most of its samples from one giver, not from the average of all, which keeps
    the partition as skewed as configured.
    """
    sizes = np.bincount(owners, minlength=clients)
    sent, received = _transfers(sizes, min_samples)
    order = rng.permutation(len(owners))
    grouped = order[np.argsort(owners[order], kind="stable")]
    holder = owners[grouped]
    rank = np.arange(len(owners)) - (np.cumsum(sizes) - sizes)[holder]
    moved = owners.copy()
    moved[grouped[rank < sent[holder]]] = np.repeat(np.arange(clients), received)
    return moved
