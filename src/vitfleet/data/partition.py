"""Who holds which images.

One idea carries the label-based kinds: a *share matrix* (classes x clients, rows sum to 1) says which part
of a class each client gets, and :func:`assign_by_shares` deals the samples by it. The test images are dealt by
the shares the training partition ended up with (client's images of a class / all images of that class), so a
client's own test split follows its own training distribution, whatever the kind.

Why flwr-datasets' partitioners are not used here, although we like the library: ``PathologicalPartitioner``
loses classes that nobody drew with only a warning, and refuses classes with fewer samples than holders;
``ShardPartitioner`` drops the incomplete shard by default; ``DirichletPartitioner`` reaches a minimum size by
drawing again, and gives up after ten attempts; none deals the test set by the same shares; and all of them
need ``datasets`` on the machine that trains. They serve as the reference in the tests instead.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitfleet.config.schema import (
    ClassesPartition,
    DirichletPartition,
    FilePartition,
    IidPartition,
    PartitionConfig,
    ShardsPartition,
    SourcePartition,
)
from vitfleet.data.client_indices import ClientIndices, Ints, Partition
from vitfleet.data.images import DataSet
from vitfleet.data.partition_io import load_partition_for
from vitfleet.errors import ConfigError
from vitfleet.randomness import Address, Purpose

__all__ = [
    "ClientIndices",
    "Partition",
    "assign_by_shares",
    "dirichlet_shares",
    "make_partition",
    "partition_dataset",
    "training_shares",
]

Floats = NDArray[np.float64]
Random = np.random.Generator

# The address' epoch keeps the draws of the two splits apart.
_TRAIN, _TEST = 0, 1


def make_partition(
    config: PartitionConfig,
    clients: int,
    seed: int,
    train_labels: Ints,
    test_labels: Ints,
    classes: int,
    train_sources: Ints | None = None,
    test_sources: Ints | None = None,
) -> Partition:
    """Deal the training and the test images to the clients.

    Every image of both splits is dealt to exactly one client. A client may end up empty where the kind
    allows it (``dirichlet`` without ``min_samples``, a class with fewer images than holders).

    Parameters
    ----------
    config
        The table ``data.partition``.
    clients
        ``fleet.clients``.
    seed
        The run's seed; the partition depends on nothing else that is random.
    train_labels, test_labels
        The class of each image, in ``range(classes)``; a class may have no images.
    classes
        Number of classes.
    train_sources, test_sources
        Where each image came from, for the kind ``source``.

    Raises
    ------
    ConfigError
        The data cannot be dealt in this way; names the key and the range that works.
    """
    samples = len(train_labels)
    if not 1 <= clients <= samples:
        remedy = f"must be between 1 and {samples}, the number of training images"
        raise ConfigError("fleet.clients", clients, remedy)
    if isinstance(config, FilePartition):
        return load_partition_for(Path(config.path).expanduser(), clients, train_labels, test_labels, classes)
    random = _random(seed, _TRAIN)
    match config:
        case IidPartition():
            owners = _iid(config, clients, samples, random)
        case DirichletPartition():
            owners = _dirichlet(config, clients, train_labels, classes, random)
        case ClassesPartition():
            owners = _classes(config, clients, train_labels, classes, random)
        case ShardsPartition():
            owners = _shards(config, clients, train_labels, random)
        case SourcePartition():
            owners = _by_source(clients, train_sources)
    train = ClientIndices.from_owners(owners, clients)
    counts = train.class_counts(train_labels, classes)
    test_owners = assign_by_shares(test_labels, training_shares(counts), _random(seed, _TEST))
    if isinstance(config, SourcePartition) and train_sources is not None and test_sources is not None:
        test_owners = _keep_sources(test_owners, np.unique(train_sources), test_sources)
    return Partition(train, ClientIndices.from_owners(test_owners, clients), counts)


def partition_dataset(config: PartitionConfig, clients: int, seed: int, data: DataSet) -> Partition:
    """Deal a set's images to the clients: see :func:`make_partition`."""
    return make_partition(
        config,
        clients,
        seed,
        data.train.labels.cpu().numpy(),
        data.test.labels.cpu().numpy(),
        len(data.classes),
        None if data.train.sources is None else data.train.sources.numpy(),
        None if data.test.sources is None else data.test.sources.numpy(),
    )


def assign_by_shares(labels: Ints, shares: Floats, random: Random) -> Ints:
    """Deal samples by a share matrix.

    A class's samples are shuffled and cut at ``floor(n * cumulative share + offset)`` with a random offset
    in [0, 1): every sample is dealt once, a client gets its exact share rounded up or down, nothing where
    its share is 0, and the exact share on average. The offsets of the classes are spread evenly over [0, 1),
    so that with few samples a class it is not the same clients that round up every time.

    Parameters
    ----------
    labels
        The class of each sample.
    shares
        ``[classes, clients]``; rows sum to 1.
    random
        Where the shuffle and the offsets come from.

    Returns
    -------
    NDArray[int64]
        The client of each sample.
    """
    classes, clients = shares.shape
    counts = np.bincount(labels, minlength=classes)[:, None]
    offset = (random.permutation(classes)[:, None] + random.random()) / classes
    edges = np.cumsum(shares, axis=1)
    edges /= edges[:, -1:]  # x / x is exactly 1: clients with no share at the end of a row get nothing
    edges = np.minimum(np.floor(edges * counts + offset), counts)
    pieces = np.diff(edges, prepend=0.0, axis=1).astype(np.int64)
    owners = np.empty(len(labels), np.int64)
    owners[_shuffled_by_label(labels, random)] = np.repeat(np.tile(np.arange(clients), classes), pieces.ravel())
    return owners


def training_shares(counts: Ints) -> Floats:
    """Turn a partition's counts ``[clients, classes]`` into shares ``[classes, clients]``.

    A class that nobody holds is shared evenly: its test images have to go somewhere.
    """
    clients = counts.shape[0]
    totals = counts.sum(axis=0)
    shares: Floats = np.where(totals > 0, counts / np.maximum(totals, 1), 1 / clients)
    return shares.T


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


def _random(seed: int, split: int) -> Random:
    return Address(seed, Purpose.PARTITION, epoch=split).generator()


def _iid(config: IidPartition, clients: int, samples: int, random: Random) -> Ints:
    sizes = _largest_remainder(random.lognormal(0.0, config.imbalance, clients), samples)
    give, need = _level(sizes, 1)
    owners = np.repeat(np.arange(clients), sizes - give + need)
    return random.permutation(owners)


def _dirichlet(config: DirichletPartition, clients: int, labels: Ints, classes: int, random: Random) -> Ints:
    most = len(labels) // clients
    if config.min_samples > most:
        remedy = f"must be between 0 and {most}: {len(labels)} training images for {clients} clients"
        raise ConfigError("data.partition.min_samples", config.min_samples, remedy)
    owners = assign_by_shares(labels, dirichlet_shares(config.beta, classes, clients, random), random)
    return _at_least(owners, clients, config.min_samples, random)


def _classes(config: ClassesPartition, clients: int, labels: Ints, classes: int, random: Random) -> Ints:
    # Only classes that have images are handed out: holding an empty one would not be holding a class.
    present = np.unique(labels)
    wanted = config.per_client
    least = -(-len(present) // clients)
    if not least <= wanted <= len(present):
        why = f"{clients} clients have to hold all {len(present)} classes of the training images"
        remedy = f"must be between {least} and {len(present)}: {why}"
        raise ConfigError("data.partition.per_client", wanted, remedy)
    held = np.zeros((len(present), clients))
    holders = np.zeros(len(present))
    for client in range(clients):
        # The least held classes, ties at random: the numbers of holders never differ by more than one.
        chosen = np.argsort(holders + random.random(len(present)), kind="stable")[:wanted]
        held[chosen, client] = 1
        holders[chosen] += 1
    shares = np.full((classes, clients), 1 / clients)
    shares[present] = held / holders[:, None]
    return assign_by_shares(labels, shares, random)


def _shards(config: ShardsPartition, clients: int, labels: Ints, random: Random) -> Ints:
    samples, shards = len(labels), clients * config.per_client
    if shards > samples:
        why = f"{samples} training images for {clients} clients"
        raise ConfigError(
            "data.partition.per_client",
            config.per_client,
            f"must be between 1 and {samples // clients}: {why}",
        )
    # np.array_split's sizes: nothing is dropped, the first few shards are one larger.
    sizes = np.full(shards, samples // shards) + (np.arange(shards) < samples % shards)
    owners = np.empty(samples, np.int64)
    owners[_shuffled_by_label(labels, random)] = np.repeat(random.permutation(shards) // config.per_client, sizes)
    return owners


def _by_source(clients: int, sources: Ints | None) -> Ints:
    if sources is None:
        remedy = (
            "the data does not say where its images came from; a folder laid out as "
            "train/<source>/<class>/* and a parquet file with a column source, client, writer or user do"
        )
        raise ConfigError("data.partition.kind", "source", remedy)
    known, owners = np.unique(sources, return_inverse=True)
    if len(known) != clients:
        raise ConfigError("fleet.clients", clients, f"must be {len(known)}: the data has {len(known)} sources")
    return owners.reshape(-1).astype(np.int64)


def _keep_sources(owners: Ints, known: Ints, sources: Ints) -> Ints:
    """Give test images from a training source to its client; the others stay as dealt by shares."""
    place = np.minimum(np.searchsorted(known, sources), len(known) - 1)
    return np.where(known[place] == sources, place, owners).astype(np.int64)


def _shuffled_by_label(labels: Ints, random: Random) -> Ints:
    """Return the samples' order: class after class, at random within a class."""
    order = random.permutation(len(labels))
    return order[np.argsort(labels[order], kind="stable")]


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
