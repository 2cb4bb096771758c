"""Net: a pure function of its weights; dropped patches are never embedded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.schema import ModelConfig
from vitfleet.errors import UserError
from vitfleet.models.net import BatchStatistics, Net
from vitfleet.models.stacked_ops import attention
from vitfleet.models.zoo import build_model

# All variants of prefix tokens and pooling in timm's plain ViTs.
MASKABLE = {
    "class token": ModelConfig(dim=32, depth=2, heads=2),
    "class token of timm": ModelConfig(name="vit_tiny_patch16_224", image_size=32, patch_size=4, depth=2),
    "class and distillation token": ModelConfig(
        name="deit_tiny_distilled_patch16_224", image_size=32, patch_size=4, depth=2
    ),
    "class token without position": ModelConfig(name="deit3_small_patch16_224", image_size=32, patch_size=8, depth=2),
    "registers": ModelConfig(name="vit_small_patch14_reg4_dinov2", image_size=56, depth=1),
    "average of patches": ModelConfig(name="vit_base_patch16_siglip_gap_224", image_size=48, depth=1),
    "attention pooling": ModelConfig(name="vit_base_patch16_siglip_224", image_size=48, depth=1),
    "norm before the blocks": ModelConfig(name="vit_base_patch32_clip_224", image_size=96, depth=1),
    "cait: separate blocks for the class token": ModelConfig(
        name="cait_xxs24_224", image_size=32, patch_size=4, depth=2
    ),
}
OTHERS = {
    "swin": ModelConfig(name="swin_tiny_patch4_window7_224", image_size=32),
    "pvt_v2": ModelConfig(name="pvt_v2_b0"),
    "pit": ModelConfig(name="pit_ti_224", image_size=32, patch_size=4),
    "levit": ModelConfig(name="levit_128s", image_size=32),
    # A plain ViT behind a convolution: its patches are cut from features, not from the image.
    "hybrid": ModelConfig(name="vit_tiny_r_s16_p8_224", image_size=64, depth=1),
}
BATCH = 3


def make(config: ModelConfig, seed: int = 0) -> Net:
    net = build_model(config, num_classes=5, channels=3, data_image_size=32, seed=seed)
    net.module.eval()
    return net


def images(net: Net, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, 3, net.image_size, net.image_size, generator=generator, dtype=torch.float64)


def perturbed_weights(net: Net, seed: int = 0) -> dict[str, Tensor]:
    """Return float64 weights far from timm's initial ones, which are so small that they could hide errors."""
    generator = torch.Generator().manual_seed(seed)

    def change(name: str, tensor: Tensor) -> Tensor:
        noise = 0.1 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return tensor + (noise.abs() if name.endswith("running_var") else noise)

    return {name: change(name, tensor) for name, tensor in net.initial_weights().items()}


def timm_model(net: Net, weights: dict[str, Tensor]) -> Any:
    """Return a copy of the net's timm model that holds these weights."""
    vit = copy.deepcopy(net.module.vit).double()
    vit.load_state_dict({**vit.state_dict(), **weights})
    return vit.eval()


def random_keep(net: Net, kept: int, seed: int = 0) -> Tensor:
    noise = torch.rand(BATCH, net.num_patches, generator=torch.Generator().manual_seed(seed))
    return noise.argsort(dim=1)[:, :kept]


def reference_logits(vit: Any, inputs: Tensor, keep: Tensor) -> Tensor:
    """Embed all patches with timm's modules, then remove those that are not kept."""
    patches: Tensor = vit.patch_embed(inputs)
    if hasattr(vit, "blocks_token_only"):
        placed = patches + vit.pos_embed
        rows = [image[kept] for image, kept in zip(placed, keep, strict=True)]
        tokens = vit.blocks(torch.stack(rows))
        token = vit.cls_token.expand(len(tokens), -1, -1)
        for block in vit.blocks_token_only:
            token = block(tokens, token)
        cait_logits: Tensor = vit.head(vit.norm(token)[:, 0])
        return cait_logits
    prefix = [
        getattr(vit, name) for name in ("cls_token", "dist_token", "reg_token") if getattr(vit, name, None) is not None
    ]
    patches_only = vit.pos_embed.shape[1] == patches.shape[1]  # the prefix tokens have no positions
    placed = patches + (vit.pos_embed if patches_only else vit.pos_embed[:, -patches.shape[1] :])
    rows = [torch.stack([image[i] for i in kept]) for image, kept in zip(placed, keep.tolist(), strict=True)]
    tokens = torch.stack(rows)
    if prefix:
        head = torch.cat(prefix, dim=1)
        if not patches_only:
            head = head + vit.pos_embed[:, : head.shape[1]]
        tokens = torch.cat([head.expand(len(tokens), -1, -1), tokens], dim=1)
    tokens = vit.norm(vit.blocks(vit.norm_pre(tokens)))
    logits: Tensor = vit.forward_head(tokens)
    return logits


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)


@pytest.fixture(scope="module", params=MASKABLE)
def maskable(request: pytest.FixtureRequest) -> Net:
    return make(MASKABLE[request.param])


@pytest.fixture(scope="module")
def small() -> Net:
    return make(MASKABLE["class token"])


# Token dropping


def test_net_with_keep_equals_timm_on_the_kept_patches(maskable: Net) -> None:
    weights = perturbed_weights(maskable)
    keep = random_keep(maskable, max(2, maskable.num_patches // 3))
    expected = reference_logits(timm_model(maskable, weights), images(maskable), keep)
    assert_close(maskable(weights, images(maskable), keep), expected)


def test_keeping_all_patches_in_any_order_equals_the_unmasked_pass(maskable: Net) -> None:
    weights = perturbed_weights(maskable)
    plain = maskable(weights, images(maskable))
    for seed in range(3):
        assert_close(maskable(weights, images(maskable), random_keep(maskable, maskable.num_patches, seed)), plain)
    assert (plain - plain.mean(0)).abs().max() > 1e-3  # the images do matter


@pytest.mark.parametrize("name", [*MASKABLE, *OTHERS])
def test_net_without_keep_equals_timm(name: str) -> None:
    net = make({**MASKABLE, **OTHERS}[name])
    net.module.double()  # for the constants of some families
    weights = perturbed_weights(net)
    with torch.no_grad():
        assert_close(net(weights, images(net)), timm_model(net, weights)(images(net)))


def test_unfused_attention_equals_fused_attention(small: Net) -> None:
    images = torch.rand(2, 3, small.image_size, small.image_size)
    weights = small.initial_weights()
    assert torch.allclose(small(weights, images), small.with_unfused_attention()(weights, images), atol=1e-5)


def test_unfused_attention_in_bfloat16_differs_by_rounding_only() -> None:
    rng = torch.Generator().manual_seed(3)
    exact = [torch.randn(2, 3, 17, 8, generator=rng, requires_grad=True) for _ in range(3)]
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    q, k, v = exact
    expected, actual = F.scaled_dot_product_attention(q, k, v), attention(rounded[0], rounded[1], rounded[2])
    assert actual.dtype == torch.bfloat16
    assert torch.allclose(expected, actual.float(), atol=0.03)
    grad_output = torch.randn(expected.shape, generator=rng)
    exact_grads = torch.autograd.grad(expected, exact, grad_output)
    rounded_grads = torch.autograd.grad(actual, rounded, grad_output.bfloat16())
    for exact_grad, rounded_grad in zip(exact_grads, rounded_grads, strict=True):
        difference = torch.linalg.vector_norm(exact_grad - rounded_grad.float())
        assert difference < 0.02 * torch.linalg.vector_norm(exact_grad)


def test_dropped_patches_do_not_influence_the_logits(small: Net) -> None:
    weights = perturbed_weights(small)
    inputs = images(small)
    keep = torch.tensor([[9, 0, 63]] * BATCH)
    before = small(weights, inputs, keep)
    painted = torch.full_like(inputs, torch.nan)
    for patch in (9, 0, 63):
        row, column = 4 * (patch // 8), 4 * (patch % 8)
        painted[:, :, row : row + 4, column : column + 4] = inputs[:, :, row : row + 4, column : column + 4]
    assert torch.equal(small(weights, painted, keep), before)


def test_keep_is_applied_per_image(small: Net) -> None:
    weights = perturbed_weights(small)
    keep = random_keep(small, 7)
    together = small(weights, images(small), keep)
    for i in range(BATCH):
        assert_close(small(weights, images(small)[i : i + 1], keep[i : i + 1]), together[i : i + 1])


def test_kept_patches_keep_their_positions(small: Net) -> None:
    weights = perturbed_weights(small)
    flat = torch.ones(1, 3, 32, 32, dtype=torch.float64)  # all patches are equal, only their positions differ
    first = small(weights, flat, torch.tensor([[0, 1]]))
    last = small(weights, flat, torch.tensor([[62, 63]]))
    assert (first - last).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("ratio", "kept"), [(0.0, 196), (0.25, 147), (0.5, 98), (0.6, 78), (0.75, 49), (0.9, 19), (0.999, 1)]
)
def test_num_kept_patches_follows_the_mask_ratio(ratio: float, kept: int) -> None:
    net = make(ModelConfig(image_size=224, patch_size=16, dim=8, depth=1, heads=1))
    assert net.num_patches == 196
    assert net.num_kept_patches(ratio) == kept


@given(ratio=st.floats(0, 1, exclude_max=True))
def test_num_kept_patches_is_at_least_one(small: Net, ratio: float) -> None:
    kept = small.num_kept_patches(ratio)
    assert 1 <= kept <= 64
    assert kept == 1 or abs(kept - 64 * (1 - ratio)) <= 1


@pytest.mark.parametrize("name", OTHERS)
def test_num_kept_patches_rejects_a_mask_for_families_without_token_dropping(name: str) -> None:
    net = make(OTHERS[name])
    assert net.num_patches == 0
    assert net.num_kept_patches(0) == 0
    with pytest.raises(UserError, match=r"mask ratio = 0\.5: must be 0") as caught:
        net.num_kept_patches(0.5)
    assert len(str(caught.value).splitlines()) == 1


# Pure function


@pytest.mark.parametrize("name", [*MASKABLE, *OTHERS])
def test_net_is_a_pure_function_of_its_weights(name: str) -> None:
    net = make({**MASKABLE, **OTHERS}[name])
    net.module.double()  # for the constants of some families
    before = {key: tensor.clone() for key, tensor in net.module.vit.state_dict().items()}
    first, second = perturbed_weights(net, 1), perturbed_weights(net, 2)
    copies = {key: tensor.clone() for key, tensor in first.items()}
    inputs = images(net)
    with torch.no_grad():
        first_logits = net(first, inputs)
        second_logits = net(second, inputs)
        repeated = net(first, inputs)
    assert first_logits.shape == (BATCH, 5)
    assert torch.isfinite(first_logits).all()
    assert not torch.equal(first_logits, second_logits)
    assert torch.equal(first_logits, repeated)
    assert all(torch.equal(first[key], copies[key]) for key in copies)
    after = net.module.vit.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_nets_of_one_architecture_are_the_same_function(small: Net) -> None:
    other = make(MASKABLE["class token"], seed=9)
    weights = perturbed_weights(small)
    assert torch.equal(small(weights, images(small)), other(weights, images(small)))


def test_running_statistics_are_updated_in_the_given_weights_only() -> None:
    net = make(OTHERS["levit"])
    weights = net.initial_weights()
    before = {key: tensor.clone() for key, tensor in net.initial_weights().items()}
    everyone = torch.ones(BATCH, dtype=torch.bool)
    trained = net.trained_batch_norms(net.anatomy.blocks[0])
    net(weights, images(net).float(), statistics=BatchStatistics(trained, everyone))
    assert not torch.equal(
        weights["stages.0.blocks.0.attn.qkv.bn.running_mean"], before["stages.0.blocks.0.attn.qkv.bn.running_mean"]
    )
    assert torch.equal(weights["stem.conv1.bn.running_mean"], before["stem.conv1.bn.running_mean"])
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.initial_weights().items())


def test_nothing_that_is_derived_from_one_clients_weights_is_used_for_another() -> None:
    """LeViT keeps its attention biases in evaluation mode, which would be those of the first weights it saw."""
    net = make(OTHERS["levit"]).with_constants_on("cpu")
    net.module.eval()
    first, second = ({key: tensor.float() for key, tensor in perturbed_weights(net, seed).items()} for seed in (1, 2))
    inputs = images(net).float()
    with torch.no_grad():
        net(first, inputs)
        other = make(OTHERS["levit"])
        assert torch.equal(net(second, inputs), other(second, inputs))


@pytest.mark.parametrize("name", ["class token", "class and distillation token", *OTHERS])
def test_training_mode_uses_no_global_randomness(name: str) -> None:
    """A family's dropout or stochastic depth would draw from the global generator, not from an address."""
    net = make({**MASKABLE, **OTHERS}[name])
    net.module.train()
    logits = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        weights = {key: tensor.clone() for key, tensor in net.initial_weights().items()}
        logits.append(net(weights, images(net).float()))
    assert torch.equal(*logits)


def test_every_given_weight_has_a_gradient(maskable: Net) -> None:
    weights = {name: tensor.requires_grad_() for name, tensor in perturbed_weights(maskable).items()}
    keep = random_keep(maskable, 2)
    net_loss = maskable(weights, images(maskable), keep).square().sum()
    gradients = torch.autograd.grad(net_loss, list(weights.values()), allow_unused=True)
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    assert all(not p.requires_grad and p.grad is None for p in maskable.module.parameters())


def test_initial_weights_are_copies(small: Net) -> None:
    first = small.initial_weights()
    for tensor in first.values():
        tensor.zero_()
    assert any(tensor.any() for tensor in small.initial_weights().values())
    assert list(first) == list(small.anatomy.shapes)
