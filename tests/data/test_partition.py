"""Partitions: every image exactly once, the configured distributions, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vitfleet.config.base import PartitionParams
from vitfleet.data.partition import (
    ClientIndices,
    Partition,
    assign_by_shares,
    make_partition,
    training_shares,
)
from vitfleet.data.partitioners import (
    ClassesPartition,
    DirichletPartition,
    IidPartition,
    ShardsPartition,
    SourcePartition,
    dirichlet_shares,
)
from vitfleet.errors import ConfigError

Ints = NDArray[np.int64]

LABEL_KINDS: list[PartitionParams] = [
    IidPartition(),
    IidPartition(imbalance=1.5),
    DirichletPartition(beta=0.3),
    DirichletPartition(beta=1e-3, min_samples=1),
    ClassesPartition(per_client=2),
    ShardsPartition(per_client=2),
]


def balanced(samples: int, num_classes: int) -> Ints:
    return np.arange(samples, dtype=np.int64) % num_classes


def random_labels(seed: int, samples: int, num_classes: int) -> Ints:
    # Classes of very different sizes, some perhaps absent.
    random = np.random.default_rng(seed)
    return random.choice(num_classes, samples, p=random.dirichlet(np.ones(num_classes))).astype(np.int64)


def is_exact_cover(indices: ClientIndices, clients: int, samples: int) -> bool:
    held = np.concatenate([indices.for_client(client) for client in range(clients)])
    return indices.num_clients == clients and sorted(held.tolist()) == list(range(samples))


@settings(max_examples=150, deadline=None)
@given(
    config=st.sampled_from(LABEL_KINDS),
    data_seed=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**63 - 1),
    clients=st.integers(1, 40),
    num_classes=st.integers(2, 15),
    train=st.integers(40, 300),
    test=st.integers(1, 100),
)
def test_make_partition_assigns_every_image_exactly_once(
    config: PartitionParams, data_seed: int, seed: int, clients: int, num_classes: int, train: int, test: int
) -> None:
    train_labels, test_labels = random_labels(data_seed, train, num_classes), random_labels(seed, test, num_classes)
    if isinstance(config, ClassesPartition):
        present = len(np.unique(train_labels))
        assume(present >= 2 and 2 * clients >= present)
    if isinstance(config, ShardsPartition):
        assume(2 * clients <= train)
    partition = make_partition(config, clients, seed, train_labels, test_labels, num_classes)
    assert is_exact_cover(partition.train, clients, train)
    assert is_exact_cover(partition.test, clients, test)
    assert partition.train.indices.dtype == partition.test.offsets.dtype == np.int64
    expected = np.stack(
        [np.bincount(train_labels[partition.train.for_client(k)], minlength=num_classes) for k in range(clients)]
    )
    np.testing.assert_array_equal(partition.class_counts, expected)


@pytest.mark.parametrize("config", LABEL_KINDS, ids=str)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_partition_depends_on_the_seed_only(config: PartitionParams, seed: int) -> None:
    def fingerprint(seed: int) -> str:
        return make_partition(config, 12, seed, balanced(300, 8), balanced(60, 8), 8).fingerprint()

    first = fingerprint(seed)
    np.random.seed(seed % 2**32)
    assert fingerprint(seed) == first
    assert fingerprint(seed + 1) != first


@pytest.mark.parametrize("config", LABEL_KINDS, ids=str)
def test_partition_of_ten_thousand_clients(config: PartitionParams) -> None:
    partition = make_partition(config, 10_000, 3, balanced(60_000, 10), balanced(10_000, 10), 10)
    assert partition.class_counts.shape == (10_000, 10)
    assert partition.train.is_exact_cover()
    assert partition.test.is_exact_cover()


# --- the test split follows the training split ---


@pytest.mark.parametrize("config", LABEL_KINDS, ids=str)
def test_test_images_follow_the_training_shares(config: PartitionParams) -> None:
    test_labels = balanced(5000, 10)
    partition = make_partition(config, 20, 5, balanced(2000, 10), test_labels, 10)
    held = partition.test.class_counts(test_labels, 10)
    assert not np.any(held[partition.class_counts == 0])
    # 200 training and 500 test images per class: the share to within the rounding of one image.
    assert np.abs(held - partition.class_counts * 2.5).max() < 1


def test_test_images_of_a_class_without_training_images_are_shared_evenly() -> None:
    test_labels = np.repeat(np.array([0, 1, 2]), [10, 10, 40])
    partition = make_partition(DirichletPartition(beta=0.1), 8, 0, balanced(100, 2), test_labels, 3)
    assert partition.test.class_counts(test_labels, 3)[:, 2].tolist() == [5] * 8


def test_few_test_images_are_spread_over_the_clients() -> None:
    # One test image per client in expectation: equal cuts in every class would give ten to a tenth of them.
    partition = make_partition(ClassesPartition(per_client=10), 100, 0, balanced(10_000, 10), balanced(100, 10), 10)
    assert partition.test.sizes().max() <= 2
    assert np.count_nonzero(partition.test.sizes() == 0) < 10


def test_partition_with_an_empty_test_set() -> None:
    none = np.zeros(0, np.int64)
    assert make_partition(IidPartition(), 3, 0, balanced(30, 3), none, 3).test.sizes().tolist() == [0, 0, 0]


# --- assignment by shares ---


def test_assign_by_shares_gives_exact_shares() -> None:
    labels = np.repeat(np.array([0, 1]), [10, 20])
    shares = np.array([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]])
    owners = assign_by_shares(labels, shares, np.random.default_rng(0))
    counts = ClientIndices.from_owners(owners, 3).class_counts(labels, 2)
    assert counts.T.tolist() == [[5, 5, 0], [0, 5, 15]]


def test_assign_by_shares_rounds_without_bias() -> None:
    # A share of 0.3 of one sample is 0.3 samples on average, not none.
    labels, shares = np.zeros(1, np.int64), np.array([[0.3, 0.7]])
    owners = [int(assign_by_shares(labels, shares, np.random.default_rng(seed))[0]) for seed in range(4000)]
    assert np.mean(owners) == pytest.approx(0.7, abs=0.03)  # 4 standard errors


def test_training_shares_of_class_counts() -> None:
    shares = training_shares(np.array([[1, 0], [3, 0]]))
    assert shares.tolist() == [[0.25, 0.75], [0.5, 0.5]]


# --- iid ---


def test_iid_sizes_differ_by_at_most_one() -> None:
    sizes = make_partition(IidPartition(), 7, 0, balanced(100, 10), balanced(10, 10), 10).train.sizes()
    assert sizes.tolist() == [15, 15, 14, 14, 14, 14, 14]


def test_iid_imbalance_is_the_sigma_of_log_sizes() -> None:
    sigma = 0.8
    sizes = make_partition(
        IidPartition(imbalance=sigma), 1000, 1, balanced(1_000_000, 10), balanced(10, 10), 10
    ).train.sizes()
    # The standard error of an estimated sigma is sigma / sqrt(2 * 1000).
    assert np.log(sizes).std() == pytest.approx(sigma, abs=5 * sigma / np.sqrt(2000))


def test_iid_with_the_strongest_imbalance_leaves_no_client_empty() -> None:
    sizes = make_partition(IidPartition(imbalance=5), 90, 0, balanced(100, 10), balanced(10, 10), 10).train.sizes()
    assert sizes.min() == 1
    assert sizes.sum() == 100


def test_iid_clients_hold_all_classes() -> None:
    counts = make_partition(IidPartition(), 10, 0, balanced(10_000, 10), balanced(10, 10), 10).class_counts
    # Hypergeometric, mean 100, standard deviation 9.
    assert np.abs(counts - 100).max() < 45


# --- dirichlet ---

MOMENTS = [(0.1, 10), (0.5, 10), (3.0, 5)]


def assert_dirichlet_moments(shares: NDArray[np.float64], beta: float) -> None:
    """Check shares [classes, clients] for mean 1/K and the Dirichlet variance, over every row."""
    rows, clients = shares.shape
    mean = 1 / clients
    variance = mean * (1 - mean) / (clients * beta + 1)
    assert np.abs(shares.mean(axis=0) - mean).max() < 5 * np.sqrt(variance / rows)
    spread = (shares - mean) ** 2
    # Five standard errors of the estimate itself; the entries of a row are dependent, so rows are counted.
    error = spread.mean(axis=1).std() / np.sqrt(rows)
    assert spread.mean() == pytest.approx(variance, abs=5 * error)


@pytest.mark.parametrize(("beta", "clients"), MOMENTS)
def test_dirichlet_partition_has_the_distributions_moments(beta: float, clients: int) -> None:
    classes, each = 1000, 200
    labels = balanced(classes * each, classes)
    counts = make_partition(DirichletPartition(beta=beta), clients, 11, labels, labels[:10], classes).class_counts
    assert_dirichlet_moments(counts.T / each, beta)


@pytest.mark.parametrize(("beta", "clients"), MOMENTS)
def test_dirichlet_partition_has_the_moments_of_flwr_datasets(beta: float, clients: int) -> None:
    datasets = pytest.importorskip("datasets")
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    classes, each = 500, 100
    labels = balanced(classes * each, classes)
    reference: Any = partitioner.DirichletPartitioner(
        num_partitions=clients,
        partition_by="label",
        alpha=beta,
        min_partition_size=0,
        self_balancing=False,
        seed=11,
    )
    reference.dataset = datasets.Dataset.from_dict({"label": labels})
    reference_counts = np.stack(
        [np.bincount(reference.load_partition(k)["label"], minlength=classes) for k in range(clients)], axis=1
    )
    own_counts = make_partition(DirichletPartition(beta=beta), clients, 11, labels, labels[:10], classes).class_counts.T
    # flwr-datasets cuts at the floor without an offset: the last client gets about half an image more per class.
    edge = 1 / each
    assert np.abs(reference_counts.mean(axis=0) / each - 1 / clients).max() < edge + 5 * reference_counts[
        :, 0
    ].std() / each / np.sqrt(classes)
    spread = [((counts / each - 1 / clients) ** 2).mean(axis=1) for counts in (reference_counts, own_counts)]
    error = np.sqrt(sum(rows.var() / classes for rows in spread))
    assert spread[0].mean() == pytest.approx(spread[1].mean(), abs=5 * error + edge**2)


@pytest.mark.parametrize("beta", [5e-324, 1e-300, 1e-12, 1e-4, 1e-2, 0.999, 1.0, 1e4, 1e300])
def test_dirichlet_shares_sum_to_one_for_any_beta(beta: float) -> None:
    shares = dirichlet_shares(beta, 50, 100, np.random.default_rng(0))
    assert np.all(shares >= 0)
    np.testing.assert_allclose(shares.sum(axis=1), 1)


def test_dirichlet_with_a_tiny_beta_gives_each_class_to_one_client() -> None:
    counts = make_partition(DirichletPartition(beta=1e-4), 50, 0, balanced(5000, 20), balanced(20, 20), 20).class_counts
    # One owner in nearly every class: the chance of a second one is about clients * beta = 0.005.
    assert np.count_nonzero(counts.max(axis=0) == 250) >= 18
    # And not always the same one.
    assert len(set(counts.argmax(axis=0).tolist())) > 10


def test_dirichlet_with_a_huge_beta_is_even() -> None:
    counts = make_partition(
        DirichletPartition(beta=1e4), 10, 0, balanced(10_000, 10), balanced(10, 10), 10
    ).class_counts
    # Standard deviation of a share 0.1: 0.00095, of 1000 images about 1.
    assert np.abs(counts - 100).max() <= 6


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    clients=st.integers(1, 60),
    beta=st.sampled_from([1e-4, 0.1, 1.0]),
    data=st.data(),
)
def test_min_samples_moves_samples_from_the_largest_clients_only(
    seed: int, clients: int, beta: float, data: st.DataObject
) -> None:
    labels = balanced(300, 6)
    least = data.draw(st.integers(0, 300 // clients))

    def sizes(min_samples: int) -> Ints:
        config = DirichletPartition(beta=beta, min_samples=min_samples)
        return make_partition(config, clients, seed, labels, labels[:6], 6).train.sizes()

    before, after = sizes(0), sizes(least)
    assert after.min() >= least
    np.testing.assert_array_equal(after[before <= least], least)
    # Reference: one sample at a time from the largest client.
    expected = before.copy()
    for small in np.flatnonzero(before < least):
        while expected[small] < least:
            expected[expected.argmax()] -= 1
            expected[small] += 1
    assert sorted(expected.tolist()) == sorted(after.tolist())


def test_min_samples_keeps_the_skew() -> None:
    labels = balanced(1000, 10)
    config = DirichletPartition(beta=0.01, min_samples=10)
    counts = make_partition(config, 50, 0, labels, labels[:10], 10).class_counts
    assert np.median(np.count_nonzero(counts, axis=1)) <= 2


# --- classes ---


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), clients=st.integers(1, 50), num_classes=st.integers(1, 20), data=st.data())
def test_classes_partition_gives_every_client_per_client_classes(
    seed: int, clients: int, num_classes: int, data: st.DataObject
) -> None:
    per_client = data.draw(st.integers(-(-num_classes // clients), num_classes))
    labels = balanced(num_classes * 60, num_classes)
    config = ClassesPartition(per_client=per_client)
    counts = make_partition(config, clients, seed, labels, labels[:1], num_classes).class_counts
    assert np.count_nonzero(counts, axis=1).tolist() == [per_client] * clients
    holders = np.count_nonzero(counts, axis=0)
    assert holders.max() - holders.min() <= 1
    for column in counts.T:
        pieces = column[column > 0]
        assert pieces.max() - pieces.min() <= 1


def test_classes_partition_of_a_class_with_fewer_images_than_holders() -> None:
    labels = np.repeat(np.array([0, 1]), [97, 3])
    counts = make_partition(ClassesPartition(per_client=2), 10, 0, labels, labels, 2).class_counts
    assert sorted(counts[:, 1].tolist()) == [0] * 7 + [1] * 3


def test_classes_partition_skips_classes_without_training_images() -> None:
    labels = np.repeat(np.array([1, 4, 7]), 40)
    counts = make_partition(ClassesPartition(per_client=2), 6, 0, labels, labels, 9).class_counts
    assert np.count_nonzero(counts, axis=1).tolist() == [2] * 6


# --- shards ---


def test_shards_are_runs_of_the_sorted_labels() -> None:
    # 20 shards of 50 over classes of 100: every shard is pure, a client has 50 or 100 of a class.
    labels = np.random.default_rng(0).permutation(balanced(1000, 10))
    counts = make_partition(ShardsPartition(per_client=2), 10, 0, labels, labels[:10], 10).class_counts
    assert set(np.unique(counts).tolist()) <= {0, 50, 100}
    assert counts.sum(axis=1).tolist() == [100] * 10


def test_shards_are_assigned_at_random() -> None:
    labels = balanced(2000, 10)
    counts = make_partition(ShardsPartition(per_client=2), 100, 0, labels, labels[:10], 10).class_counts
    # 20 shards per class: two random ones are of one class with probability 19/199, neighbours nearly always.
    assert np.count_nonzero(np.count_nonzero(counts, axis=1) == 2) > 75


def test_uneven_shards_drop_nothing() -> None:
    sizes = make_partition(ShardsPartition(per_client=3), 7, 0, balanced(100, 10), balanced(10, 10), 10).train.sizes()
    # 21 shards of 5 or 4.
    assert sizes.sum() == 100
    assert sizes.min() >= 12
    assert sizes.max() <= 15


# --- source ---


def by_source(clients: int = 3, test_sources: Ints | None = None) -> Partition:
    sources = np.array([30, 10, 10, 20, 30, 10])
    labels = np.array([0, 0, 1, 1, 0, 1])
    return make_partition(SourcePartition(), clients, 0, labels, labels, 2, sources, test_sources)


def test_source_partition_has_one_client_per_source_in_sorted_order() -> None:
    train = by_source().train
    assert [train.for_client(client).tolist() for client in range(3)] == [[1, 2, 5], [3], [0, 4]]


def test_source_partition_assigns_test_images_to_their_source() -> None:
    test = by_source(test_sources=np.array([20, 20, 20, 10, 30, 30])).test
    assert [test.for_client(client).tolist() for client in range(3)] == [[3], [0, 1, 2], [4, 5]]


def test_source_partition_assigns_test_images_of_other_sources_by_shares() -> None:
    partition = by_source(test_sources=np.array([99, 5, 25, 99, 99, 30]))
    assert partition.test.is_exact_cover()
    assert 5 in partition.test.for_client(2)
    # Classes: client 0 holds one of three 0s, client 2 two of three and no 1; client 1 no 0.
    assert not set(partition.test.for_client(1).tolist()) & {0, 1, 4}
    assert not set(partition.test.for_client(2).tolist()) & {2, 3}


def test_source_partition_without_test_sources_assigns_by_shares() -> None:
    held = by_source().test.class_counts(np.array([0, 0, 1, 1, 0, 1]), 2)
    assert held.tolist() == [[1, 2], [0, 1], [2, 0]]


# --- infeasible parameters ---


@pytest.mark.parametrize(
    ("config", "clients", "key", "says"),
    [
        (IidPartition(), 101, "fleet.clients", "between 1 and 100, the number of training images"),
        (DirichletPartition(min_samples=11), 10, "data.partition.min_samples", "between 0 and 10"),
        (ClassesPartition(per_client=2), 4, "data.partition.per_client", "between 3 and 10"),
        (ClassesPartition(per_client=11), 4, "data.partition.per_client", "between 3 and 10"),
        (ShardsPartition(per_client=6), 20, "data.partition.per_client", "between 1 and 5"),
        (SourcePartition(), 4, "data.partition.kind", "the layout <source>/<class>"),
    ],
    ids=str,
)
def test_infeasible_parameters_are_rejected_with_key_and_range(
    config: PartitionParams, clients: int, key: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        make_partition(config, clients, 0, balanced(100, 10), balanced(10, 10), 10)
    assert caught.value.key == key


@pytest.mark.parametrize("config", [DirichletPartition(min_samples=10), ClassesPartition(per_client=1)], ids=str)
def test_parameters_at_the_edge_of_the_range_are_accepted(config: PartitionParams) -> None:
    partition = make_partition(config, 10, 0, balanced(100, 10), balanced(10, 10), 10)
    assert partition.train.sizes().tolist() == [10] * 10


def test_source_partition_needs_one_client_per_source() -> None:
    with pytest.raises(ConfigError, match="must be 3: the data has 3 sources") as caught:
        by_source(clients=2)
    assert caught.value.key == "fleet.clients"


def test_for_client_rejects_a_negative_client() -> None:
    with pytest.raises(IndexError):
        by_source().train.for_client(-1)
