"""Sums and solvers against scikit-learn, and against references of a few lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.covariance import OAS
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from vitfleet.config.head import HeadSolver
from vitfleet.methods.closed_form.solvers import (
    ABSENT,
    GAMMAS,
    MAX_FREEDOM,
    ClientMeans,
    Head,
    oas,
    solve,
    temperature,
)
from vitfleet.methods.closed_form.sums import (
    CLASS_SUMS,
    CLASSES,
    COUNTS,
    SCATTER,
    Sums,
    received_features,
    received_sums,
)
from vitfleet.methods.reported import RejectedUpdateError

NUM_CLASSES, WIDTH, IMAGES = 4, 6, 120
CPU = torch.device("cpu")
#: How far sums that were sent in a type may be off, relative to the largest number.
PRECISION = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-2}


def make_features(seed: int = 0, images: int = IMAGES, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Return correlated features with large means and unequal sizes, and their labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, NUM_CLASSES, (images,), generator=random)
    centres = 2 * torch.randn(NUM_CLASSES, width, generator=random)
    mixing = torch.randn(width, width, generator=random) / width**0.5
    features = (centres[labels] + torch.randn(images, width, generator=random)) @ mixing
    return (features * torch.logspace(-1, 1, width) + 5.0).float(), labels


def sent_sums(features: Tensor, labels: Tensor, dtype: str = "fp64", second_order: bool = True) -> Sums:
    """Return sums as the server has them of what a client sends."""
    sums = Sums.of(features, labels, NUM_CLASSES, second_order)
    message = sums.message(torch.unique(labels), dtype)
    return received_sums(message, NUM_CLASSES, features.shape[1], second_order, dtype, CPU)


def head_of(features: Tensor, labels: Tensor, **keys: object) -> Head:
    return solve(Sums.of(features, labels, NUM_CLASSES), HeadSolver.model_validate(keys)).head


def assert_equal_heads(left: Head, right: Head, features: Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(left.logits(features), right.logits(features), rtol=0, atol=atol)


def standardised(features: Tensor) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = StandardScaler().fit_transform(features.double().numpy())
    return scaled


# Sums


@pytest.mark.parametrize("solver", ["ridge", "lda", "means"])
@given(owners=st.lists(st.integers(0, 5), min_size=IMAGES, max_size=IMAGES), order=st.permutations(range(6)))
def test_any_partition_and_order_gives_the_head_of_all_images(
    solver: str, owners: Sequence[int], order: Sequence[int]
) -> None:
    features, labels = make_features()
    second_order, owner = solver != "means", torch.tensor(owners)
    total = Sums.zeros(NUM_CLASSES, WIDTH, second_order)
    for client in order:
        own = owner == client
        if bool(own.any()):
            total = total + sent_sums(features[own], labels[own], second_order=second_order)
    keys = HeadSolver.model_validate({"solver": solver})
    central = solve(Sums.of(features, labels, NUM_CLASSES, second_order), keys)
    joined = solve(total, keys)
    assert joined.regularization == pytest.approx(central.regularization)
    assert_equal_heads(joined.head, central.head, features)
    assert_equal_heads(joined.head.folded(), central.head, features)


@pytest.mark.parametrize("dtype", PRECISION)
def test_equal_images_have_no_scatter_but_rounding(dtype: str) -> None:
    features, labels = make_features(width=200)
    images = torch.stack([(labels == label).nonzero()[0, 0] for label in range(NUM_CLASSES)]).repeat(3)
    received, own = sent_sums(features[images], labels[images], dtype), features[images].double()
    assert received.gram is not None
    torch.testing.assert_close(received.gram, own.T @ own, rtol=1e-5, atol=1e-6 * float((own.T @ own).max()))


def test_subtracted_sums_are_as_if_they_had_never_been_added() -> None:
    features, labels = make_features()
    parts = torch.arange(IMAGES).chunk(3)
    sums = [sent_sums(features[part], labels[part]) for part in parts]
    without = solve(sums[0] + sums[1] + sums[2] - sums[1], HeadSolver()).head
    assert_equal_heads(without, solve(sums[0] + sums[2], HeadSolver()).head, features)


@pytest.mark.parametrize("dtype", PRECISION)
def test_what_is_sent_in_fewer_bits_is_nearly_the_same(dtype: str) -> None:
    features, labels = make_features()
    exact, received = Sums.of(features, labels, NUM_CLASSES), sent_sums(features, labels, dtype)
    assert torch.equal(received.counts, exact.counts)
    scatter, expected = received.scatter(), exact.scatter()
    assert float((scatter - expected).abs().max()) <= PRECISION[dtype] * float(expected.abs().max())
    torch.testing.assert_close(received.class_sums, exact.class_sums, rtol=1e-6, atol=1e-6)


def test_sums_of_features_in_fp16_are_nearly_those_of_the_features() -> None:
    features, labels = make_features()
    message = {"features": features.half(), "labels": labels.to(torch.int16)}
    received = Sums.of(*received_features(message, NUM_CLASSES, WIDTH, CPU), NUM_CLASSES)
    exact = Sums.of(features, labels, NUM_CLASSES)
    assert received.gram is not None
    assert exact.gram is not None
    torch.testing.assert_close(received.gram, exact.gram, rtol=1e-3, atol=1e-2)


def test_a_state_keeps_sums_bit_for_bit() -> None:
    sums = Sums.of(*make_features(), NUM_CLASSES)
    stored = Sums.of_tensors(sums.tensors())
    assert stored.gram is not None
    assert sums.gram is not None
    assert torch.equal(stored.gram, sums.gram)
    assert sums.tensors()["gram"].shape == (WIDTH * (WIDTH + 1) // 2,)


def _with(name: str, value: Tensor) -> dict[str, Tensor]:
    message = Sums.of(*make_features(), NUM_CLASSES).message(torch.arange(NUM_CLASSES), "fp32")
    return {**message, name: value}


def _scatter(entry: int, value: float) -> Tensor:
    scatter = torch.zeros(WIDTH * (WIDTH + 1) // 2)
    scatter[0] = 1.0
    scatter[entry] = value
    return scatter


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({}, "its message has"),
        (_with("more", torch.zeros(1)), "its message has"),
        (_with(CLASSES, torch.tensor([0, 1, 2, 4], dtype=torch.int16)), "its classes are not"),
        (_with(CLASSES, torch.tensor([0, 1, 1, 3], dtype=torch.int16)), "its classes are not"),
        (_with(CLASSES, torch.tensor([-1, 1, 2, 3], dtype=torch.int16)), "its classes are not"),
        (_with(CLASSES, torch.arange(4)), "the type torch.int64"),
        (_with(COUNTS, torch.tensor([5, 0, 1, 1], dtype=torch.int32)), "it counts no image"),
        (_with(COUNTS, torch.tensor([5, 1], dtype=torch.int32)), "and the shape"),
        (_with(CLASS_SUMS, torch.full((4, WIDTH), torch.inf)), "are not finite"),
        (_with(CLASS_SUMS, torch.zeros(4, WIDTH, dtype=torch.float64)), "the type torch.float64"),
        (_with(SCATTER, torch.full((WIDTH * (WIDTH + 1) // 2,), torch.nan)), "are not finite"),
        (_with(SCATTER, torch.zeros(3)), "and the shape"),
        (_with(SCATTER, _scatter(WIDTH, -0.5)), "negative variances"),
        (_with(SCATTER, _scatter(1, 0.5)), "its variances allow"),
    ],
)
def test_what_cannot_be_sums_is_rejected(message: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(RejectedUpdateError, match=reason):
        received_sums(message, NUM_CLASSES, WIDTH, True, "fp32", CPU)


@pytest.mark.parametrize(
    ("features", "labels", "reason"),
    [
        (torch.zeros(2, WIDTH), torch.zeros(2, dtype=torch.int16), "the type torch.float32"),
        (torch.zeros(2, WIDTH).half(), torch.zeros(3, dtype=torch.int16), "and the shape"),
        (torch.zeros(2, WIDTH).half(), torch.full((2,), NUM_CLASSES, dtype=torch.int16), "its labels are not"),
        (torch.full((2, WIDTH), torch.inf).half(), torch.zeros(2, dtype=torch.int16), "are not finite"),
    ],
)
def test_what_cannot_be_features_is_rejected(features: Tensor, labels: Tensor, reason: str) -> None:
    with pytest.raises(RejectedUpdateError, match=reason):
        received_features({"features": features, "labels": labels}, NUM_CLASSES, WIDTH, CPU)


# Solvers


@pytest.mark.parametrize("gamma", [1e-4, 0.1, 3.0])
def test_ridge_is_that_of_scikit_learn(gamma: float) -> None:
    features, labels = make_features()
    scaled, targets = standardised(features), np.eye(NUM_CLASSES)[labels.numpy()]
    reference = Ridge(alpha=gamma * IMAGES).fit(scaled, targets)
    head = head_of(features, labels, solver="ridge", regularization=gamma)
    np.testing.assert_allclose(head.weight.numpy(), reference.coef_, atol=1e-9)
    np.testing.assert_allclose(head.logits(features).numpy(), reference.predict(scaled), atol=1e-9)


@pytest.mark.parametrize("shrinkage", [0.0, 0.1, 0.9])
def test_lda_is_that_of_scikit_learn(shrinkage: float) -> None:
    features, labels = make_features()
    scaled = standardised(features)
    reference = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage or None).fit(scaled, labels.numpy())
    head = head_of(features, labels, solver="lda", regularization=shrinkage)
    np.testing.assert_allclose(head.logits(features).softmax(dim=1).numpy(), reference.predict_proba(scaled), atol=1e-9)


def test_oas_is_that_of_scikit_learn() -> None:
    features, _ = make_features()
    centred = (features - features.mean(dim=0)).double()
    reference = OAS(assume_centered=True).fit(centred.numpy())
    assert oas(centred.T @ centred / IMAGES, IMAGES) == pytest.approx(reference.shrinkage_)


@pytest.mark.parametrize("width", [WIDTH, 150])
def test_generalised_cross_validation_by_hand(width: int) -> None:
    """The hat matrix says how many degrees of freedom a fit has; more features than images are no exception."""
    features, labels = make_features(width=width)
    scaled, targets = standardised(features), np.eye(NUM_CLASSES)[labels.numpy()]
    centred = targets - targets.mean(axis=0)
    errors = {}
    for gamma in GAMMAS:
        hat = scaled @ np.linalg.solve(scaled.T @ scaled + gamma * IMAGES * np.eye(width), scaled.T)
        freedom = 1 + np.trace(hat)
        if freedom < MAX_FREEDOM * IMAGES:
            errors[gamma] = np.square(centred - hat @ centred).sum() / (1 - freedom / IMAGES) ** 2
    solution = solve(Sums.of(features, labels, NUM_CLASSES), HeadSolver(solver="ridge"))
    assert solution.regularization == min(errors, key=lambda gamma: errors[gamma])
    fixed = head_of(features, labels, solver="ridge", regularization=solution.regularization)
    assert_equal_heads(solution.head, fixed, features)


def test_means_are_compared_by_cosine() -> None:
    features, labels = make_features()
    head = solve(Sums.of(features, labels, NUM_CLASSES, second_order=False), HeadSolver(solver="means")).head
    means = torch.stack([features[labels == label].double().mean(dim=0) for label in range(NUM_CLASSES)])
    cosine = torch.cosine_similarity(features.double()[:, None], means, dim=2)
    lengths = features.double().norm(dim=1, keepdim=True)
    torch.testing.assert_close(head.logits(features), cosine * lengths)


def client_means(features: Tensor, labels: Tensor, owner: Tensor) -> ClientMeans:
    of_clients = [
        ClientMeans.of(int(client), Sums.of(features[owner == client], labels[owner == client], NUM_CLASSES, False))
        for client in torch.unique(owner)
    ]
    return ClientMeans.join(of_clients)


def test_fedcof_by_hand() -> None:
    """Its equations, class after class, as in the paper: γ is added to the covariance of each class."""
    features, labels = make_features()
    random = torch.Generator().manual_seed(3)
    owner = torch.randint(0, 7, (IMAGES,), generator=random)
    owner[labels == 2] = 0  # a class that one client has alone: nothing is known of its covariance
    x, gamma = features.double().numpy(), 0.3
    scatter, within = np.zeros((WIDTH, WIDTH)), 0.0
    for label in range(NUM_CLASSES):
        of_class = labels.numpy() == label
        mean, covariance, clients = x[of_class].mean(axis=0), np.zeros((WIDTH, WIDTH)), 0
        for client in range(7):
            own = x[of_class & (owner.numpy() == client)]
            if len(own):
                clients += 1
                covariance += len(own) * np.outer(own.mean(axis=0) - mean, own.mean(axis=0) - mean)
        scatter += (of_class.sum() - 1) * covariance / max(1, clients - 1)
        within += of_class.sum() - 1
    gram = scatter + gamma * np.trace(scatter) / WIDTH * np.eye(WIDTH) + IMAGES * np.outer(x.mean(0), x.mean(0))
    rows = np.stack([np.linalg.solve(gram, x[labels.numpy() == label].sum(axis=0)) for label in range(NUM_CLASSES)])
    sums = client_means(features, labels, owner).to_sums(NUM_CLASSES)
    head = solve(sums, HeadSolver(solver="means-covariance", regularization=gamma)).head
    np.testing.assert_allclose(head.weight.numpy(), rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-9)
    assert not head.bias.any()


def test_class_means_of_many_clients_tell_the_covariance() -> None:
    features, labels = make_features(images=40_000)
    owner = torch.arange(len(labels)) % 4000
    estimated = client_means(features, labels, owner).to_sums(NUM_CLASSES).scatter()
    exact = Sums.of(features, labels, NUM_CLASSES).scatter()
    torch.testing.assert_close(estimated, exact, rtol=0, atol=0.05 * float(exact.max()))


@pytest.mark.parametrize("solver", ["ridge", "lda", "means", "means-covariance"])
def test_a_class_without_images_is_never_predicted(solver: str) -> None:
    features, labels = make_features()
    labels = labels.clamp(max=2)
    solution = solve(Sums.of(features, labels, NUM_CLASSES), HeadSolver.model_validate({"solver": solver}))
    logits = solution.head.logits(features)
    assert bool(logits.isfinite().all())
    assert bool((logits[:, 3] == ABSENT).all())
    assert bool((logits.argmax(dim=1) < 3).all())


@pytest.mark.parametrize("solver", ["ridge", "lda"])
def test_a_constant_feature_changes_nothing(solver: str) -> None:
    features, labels = make_features()
    more = torch.cat([features, torch.full((IMAGES, 1), 0.1)], dim=1)
    keys = {"solver": solver, "regularization": 1e-3 if solver == "ridge" else 0.0}
    torch.testing.assert_close(
        head_of(more, labels, **keys).logits(more), head_of(features, labels, **keys).logits(features)
    )


@pytest.mark.parametrize("solver", ["ridge", "lda", "means"])
def test_the_temperature_brings_the_loss_near_the_least(solver: str) -> None:
    """On new images, whatever the scale of the solver's logits: those of ridge are about a twentieth of log-odds."""
    features, labels = make_features(images=4000, width=20)
    known, new = slice(0, 400), slice(400, None)
    sums = Sums.of(features[known], labels[known], NUM_CLASSES, second_order=solver != "means")
    solution = solve(sums, HeadSolver.model_validate({"solver": solver}))
    logits = solution.head.logits(features[new])

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / temperature, labels[new]))

    least = min(loss(2 ** (step / 4)) for step in range(-40, 40))
    assert loss(temperature(solution, sums)) < least + 0.1
    divided = solution.head.divided_by(4.0)
    torch.testing.assert_close(divided.logits(features), solution.head.logits(features) / 4.0)


def test_sums_of_few_bits_do_not_choose_a_gamma_below_their_rounding() -> None:
    """Rounded to bf16, the matrix of strongly correlated features has negative eigenvalues, and no small γ."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, NUM_CLASSES, (400,), generator=random)
    factors = torch.randn(400, 8, generator=random)
    factors[:, :NUM_CLASSES] += 3 * torch.eye(NUM_CLASSES)[labels]
    features = factors @ torch.randn(8, 200, generator=random) + 0.1 * torch.randn(400, 200, generator=random)
    head = solve(sent_sums(features, labels, "bf16"), HeadSolver(solver="ridge")).head
    assert float((head.logits(features).argmax(dim=1) == labels).float().mean()) > 0.95


def test_classes_that_seem_to_have_no_variance_give_finite_logits() -> None:
    """Of one image of each class: within classes there is only rounding."""
    features = torch.randn(NUM_CLASSES, 50, generator=torch.Generator().manual_seed(0))
    sums = Sums.of(features, torch.arange(NUM_CLASSES), NUM_CLASSES)
    solution = solve(sums, HeadSolver(solver="lda"))
    head = solution.head.divided_by(temperature(solution, sums))
    logits = head.logits(features)
    assert bool((logits.argmax(dim=1) == torch.arange(NUM_CLASSES)).all())
    assert 10 < float(logits.max() - logits.min()) < 1000
