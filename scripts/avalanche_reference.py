"""Record what Avalanche computes for EWC, MAS, GEM, A-GEM and DER++ on a toy stream.

tests/methods/test_avalanche.py compares with it. Avalanche does not go into the environment of vitfleet (its protobuf
clashes with Flower's), so the numbers are kept as a file and this script is how they were made::

    python -m venv avalanche && avalanche/bin/pip install avalanche-lib==0.6.0 timm quadprog safetensors
    avalanche/bin/python scripts/avalanche_reference.py tests/methods/data/avalanche.safetensors

Three experiences of twelve random grey images, four classes, a plain ViT of one layer from timm, single images or whole
experiences per step, never shuffled. Recorded are the weights, gradients, importances and losses inside Avalanche's own
strategies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import avalanche
import torch
from avalanche.benchmarks.scenarios.deprecated.generators import tensors_benchmark
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import AGEMPlugin, EWCPlugin, GEMPlugin, MASPlugin
from avalanche.training.supervised import DER, Naive
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

CLASSES, SIDE, PER_EXPERIENCE, EXPERIENCES = 4, 8, 12, 3
EWC_LAMBDA, MAS_LAMBDA, GEM_STRENGTH, DER_ALPHA, DER_BETA = 3.0, 2.0, 0.5, 0.3, 0.7


class Recorder(SupervisedPlugin):
    """Keeps the weights, the gradient and the batch of the latest step, after the backward pass."""

    def after_backward(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Copy the state of the strategy."""
        self.gradient = {name: weight.grad.clone() for name, weight in strategy.model.named_parameters()}
        self.weights = {name: weight.detach().clone() for name, weight in strategy.model.named_parameters()}
        self.loss = strategy.loss.detach().clone()
        self.images, self.labels = strategy.mb_x.clone(), strategy.mb_y.clone()
        self.logits = strategy.mb_output.detach().clone()


def make_model() -> VisionTransformer:
    """Return timm's ViT with one layer."""
    return VisionTransformer(
        img_size=SIDE, patch_size=4, in_chans=1, num_classes=CLASSES, embed_dim=8, depth=1, num_heads=2
    )


def train(
    plugins: list[Any], weights: dict[str, Tensor], stream: Any, batch_size: int, kind: Any = Naive, **keys: Any
) -> Any:
    """Train on a stream from given weights and return the strategy."""
    model = make_model()
    model.load_state_dict(weights)
    strategy = kind(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
        criterion=torch.nn.CrossEntropyLoss(),
        train_mb_size=batch_size,
        train_epochs=2,
        plugins=plugins,
        evaluator=None,
        **keys,
    )
    for experience in stream:
        strategy.train(experience, shuffle=False)
    return strategy


def named(prefix: str, tensors: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    """Return tensors under names with a prefix; Avalanche keeps some in a class of its own."""
    return {f"{prefix}.{name}": getattr(tensor, "data", tensor).clone() for name, tensor in tensors}


def main() -> None:
    """Train with every method and write what was recorded."""
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    count = PER_EXPERIENCE * EXPERIENCES
    pixels = torch.randint(0, 256, (count, 1, SIDE, SIDE), generator=random, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (count,), generator=random)
    images = (pixels / 255 - 0.5) / 0.5
    parts = [(images[i : i + PER_EXPERIENCE], labels[i : i + PER_EXPERIENCE]) for i in range(0, count, PER_EXPERIENCE)]
    stream = tensors_benchmark(train_tensors=parts, test_tensors=parts, task_labels=[0] * EXPERIENCES).train_stream
    start = {
        name: 0.4 * torch.randn(tensor.shape, generator=random) for name, tensor in make_model().state_dict().items()
    }
    found = {"pixels": pixels, "labels": labels, **named("start", start.items())}

    # EWC and MAS square batch means: with one image per step they are the per-sample definitions.
    ewc, recorder = EWCPlugin(EWC_LAMBDA, mode="separate", keep_importance_data=True), Recorder()
    train([ewc, recorder], start, stream, batch_size=1)
    for experience in range(2):
        found |= named(f"ewc.importance.{experience}", ewc.importances[experience].items())
        found |= named(f"ewc.anchor.{experience}", ewc.saved_params[experience].items())
    found |= step("ewc", recorder)

    mas, recorder = MASPlugin(MAS_LAMBDA, alpha=0.5), Recorder()
    strategy = train([mas, recorder], start, stream[:1], batch_size=1)
    found |= named("mas.importance.0", mas.importance.items()) | named("mas.anchor.0", mas.params.items())
    strategy.train(stream[1], shuffle=False)
    found |= named("mas.importance.mean", mas.importance.items()) | named("mas.anchor.1", mas.params.items())
    strategy.train(stream[2], shuffle=False)
    found |= step("mas", recorder)

    for name, plugin in (
        ("gem", GEMPlugin(PER_EXPERIENCE, GEM_STRENGTH)),
        ("agem", AGEMPlugin(PER_EXPERIENCE, 2 * PER_EXPERIENCE)),
    ):
        before, after = Recorder(), Recorder()
        train([before, plugin, after], start, stream, batch_size=PER_EXPERIENCE)
        references = plugin.G if name == "gem" else plugin.reference_gradients[None]
        found |= {f"{name}.references": references.clone()}
        found |= named(f"{name}.before", before.gradient.items()) | named(f"{name}.after", after.gradient.items())
        found |= named(f"{name}.weights", before.weights.items())

    recorder = Recorder()
    strategy = train(
        [recorder], start, stream[:2], 6, kind=DER, mem_size=8, batch_size_mem=6, alpha=DER_ALPHA, beta=DER_BETA
    )
    found |= {"der.logits": recorder.logits, "der.labels": recorder.labels, "der.loss": recorder.loss}
    found["der.stored_logits"] = strategy.batch_logits.clone()

    metadata = {"avalanche": avalanche.__version__, "torch": torch.__version__}
    save_file({name: tensor.detach().contiguous() for name, tensor in found.items()}, sys.argv[1], metadata)


def step(method: str, recorder: Recorder) -> dict[str, Tensor]:
    """Return the latest step of a strategy with a penalty."""
    batch = {f"{method}.images": recorder.images, f"{method}.labels": recorder.labels, f"{method}.loss": recorder.loss}
    weights, gradient = recorder.weights.items(), recorder.gradient.items()
    return batch | named(f"{method}.weights", weights) | named(f"{method}.gradient", gradient)


if __name__ == "__main__":
    main()
