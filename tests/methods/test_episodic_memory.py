"""The knowledge extractor: lowest losses, class shares kept, within a budget, through a client's state and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import MakeContext, MakeShard
from vitfleet.data.images import ImageSet, Shard
from vitfleet.errors import ConfigError
from vitfleet.message import Message, State
from vitfleet.methods import ClientRoundInput
from vitfleet.methods.continual.gradients.fedvit import FedVit, FedVitParams
from vitfleet.methods.continual.stored_samples import (
    StoredSamples,
    StoredTasks,
    limit_memory,
    memory_tensors,
    parts_before,
    read_memory,
    select_samples,
)
from vitfleet.training.local_training import LocalResult
from vitfleet.wire import decode, encode

LABELS = torch.tensor([0] * 60 + [1] * 30 + [2] * 4 + [7])


@pytest.fixture
def losses() -> torch.Tensor:
    return torch.rand(len(LABELS), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_of_every_class_the_lowest_losses_are_kept(losses: torch.Tensor, share: float) -> None:
    kept = select_samples(losses, LABELS, share)
    assert len(set(kept.tolist())) == len(kept)
    counts = torch.bincount(LABELS[kept], minlength=8).tolist()
    assert counts == [max(1, int(share * n + 0.5)) if n else 0 for n in (60, 30, 4, 0, 0, 0, 0, 1)]
    for label in (0, 1, 2, 7):
        inside = losses[kept[LABELS[kept] == label]]
        outside = [i for i in torch.nonzero(LABELS.eq(label)).flatten().tolist() if i not in kept.tolist()]
        assert not outside or float(inside.max()) <= float(losses[outside].min())


def test_every_beginning_keeps_the_shares_and_the_lowest_losses(losses: torch.Tensor) -> None:
    kept = select_samples(losses, LABELS, 0.5)
    assert set(LABELS[kept[:4]].tolist()) == {0, 1, 2, 7}, "first one of each class"
    for length in range(4, len(kept)):
        begun = kept[:length]
        counts = torch.bincount(LABELS[begun], minlength=3)
        assert abs(int(counts[0]) - 2 * int(counts[1])) <= 2
        for label in (0, 1):
            own = losses[LABELS.eq(label)].sort().values
            assert torch.equal(losses[begun[LABELS[begun] == label]].sort().values, own[: counts[label]])


def test_of_equal_losses_the_first_are_kept() -> None:
    assert select_samples(torch.zeros(20), torch.zeros(20, dtype=torch.long), 0.1).tolist() == [0, 1]


def stored(count: int) -> StoredSamples:
    return StoredSamples(torch.zeros(count, 1, 8, 8, dtype=torch.uint8), torch.arange(count, dtype=torch.int16))


def num_bytes(known: StoredTasks) -> int:
    return sum(tensor.nbytes for tensor in memory_tensors(known).values())


def remember(known: StoredTasks, task_index: int, shard: Shard, losses: torch.Tensor, method: FedVit) -> StoredTasks:
    """Return what a client has stored after a round with these losses."""
    own = State(memory_tensors(known)) if known else None
    job = ClientRoundInput(1, 0, Message({}), {}, own, shard, task_index)
    result = LocalResult({}, torch.tensor(0.0), len(shard), 1, {}, losses, torch.tensor(1))
    trained = method.with_memory(job, {}, result, losses, {})
    stored = read_memory(trained.extra_state)
    counts = [len(stored[index]) if index in stored else 0 for index in range(max(stored) + 1)]
    assert trained.numbers == {"memory_bytes": num_bytes(stored), "stored": counts}
    return stored


def test_a_budget_cuts_tasks_to_a_common_level_from_their_ends() -> None:
    known = {0: stored(10), 1: stored(3), 2: stored(7)}
    sample = 64 + 2
    assert num_bytes(known) == 20 * sample
    for samples, lengths in ((20, [10, 3, 7]), (19, [9, 3, 7]), (17, [7, 3, 7]), (16, [6, 3, 6]), (3, [1, 1, 1])):
        cut = limit_memory(known, samples * sample + 1)
        assert [len(one) for one in cut.values()] == lengths
        assert all(one.labels.tolist() == list(range(len(one))) for one in cut.values())
    assert [len(one) for one in limit_memory(known, None).values()] == [10, 3, 7]


def test_what_is_stored_are_the_images_themselves(
    make_shard: MakeShard, tiny_images: ImageSet, make_context: MakeContext
) -> None:
    method = FedVit(FedVitParams(stored_share=0.2), make_context(num_tasks=4))
    shard = make_shard(10, 40)
    losses = torch.rand(30, generator=torch.Generator().manual_seed(1))
    known = remember({}, 2, shard, losses, method)
    places = 10 + select_samples(losses, shard.labels, 0.2)
    assert torch.equal(known[2].images, tiny_images.images[places])
    assert torch.equal(known[2].labels.long(), tiny_images.labels[places])
    assert (known[2].images.dtype, known[2].labels.dtype) == (torch.uint8, torch.int16)
    # Extracted anew, the same task's knowledge is replaced.
    again = remember(known, 2, shard, -losses, method)
    assert list(again) == [2]
    assert not torch.equal(again[2].images, known[2].images)
    empty = Shard(shard.images, torch.empty(0, dtype=torch.long))
    kept = memory_tensors(remember(known, 3, empty, torch.empty(0), method))
    assert kept.keys() == memory_tensors(known).keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in memory_tensors(known).items())


def test_a_budget_too_small_for_one_image_a_task_is_refused(make_shard: MakeShard, make_context: MakeContext) -> None:
    method = FedVit(FedVitParams(memory_bytes=5 * 66 - 1), make_context(num_tasks=5))
    with pytest.raises(ConfigError, match=r"method\.memory_bytes = 329: must be at least 330"):
        remember({}, 0, make_shard(0, 20), torch.zeros(20), method)


def test_knowledge_survives_a_clients_state() -> None:
    known = {0: stored(3), 11: stored(5)}
    state = State({"head.weight": torch.ones(2), **memory_tensors(known)})
    again = read_memory(decode(State, encode(state)).tensors)
    assert list(again) == [0, 11]
    assert all(torch.equal(again[task_index].images, known[task_index].images) for task_index in known)
    assert all(torch.equal(again[task_index].labels, known[task_index].labels) for task_index in known)


def test_recalled_are_the_tasks_before_one_part_each_the_largest_first() -> None:
    known = {0: stored(4), 2: stored(2), 3: stored(6)}
    memory = parts_before(known, 3)
    assert memory is not None
    assert memory.images.shape == (3, 4, 1, 8, 8)  # the third task's own samples are not among them
    assert memory.sizes == (4, 2, 0)
    expected = [[0.25] * 4, [0.5, 0.5, 0.0, 0.0], [0.0] * 4]
    np.testing.assert_allclose(memory.sample_weight().numpy(), expected)
    assert memory.labels.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0], [0] * 4]
    together = parts_before(known, 3, merged=True)
    assert together is not None
    assert together.labels.tolist() == [[0, 1, 2, 3, 0, 1]]
    np.testing.assert_allclose(together.sample_weight().numpy(), [[1 / 6] * 6], rtol=1e-6)
    assert parts_before(known, 0) is None
    assert parts_before({5: stored(1)}, 4) is None
