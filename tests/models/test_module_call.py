"""A module called with the stacked weights of several clients is the module called for each client."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfleet.models.forward.module_call import call_module

CLIENTS, BATCH = 3, 2


class Layers(nn.Module):
    """Convolutions of all kinds, attention with and without a bias, and shared constants."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 4, 4, stride=4)
        self.overlapping = nn.Conv2d(4, 4, 3, stride=2, padding=1, bias=False)
        self.dilated = nn.Conv2d(4, 4, 2, padding=(1, 0), dilation=(1, 2))
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.bias = nn.Parameter(torch.zeros(2, 1, 1))
        self.head = nn.Linear(4, 5)
        self.register_buffer("constant", torch.arange(4.0))

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        maps = self.depthwise(self.dilated(F.gelu(self.overlapping(self.patch(images)))))
        tokens = maps.flatten(2).mT + self.constant
        tokens = tokens if keep is None else tokens.gather(1, keep.unsqueeze(-1).expand(-1, -1, 4))
        heads = tokens.unflatten(-1, (2, 2)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.0)
        heads = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.bias, scale=0.3)
        logits: Tensor = self.head(heads.transpose(1, 2).flatten(2).mean(1))
        return logits


@pytest.mark.parametrize("shared", [frozenset[str](), frozenset({"patch.weight", "head.bias"})], ids=["none", "some"])
@pytest.mark.parametrize("masked", [False, True])
def test_stacked_call_equals_one_client_after_the_other(shared: frozenset[str], masked: bool) -> None:
    torch.manual_seed(0)
    module = Layers().double()
    # Small weights: a softmax of large numbers would amplify rounding errors, which differ between processors.
    weights = {
        name: (
            0.3 * torch.randn(*(() if name in shared else (CLIENTS,)), *tensor.shape, dtype=torch.float64)
        ).requires_grad_()
        for name, tensor in module.named_parameters()
    }
    images = torch.randn(CLIENTS, BATCH, 3, 32, 32, dtype=torch.float64)
    keep = torch.tensor([0, 2]).expand(CLIENTS, BATCH, 2) if masked else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # vmap warns where it would loop over the clients
        together = call_module(module, weights, frozenset(weights) - shared, images, keep)
    gradients = torch.autograd.grad(together.square().sum(), list(weights.values()))
    alone = [
        call_module(
            module,
            {name: tensor if name in shared else tensor[client] for name, tensor in weights.items()},
            frozenset(),
            images[client],
            None if keep is None else keep[client],
        )
        for client in range(CLIENTS)
    ]
    torch.testing.assert_close(together, torch.stack(alone))
    expected = torch.autograd.grad(torch.stack(alone).square().sum(), list(weights.values()))
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def test_clients_that_share_all_weights_are_one_batch() -> None:
    torch.manual_seed(0)
    module = Layers()
    weights = dict(module.named_parameters())
    images = torch.randn(CLIENTS, BATCH, 3, 32, 32)
    together = call_module(module, weights, frozenset(), images, None)
    for client in range(CLIENTS):
        torch.testing.assert_close(together[client], module(images[client]))


def test_stacked_products_are_computed_in_the_type_of_autocast() -> None:
    torch.manual_seed(0)
    module = Layers()
    weights = {name: torch.stack([tensor] * CLIENTS).detach() for name, tensor in module.named_parameters()}
    images = torch.randn(CLIENTS, BATCH, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        together = call_module(module, weights, frozenset(weights), images, None)
        alone = module(images[0])
    assert together.dtype == alone.dtype == torch.bfloat16
    torch.testing.assert_close(together[0], alone, rtol=0.05, atol=0.05)
