"""Attention's own kernel is torch's attention, forward and backward, for every size that it takes."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton")
# The interpreter must be asked for before Triton is imported, and torchvision has done so by now.
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on a GPU, or with TRITON_INTERPRET=1", allow_module_level=True)

from vitfleet.models.attention import attend, suits  # noqa: E402

SIZES = [(65, 32), (50, 64), (17, 16), (1, 16), (64, 32), (90, 16), (128, 16)]
NEAR = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
DTYPES = [dtype for dtype in NEAR if DEVICE == "cuda" or dtype != torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=source).to(DEVICE, dtype)


def by_torch(qkv: Tensor) -> Tensor:
    q, k, v = (one.transpose(1, 2) for one in qkv.float().unbind(2))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def close(found: Tensor, true: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), true.float(), rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_forward_and_backward_are_torchs(tokens: int, width: int, dtype: torch.dtype) -> None:
    qkv = draw(2, tokens, 3, 3, width, dtype=dtype).requires_grad_()
    # As autograd hands it over where a transposition follows: not contiguous.
    gradient = draw(2, 3, tokens, width, dtype=dtype).transpose(1, 2)
    true = qkv.detach().float().requires_grad_()
    expected = by_torch(true)
    mixed = attend(qkv)
    assert mixed.is_contiguous()
    close(mixed, expected, dtype)
    (found,) = torch.autograd.grad(mixed, qkv, gradient)
    (derived,) = torch.autograd.grad(expected, true, gradient.float())
    close(found, derived, dtype)


def test_large_scores_do_not_overflow() -> None:
    qkv = 30 * draw(1, 17, 3, 2, 16)
    torch.testing.assert_close(attend(qkv), by_torch(qkv), rtol=1e-4, atol=1e-4)


def test_packed_tensors_may_lie_as_they_like() -> None:
    qkv = draw(17, 2, 3, 2, 16).transpose(0, 1)
    torch.testing.assert_close(attend(qkv), by_torch(qkv), rtol=1e-5, atol=1e-5)


def test_it_keeps_the_rules_of_torchs_operators() -> None:
    qkv = draw(2, 17, 3, 2, 16).requires_grad_()
    torch.library.opcheck(torch.ops.vitfleet.attend, (qkv,))
    torch.library.opcheck(torch.ops.vitfleet.attend_backward, (draw(2, 17, 2, 16), qkv.detach()))


def test_a_compiled_graph_holds_it_whole() -> None:
    def layer(inputs: Tensor, weight: Tensor) -> Tensor:
        qkv = (inputs @ weight).reshape(2, 17, 3, 2, 16)
        return attend(qkv).reshape(2, 17, 32)

    inputs, weight = draw(2, 17, 32), draw(32, 96).requires_grad_()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    found = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)(inputs, weight)
    true = layer(inputs, weight)
    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(one.square().sum(), weight)[0] for one in (found, true)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_it_says_what_suits_it() -> None:
    assert suits(1, 16)
    assert suits(128, 64)
    assert not suits(0, 16)
    assert not suits(129, 16)
    assert not suits(65, 48)
    with pytest.raises(ValueError, match="suits"):
        attend(draw(1, 129, 3, 1, 16))
