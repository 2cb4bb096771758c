"""Classes beyond the range of int16 are stored and sent as they are."""

from __future__ import annotations

import pytest
import torch

from conftest import context_of
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import AugmentConfig, ModelConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.methods import ClientJob, ClientUpdate, make_method
from vitfleet.methods.continual.fedknow import read_knowledge
from vitfleet.methods.continual.stored_samples import read_memory
from vitfleet.models.zoo import build_model
from vitfleet.training.driver import run_update
from vitfleet.training.machine import Machine
from vitfleet.training.stack_inputs import RngContext
from vitfleet.training.trainer import Trainer, preprocess_for

CLASSES = 40_000
CPU = torch.device("cpu")


def update_of(name: str, **params: object) -> ClientUpdate:
    """Return the update of a client whose images are all of the last class."""
    net = build_model(ModelConfig(dim=8, depth=2, heads=2, patch_size=4), CLASSES, 1, 8, seed=0)
    context = context_of(net, {"epochs": 2}, num_classes=CLASSES, num_tasks=2)
    method = make_method(METHODS.make_params(name, **params), context)
    trainer = Trainer(net, preprocess_for(net, CPU), context.train, AugmentConfig(), 1, Machine(CPU, bf16=False))
    shard = Shard(ImageSet(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.full((4,), CLASSES - 1)), torch.arange(4))
    initial = net.initial_weights()
    message, base = method.client_message(method.initial_state(initial), 1, 0, None), method.base_message(initial)
    job = ClientJob(1, 0, message, base.tensors, None, shard, 0)
    return run_update(method.client_update(job), trainer, shard, RngContext(0, 1, 0))


@pytest.mark.parametrize("name", ["gem", "er", "fedvit"])
def test_stored_labels(name: str) -> None:
    state = update_of(name, stored_share=0.5).client_state
    assert state is not None
    assert read_memory(state.tensors)[0].labels.tolist() == [CLASSES - 1] * 2


def test_the_class_of_kept_knowledge() -> None:
    state = update_of("fedknow").client_state
    assert state is not None
    assert int(read_knowledge(state.tensors)[0].label) == CLASSES - 1


def test_labels_of_sent_features() -> None:
    labels = update_of("eftvit", local_layers=1).message.tensors["labels"]
    assert labels.tolist() == [CLASSES - 1] * 4
