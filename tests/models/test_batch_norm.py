"""Batch norm: torch's on the samples that count, without the others; empty batches change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.func import functional_call

from family_configs import IMAGE_SIZE, tiny_family
from vitfleet.models.forward.batch_norm import MaskedBatchNorm, replace_batch_norms, trained_batch_norms
from vitfleet.models.net import BatchStatistics

STATISTICS = ("running_mean", "running_var")


def norm_1d() -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(3).double()
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert tensor is not None
            tensor.copy_(torch.rand(3) + 0.5)
    return norm


def masked(norm: nn.Module, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return outputs, and the weights after the call."""
    module = MaskedBatchNorm(norm)
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    given = weights if mask is None else {**weights, "sample_mask": mask}
    return functional_call(module, given, (inputs,)), weights


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (6, 3, 2, 5)], ids=str)
def test_masked_batch_norm_is_torchs_on_the_samples_that_count(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm, inputs = norm_1d(), torch.randn(shape, dtype=torch.float64)
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    outputs, weights = masked(norm, inputs, mask)
    reference: Any = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3).double()
    reference.load_state_dict(norm.state_dict())
    expected = reference.train()(inputs[mask])
    torch.testing.assert_close(outputs[mask], expected)
    for name in STATISTICS:
        torch.testing.assert_close(weights[name], getattr(reference, name))


def test_tokens_on_the_axis_of_the_batch_follow_their_image() -> None:
    torch.manual_seed(0)
    norm, tokens = norm_1d(), torch.randn(4, 5, 3, dtype=torch.float64)
    mask = torch.tensor([True, False, True, False])
    outputs, weights = masked(norm, tokens.flatten(0, 1), mask)
    expected = norm.train()(tokens[mask].flatten(0, 1))
    torch.testing.assert_close(outputs.reshape(4, 5, 3)[mask].flatten(0, 1), expected)
    torch.testing.assert_close(weights["running_var"], norm.running_var)


def test_without_a_mask_running_statistics_are_used_and_stay() -> None:
    torch.manual_seed(0)
    norm, inputs = norm_1d(), torch.randn(6, 3, dtype=torch.float64)
    outputs, weights = masked(norm, inputs, None)
    torch.testing.assert_close(outputs, norm.eval()(inputs))
    assert torch.equal(weights["running_mean"], norm.state_dict()["running_mean"])


@pytest.mark.parametrize("count", [0, 1])
def test_a_batch_of_fewer_than_two_values_changes_nothing(count: int) -> None:
    torch.manual_seed(0)
    norm, inputs = norm_1d(), torch.randn(6, 3, dtype=torch.float64)
    outputs, weights = masked(norm, inputs, torch.arange(6) < count)
    torch.testing.assert_close(outputs, norm.eval()(inputs))
    assert all(torch.equal(weights[name], getattr(norm, name)) for name in STATISTICS)
    assert torch.isfinite(outputs).all()


def test_stacked_clients_update_their_own_statistics() -> None:
    torch.manual_seed(0)
    module = MaskedBatchNorm(norm_1d())
    weights = {name: torch.stack([tensor, 2 * tensor]).detach() for name, tensor in module.state_dict().items()}
    alone = [{name: tensor[client].clone() for name, tensor in weights.items()} for client in range(2)]
    inputs, mask = torch.randn(2, 4, 3, dtype=torch.float64), torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]]).bool()

    def call(weights: dict[str, Tensor], inputs: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = functional_call(module, {**weights, "sample_mask": mask}, (inputs,))
        return logits

    outputs = torch.vmap(call)(weights, inputs, mask)
    for client in range(2):
        torch.testing.assert_close(outputs[client], call(alone[client], inputs[client], mask[client]))
        for name in STATISTICS:
            torch.testing.assert_close(weights[name][client], alone[client][name])
    assert torch.equal(weights["running_mean"][1], 2 * module.running_mean)  # a client without samples


def test_replaced_batch_norms_keep_names_and_activations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4), nn.BatchNorm2d(4)).eval()
    inputs = torch.randn(2, 3, 5, 5)
    expected, names = model(inputs), {name for name in model.state_dict() if not name.endswith("tracked")}
    paths = replace_batch_norms(model)
    assert paths == ("1", "2")
    assert set(model.state_dict()) == names
    torch.testing.assert_close(model(inputs), expected)
    assert trained_batch_norms(paths, {"1.running_mean", "1.running_var", "2.weight"}) == ("1",)


def test_biases_added_to_levits_tokens_have_a_gradient_with_running_statistics_only() -> None:
    """Batch norms read every sum of branches: what is added to all tokens, they subtract. See docs/models.md."""
    net = tiny_family("levit")
    random = torch.Generator().manual_seed(0)
    weights = {n: (t + 0.1 * torch.rand(t.shape, generator=random)).double() for n, t in net.initial_weights().items()}
    for name in net.parts.parameters:
        weights[name].requires_grad_()
    images = torch.randn(6, 1, IMAGE_SIZE, IMAGE_SIZE, generator=random, dtype=torch.float64)
    added = [name for name in weights if name.endswith(("stem.4.bn.bias", "proj.ln.bn.bias", "ln2.bn.bias"))]
    assert len(added) == 7

    def gradient_sizes(statistics: BatchStatistics | None) -> dict[str, float]:
        leaves = {name: weights[name] for name in net.parts.parameters}
        loss = net(weights, images, statistics=statistics).logsumexp(-1).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return {name: float(gradient.abs().max()) for name, gradient in zip(leaves, gradients, strict=True)}

    in_training = gradient_sizes(BatchStatistics(net.batch_norms, torch.ones(6, dtype=torch.bool)))
    assert max(in_training[name] for name in added) < 1e-14
    assert min(size for name, size in in_training.items() if name not in added) > 1e-9
    assert min(gradient_sizes(None)[name] for name in added) > 1e-4
