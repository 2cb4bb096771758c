"""The Triton attention kernel against torch's attention, forward and backward, for every supported size."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton")
# The interpreter must be requested before Triton is imported, which torchvision has already done.
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on a GPU, or with TRITON_INTERPRET=1", allow_module_level=True)

from vitfleet.models.forward.short_attention import is_supported, short_attention  # noqa: E402

SIZES = [(65, 32), (50, 64), (17, 16), (1, 16), (64, 32), (90, 16), (128, 16)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
DTYPES = [dtype for dtype in TOLERANCE if DEVICE == "cuda" or dtype != torch.bfloat16]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def torch_attention(qkv: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in qkv.float().unbind(2))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "head_dim"), SIZES)
def test_short_attention_equals_torch_forward_and_backward(tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = random_tensor(2, tokens, 3, 3, head_dim, dtype=dtype).requires_grad_()
    # Not contiguous, as autograd passes it if a transposition follows.
    grad_output = random_tensor(2, 3, tokens, head_dim, dtype=dtype).transpose(1, 2)
    exact_qkv = qkv.detach().float().requires_grad_()
    expected = torch_attention(exact_qkv)
    output = short_attention(qkv)
    assert output.is_contiguous()
    assert_close(output, expected, dtype)
    (grad_qkv,) = torch.autograd.grad(output, qkv, grad_output)
    (expected_grad,) = torch.autograd.grad(expected, exact_qkv, grad_output.float())
    assert_close(grad_qkv, expected_grad, dtype)


def test_short_attention_does_not_overflow_with_large_scores() -> None:
    qkv = 30 * random_tensor(1, 17, 3, 2, 16)
    torch.testing.assert_close(short_attention(qkv), torch_attention(qkv), rtol=1e-4, atol=1e-4)


def test_short_attention_accepts_inputs_that_are_not_contiguous() -> None:
    qkv = random_tensor(17, 2, 3, 2, 16).transpose(0, 1)
    torch.testing.assert_close(short_attention(qkv), torch_attention(qkv), rtol=1e-5, atol=1e-5)


def test_custom_operators_pass_opcheck() -> None:
    qkv = random_tensor(2, 17, 3, 2, 16).requires_grad_()
    torch.library.opcheck(torch.ops.vitfleet.short_attention, (qkv,))
    torch.library.opcheck(torch.ops.vitfleet.short_attention_backward, (random_tensor(2, 17, 2, 16), qkv.detach()))


def test_short_attention_compiles_without_a_graph_break() -> None:
    def layer(inputs: Tensor, weight: Tensor) -> Tensor:
        qkv = (inputs @ weight).reshape(2, 17, 3, 2, 16)
        return short_attention(qkv).reshape(2, 17, 32)

    inputs, weight = random_tensor(2, 17, 32), random_tensor(32, 96).requires_grad_()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)(inputs, weight)
    eager = layer(inputs, weight)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(output.square().sum(), weight)[0] for output in (compiled, eager)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_unsupported_sizes_are_rejected() -> None:
    assert is_supported(1, 16)
    assert is_supported(128, 64)
    assert not is_supported(0, 16)
    assert not is_supported(129, 16)
    assert not is_supported(65, 48)
    with pytest.raises(ValueError, match="supported size"):
        short_attention(random_tensor(1, 129, 3, 1, 16))
