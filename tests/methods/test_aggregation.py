"""Robust rules against NumPy, bounds against closed forms; with nothing switched on, the plain mean's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.config.base import AggregationParams
from vitfleet.message import Message, State
from vitfleet.methods.aggregation.rules import MeanParams, MedianParams, TrimmedMeanParams
from vitfleet.methods.aggregation.weighted_mean import WeightedMean, norm_outliers, update_norm
from vitfleet.methods.reported import RejectedUpdateError

KNOWN = State({"w": torch.zeros(4, 3), "b": torch.zeros(3)})


def updates(count: int, scale: float = 1.0) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        {name: scale * torch.randn(one.shape, generator=random) for name, one in KNOWN.tensors.items()}
        for _ in range(count)
    ]


def gathered(config: AggregationParams, sent: list[dict[str, Tensor]]) -> tuple[State, WeightedMean]:
    gathering = WeightedMean(KNOWN, config)
    for client, tensors in enumerate(sent):
        gathering.add(client, Message(tensors, {"samples": client + 1}))
    return gathering.finish(), gathering


def stacked(sent: list[dict[str, Tensor]], name: str) -> NDArray[np.float64]:
    return torch.stack([one[name] for one in sent]).double().numpy()


@pytest.mark.parametrize("count", [3, 5, 6])
def test_median(count: int) -> None:
    sent = updates(count)
    state, _ = gathered(MedianParams(), sent)
    for name in KNOWN.tensors:
        expected = np.median(stacked(sent, name), axis=0).astype(np.float32)
        assert np.array_equal(state.tensors[name].numpy(), expected)


@pytest.mark.parametrize(("count", "trim", "out"), [(10, 0.1, 1), (10, 0.35, 3), (9, 0.2, 1), (5, 0.4, 2)])
def test_trimmed_mean(count: int, trim: float, out: int) -> None:
    sent = updates(count)
    state, _ = gathered(TrimmedMeanParams(trim=trim), sent)
    for name in KNOWN.tensors:
        ranked = np.sort(stacked(sent, name), axis=0)[out : count - out]
        np.testing.assert_allclose(state.tensors[name].numpy(), ranked.mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("rule", ["trimmed", "median"])
def test_a_minority_of_liars_moves_nothing_far(rule: str) -> None:
    honest = updates(7)
    lies = [{name: torch.full_like(one, 1e9) for name, one in KNOWN.tensors.items()} for _ in range(3)]
    config = (
        MedianParams(max_change=None, max_ratio=None)
        if rule == "median"
        else TrimmedMeanParams(trim=0.3, max_change=None, max_ratio=None)
    )
    state, _ = gathered(config, [*honest, *lies])
    for name in KNOWN.tensors:
        assert (state.tensors[name] <= torch.stack([one[name] for one in honest]).amax(0)).all()


def test_holding_replies_back_gives_the_streamed_bits() -> None:
    sent = updates(6)
    streamed, _ = gathered(MeanParams(), sent)
    held, _ = gathered(MeanParams(norm_factor=100), sent)
    assert all(torch.equal(streamed.tensors[name], held.tensors[name]) for name in KNOWN.tensors)


def test_an_update_out_of_all_proportion_is_set_aside_and_named() -> None:
    sent = updates(5)
    wild = {name: 1e6 * one for name, one in sent[3].items()}
    state, gathering = gathered(MeanParams(norm_factor=5, max_change=None, max_ratio=None), [*sent[:3], wild, sent[4]])
    assert list(gathering.rejected) == [3]
    gathering = WeightedMean(KNOWN)
    for client in (0, 1, 2, 4):
        gathering.add(client, Message(sent[client], {"samples": client + 1}))
    expected = gathering.finish()
    assert all(torch.equal(state.tensors[name], expected.tensors[name]) for name in KNOWN.tensors)


def test_the_median_is_not_the_liars_to_choose() -> None:
    assert set(norm_outliers({0: 1.0, 1: 1.1, 2: 1e9, 3: 1e9}, 3)) == {2, 3}
    assert not norm_outliers({0: 1.0, 1: 1e9}, 3)  # of two nobody knows who is the liar
    assert not norm_outliers({0: 1.0, 1: 1.0, 2: 2.9}, 3)
    assert not norm_outliers({0: 1.0, 1: 1.0, 2: 1e9}, None)


def test_a_long_update_is_shortened_to_the_bound() -> None:
    known = State({"w": torch.tensor([1.0, 1.0])})
    gathering = WeightedMean(known, MeanParams(clip_update=1.0))
    gathering.add(0, Message({"w": torch.tensor([4.0, 5.0])}, {"samples": 1}))  # a step of (3, 4), norm 5
    torch.testing.assert_close(gathering.finish().tensors["w"], torch.tensor([1.6, 1.8]))
    gathering = WeightedMean(known, MeanParams(clip_update=6.0))
    gathering.add(0, Message({"w": torch.tensor([4.0, 5.0])}, {"samples": 1}))
    assert torch.equal(gathering.finish().tensors["w"], torch.tensor([4.0, 5.0]))


def test_the_size_of_an_update_is_its_euclidean_norm() -> None:
    sent = updates(1)[0]
    norm = float(torch.cat([one.flatten() for one in sent.values()]).norm())
    assert update_norm(sent, KNOWN.tensors) == pytest.approx(norm)


def test_nobody_may_claim_the_whole_mean() -> None:
    gathering = WeightedMean(KNOWN, MeanParams(max_samples=100))
    with pytest.raises(RejectedUpdateError, match="number of samples is 101; "):
        gathering.add(0, Message(updates(1)[0], {"samples": 101}))
    gathering.add(0, Message(updates(1)[0], {"samples": 100}))


def test_a_weight_that_changes_beyond_all_proportion_is_refused_by_name() -> None:
    known = State({"w": torch.full((16,), 3.0), "zero": torch.zeros(4)})  # norms 12 and 0
    limits = MeanParams(max_change=10.0)

    def add(**changes: float) -> None:
        sent = {name: tensor.clone() for name, tensor in known.tensors.items()}
        for name, change in changes.items():
            sent[name][0] += change
        WeightedMean(known, limits).add(0, Message(sent, {"samples": 1}))

    add(w=10 * (12 + 4) * 0.999, zero=10 * 2 * 0.999)
    with pytest.raises(RejectedUpdateError, match=r"its weight 'w' has changed by 160 .*max_change = 10 allows 160"):
        add(w=10 * (12 + 4) * 1.001)
    with pytest.raises(RejectedUpdateError, match="its weight 'zero'"):
        add(zero=10 * 2 * 1.001)
    with pytest.raises(RejectedUpdateError, match="not finite"):
        add(w=float("nan"))


def test_an_update_beyond_those_before_it_is_refused_and_no_update_is_kept() -> None:
    sent = updates(6, scale=0.01)
    aggregator = WeightedMean(KNOWN, MeanParams(max_ratio=20.0))
    for client in range(3):
        aggregator.add(client, Message(sent[client], {"samples": 1}))
    size = float(np.median(list(aggregator.sizes.values())))
    assert aggregator.sizes[0] == pytest.approx(update_norm(sent[0], KNOWN.tensors) / 15**0.5)
    for factor, client in ((19.0, 3), (21.0, 4)):
        flat = {name: torch.full_like(tensor, factor * size) for name, tensor in KNOWN.tensors.items()}
        message = Message(flat, {"samples": 1})
        if factor < 20:
            aggregator.add(client, message)
            continue
        with pytest.raises(RejectedUpdateError, match=r"aggregate\.max_ratio = 20 .*the 4 accepted before it"):
            aggregator.add(client, message)
    assert not aggregator.pending
    assert sorted(aggregator.sizes) == [0, 1, 2, 3]


def test_the_first_updates_of_a_round_are_compared_with_those_of_the_round_before() -> None:
    wild = Message({name: torch.full_like(tensor, 5.0) for name, tensor in KNOWN.tensors.items()}, {"samples": 1})
    aggregator = WeightedMean(KNOWN, MeanParams(max_ratio=20.0))
    aggregator.add(0, wild)  # nothing to compare with
    aggregator = WeightedMean(KNOWN, MeanParams(max_ratio=20.0))
    aggregator.earlier_sizes = (0.01, 0.02, 9.0)  # one of three was wild: the median is not
    with pytest.raises(RejectedUpdateError, match="max_ratio"):
        aggregator.add(0, wild)


def test_an_update_no_larger_than_the_model_is_no_outlier() -> None:
    known = State({"w": torch.full((4,), 2.0)})
    aggregator = WeightedMean(known, MeanParams(max_ratio=20.0))
    aggregator.earlier_sizes = (1e-6, 1e-6, 1e-6)
    aggregator.add(0, Message({"w": torch.full((4,), 3.9)}, {"samples": 1}))
    with pytest.raises(RejectedUpdateError, match="max_ratio"):
        aggregator.add(1, Message({"w": torch.full((4,), 4.1)}, {"samples": 1}))
