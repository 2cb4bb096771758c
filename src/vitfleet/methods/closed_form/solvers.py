"""Heads in closed form: from sums of features to the weight and the bias of a linear layer, in float64.

With the number n of images, the classes' numbers n_c and means μ_c, the mean μ and the standard deviations σ of all
images' features, the features are z = (φ − μ) / σ, a column without variance as it is.

- *ridge* (AFL, He et al., CVPR 2025): the regression of one-hot labels, W = (Z'Z + nγI)⁻¹ Z'(Y − Ȳ) with the bias Ȳ.
  γ is per image, so it means the same for any n: scikit-learn's ``Ridge`` has alpha = nγ.
- *lda* (FedCGS, Guan et al., AAAI 2025): Gaussians with a shared covariance, S = Σ(z − μ_c)(z − μ_c)' / n, shrunk to
  (1 − s)S + s·tr(S)/d·I; logits are log-posteriors. It is scikit-learn's ``LinearDiscriminantAnalysis(solver="lsqr",
  shrinkage=s)`` of standardised features.
- *means* (FedNCM, Legate et al., NeurIPS 2023): the cosine with the class means of the features as they are.
- *means-covariance* (FedCOF, Goswami et al., NeurIPS 2025): what the clients' class means say of the covariance, see
  :class:`ClientMeans`; then, with the features as they are, w_c = G⁻¹ n_cμ_c for G = Σ_c (n_c − 1)(Σ̂_c + γI) + nμμ',
  scaled to the length 1, without a bias. The paper's γ is 1 whatever the features' size; ours is relative to the mean
  variance, so that it means the same for any model.

A class without images gets no weight and a bias that no other class falls below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from vitfleet.config.head import HeadSolver
from vitfleet.methods.closed_form.sums import Sums

ABSENT = -1e4  # the bias of a class without images: a number that is finite in fp16 too
GAMMAS = tuple(10 ** (exponent / 4) for exponent in range(-20, 5))  # 1e-5 … 10
MEANS_MARGIN = 9.0  # by how much the own logit is larger than another one on average, with means alone
NO_VARIANCE = 1e-9  # of standardised features within classes; less is rounding: of one image of each class
MAX_MARGIN = 100.0  # by which it is larger at most: with hardly any images, classes seem to have no variance
MAX_FREEDOM = 0.8  # of the number of images: beyond, cross-validation from sums is not to be relied on


@dataclass(frozen=True)
class Head:
    """A linear head: logits = weight · ((φ − shift) · scale) + bias."""

    weight: Tensor
    bias: Tensor
    shift: Tensor
    scale: Tensor

    def folded(self) -> Head:
        """Return the same head on features as they are: shift 0, scale 1."""
        weight = self.weight * self.scale
        bias = self.bias - weight @ self.shift
        return Head(weight, bias, torch.zeros_like(self.shift), torch.ones_like(self.scale))

    def divided_by(self, temperature: float | Tensor) -> Head:
        """Return the head whose logits are divided by a temperature; a class without images stays where it is."""
        return replace(self, weight=self.weight / temperature, bias=(self.bias / temperature).clamp(min=ABSENT))

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of features, in float64."""
        return ((features.double() - self.shift) * self.scale) @ self.weight.T + self.bias


@dataclass(frozen=True)
class Standardised:
    """Means of standardised features: what ridge and lda have in common.

    Matrices are as large as all else together: each is made when it is needed, in place.
    """

    counts: Tensor
    means: Tensor
    shift: Tensor
    scale: Tensor

    @classmethod
    def of(cls, sums: Sums) -> Standardised:
        """Standardise sums."""
        assert sums.gram is not None
        shift = sums.class_sums.sum(dim=0) / sums.samples
        variances = (sums.gram.diagonal() / sums.samples - shift.square()).clamp(min=0)
        # What is left of a constant column after rounding is no variance.
        constant = variances <= 1e-12 * (variances + shift.square())
        scale = torch.where(constant, 1.0, variances.rsqrt())
        means = torch.where(sums.counts[:, None] > 0, (sums.class_means - shift) * scale, 0.0)
        return cls(sums.counts, means, shift, scale)

    @property
    def samples(self) -> float:
        """Number of images."""
        return float(self.counts.sum())

    def covariance(self, sums: Sums) -> Tensor:
        """Return the covariance of all images' standardised features."""
        assert sums.gram is not None
        return self._scaled((sums.gram / self.samples).addr_(self.shift, self.shift, alpha=-1))

    def within(self, sums: Sums) -> Tensor:
        """Return the covariance of standardised features about the means of their classes."""
        return self._scaled(sums.scatter().div_(self.samples))

    def _scaled(self, matrix: Tensor) -> Tensor:
        return matrix.mul_(self.scale).mul_(self.scale[:, None])


@dataclass(frozen=True)
class Solution:
    """A head, and what was chosen for it.

    Attributes
    ----------
    head
        The head, with logits not yet divided by a temperature.
    regularization
        γ or the shrinkage.
    inflation
        By how much the variance of its outputs is larger on new images than on those of the sums, as cross-validation
        says; 1 where that is not known.
    """

    head: Head
    regularization: float
    inflation: float = 1.0


def solve(sums: Sums, solver: HeadSolver, regularization: float | None = None) -> Solution:
    """Return the head of the sums of some images, one at least.

    Parameters
    ----------
    regularization
        In place of the solver's own; it has to be given where that is to be found on held-out images.
    """
    given = solver.regularization if regularization is None else regularization
    solution = SOLVERS[solver.solver](sums, given if isinstance(given, float) else None)
    head, present = solution.head, sums.counts > 0
    absent = replace(head, weight=head.weight * present[:, None], bias=torch.where(present, head.bias, ABSENT))
    return replace(solution, head=absent)


def ridge(sums: Sums, gamma: float | None) -> Solution:
    """Return the ridge regression of one-hot labels; without a γ, the one of generalised cross-validation.

    That estimates the squared error on new images as RSS/n / (1 − f/n)², with the degrees of freedom f of the fit.
    """
    z = Standardised.of(sums)
    shares = z.counts / z.samples
    targets = z.means * shares[:, None]  # (Z'(Y − Ȳ))' / n
    covariance = z.covariance(sums)
    if gamma is not None:
        covariance.diagonal().add_(gamma)
        inverse = _inverse(covariance)
        left = _left(1 + len(z.scale) - gamma * float(inverse.trace()), z)
        return Solution(Head(targets @ inverse, shares, z.shift, z.scale), gamma, left**-2)
    values, vectors = torch.linalg.eigh(covariance)
    # Sums that were sent in few bits have negative eigenvalues: what is not larger than these is rounding.
    rounding = float(-values[0])
    values, rotated = values.clamp(min=0), targets @ vectors
    squares = rotated.square().sum(dim=0)
    variance = shares.sum() - shares.square().sum()  # of Y
    candidates = [candidate for candidate in GAMMAS if candidate >= 4 * rounding] or GAMMAS[-1:]
    found = []
    for candidate in candidates:
        left = _left(1 + float((values / (values + candidate)).sum()), z)
        residual = variance - ((values + 2 * candidate) * squares / (values + candidate).square()).sum()
        found.append((float(residual) / left**2, candidate, left))
    # Where a fit has too many degrees of freedom, its error is too uncertain to be compared.
    _, chosen, left = min((entry for entry in found if entry[2] > 1 - MAX_FREEDOM), default=found[-1])
    weight = (rotated / (values + chosen)) @ vectors.T
    return Solution(Head(weight, shares, z.shift, z.scale), chosen, left**-2)


def lda(sums: Sums, shrinkage: float | None) -> Solution:
    """Return linear discriminant analysis; without a shrinkage, with the one of OAS (Chen et al., 2010)."""
    z = Standardised.of(sums)
    shrunk = z.within(sums)
    added = shrunk.diagonal().mean().clamp(min=NO_VARIANCE)
    chosen = oas(shrunk, z.samples) if shrinkage is None else shrinkage
    shrunk.mul_(1 - chosen).diagonal().add_(chosen * added)
    inverse = _inverse(shrunk)
    weight = z.means @ inverse
    bias = (z.counts / z.samples).log() - 0.5 * (weight * z.means).sum(dim=1)
    freedom = len(inverse) - chosen * float(added * inverse.trace())  # tr((1 − s) S T⁻¹) of the shrunk matrix T
    left = _left(int((z.counts > 0).sum()) + freedom, z)
    return Solution(Head(weight, bias, z.shift, z.scale), chosen, left**-2)


def means(sums: Sums, regularization: float | None) -> Solution:
    """Return the nearest class mean by cosine."""
    weight = _unit_rows(sums.class_means)
    return Solution(_head_on_features(weight), 0.0)


def means_covariance(sums: Sums, gamma: float | None) -> Solution:
    """Return FedCOF's head: the sums' scatter is that estimated from the clients' class means."""
    gamma = 1.0 if gamma is None else gamma
    gram = sums.scatter()
    gram.diagonal().add_(gamma * gram.diagonal().mean())  # Σ_c (n_c − 1) γ, relative to the mean variance
    total = sums.class_sums.sum(dim=0)
    gram += torch.outer(total, total / sums.samples)
    return Solution(_head_on_features(_unit_rows(sums.class_sums @ _inverse(gram))), gamma)


SOLVERS: Mapping[str, Callable[[Sums, float | None], Solution]] = {
    "ridge": ridge,
    "lda": lda,
    "means": means,
    "means-covariance": means_covariance,
}


def temperature(solution: Solution, sums: Sums) -> float:
    """Return what logits are to be divided by so that they are log-probabilities, as far as sums can tell.

    Let m be the mean of an image's own logit minus another, and v the variance of that difference within classes, on
    new images. Of two classes with Gaussian outputs the log-odds are the difference times 2m/v. Of many, whose
    variances differ, a quarter of that has about the least loss: the temperature is 2v/m. Without second-order sums it
    is m/9. Both factors were found on images; too high a temperature costs little, too low a one much.
    """
    head = solution.head.folded()
    present = sums.counts > 0
    count = int(present.sum())
    if count < 2:
        return 1.0
    weight, shares = head.weight[present], sums.counts[present] / sums.samples
    logits = sums.class_means[present] @ weight.T + head.bias[present]  # [own class, class]
    others = shares / (count - 1)
    margin = float((others[:, None] * (logits.diagonal()[:, None] - logits)).sum())
    if margin <= 0:
        return 1.0
    if sums.gram is None:
        return margin / MEANS_MARGIN
    between = weight @ sums.class_means[present].T  # the scatter is the sums' matrix without that of the means
    products = weight @ sums.gram @ weight.T - (between * sums.counts[present]) @ between.T
    products /= sums.samples
    variances = products.diagonal()[:, None] + products.diagonal() - 2 * products
    variance = float((others[:, None] * variances).sum())
    return max(2 * variance * solution.inflation / margin, margin / MAX_MARGIN)


def oas(covariance: Tensor, samples: float) -> float:
    """Return the shrinkage to a multiple of the identity by oracle approximating shrinkage (Chen et al., 2010)."""
    width = len(covariance)
    squares = float(torch.linalg.vector_norm(covariance)) ** 2 / width**2
    mean_variance = float(covariance.diagonal().mean())
    spread = squares - mean_variance**2 / width
    return (
        1.0
        if spread <= 0 or mean_variance < NO_VARIANCE
        else min(1.0, (squares + mean_variance**2) / ((samples + 1) * spread))
    )


def _left(freedom: float, z: Standardised) -> float:
    """Return the share of the images' degrees of freedom that a fit leaves, at least as much as is relied on."""
    return max(1 - freedom / z.samples, 1 - MAX_FREEDOM)


def _head_on_features(weight: Tensor) -> Head:
    width = weight.new_zeros(weight.shape[1])
    return Head(weight, weight.new_zeros(len(weight)), width, torch.ones_like(width))


def _unit_rows(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / lengths.clamp(min=1e-30)


def _inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of a symmetric matrix; where rounding left it no positive one, the pseudo-inverse."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    inverse: Tensor = torch.linalg.pinv(matrix, hermitian=True) if int(failed) else torch.cholesky_inverse(factor)
    return inverse


@dataclass(frozen=True)
class ClientMeans:
    """The class means of every client, from which FedCOF estimates the covariance.

    The mean of n_kc independent images of a class varies about the class's mean with its covariance over n_kc. So
    Σ_k n_kc (μ_kc − μ_c)(μ_kc − μ_c)' / (K_c − 1) over its K_c clients estimates the covariance of a class.

    Attributes
    ----------
    clients, classes, counts
        One entry for each class of each client.
    class_sums
        Σφ of these images, ``[entries, features]``.
    """

    clients: Tensor
    classes: Tensor
    counts: Tensor
    class_sums: Tensor

    @classmethod
    def of(cls, client: int, sums: Sums) -> ClientMeans:
        """Return the class means of one client."""
        classes = sums.counts.nonzero()[:, 0]
        return cls(torch.full_like(classes, client), classes, sums.counts[classes], sums.class_sums[classes])

    @classmethod
    def join(cls, means: Sequence[ClientMeans]) -> ClientMeans:
        """Return the class means of several clients."""
        columns = zip(*(of_client.tensors().values() for of_client in means), strict=True)
        return cls(*(torch.cat(column) for column in columns))

    def without(self, client: int) -> ClientMeans:
        """Return the class means of all other clients."""
        others = self.clients != client
        return ClientMeans(*(column[others] for column in self.tensors().values()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_sums(self, num_classes: int) -> Sums:
        """Return the sums with an estimated Σφφᵀ, whose scatter is Σ_c (n_c − 1) Σ̂_c."""
        sums = Sums.zeros(num_classes, self.class_sums.shape[1], second_order=False, device=self.counts.device)
        sums.counts.index_add_(0, self.classes, self.counts)
        sums.class_sums.index_add_(0, self.classes, self.class_sums)
        clients = torch.bincount(self.classes, minlength=num_classes)
        factors = (sums.counts - 1).clamp(min=0) / (clients - 1).clamp(min=1)
        rows = self.class_sums / self.counts[:, None] - sums.class_means[self.classes]
        rows = rows * (self.counts * factors[self.classes]).sqrt()[:, None]
        return sums.with_scatter(rows.T @ rows)
