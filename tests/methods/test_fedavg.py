"""FedAvg is McMahan's Algorithm 1: train what was sent, average by samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conftest import NO_IMAGES, MakeContext, MakeShard, MakeTrainer
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import ClientGenerator, ClientRoundInput, ClientUpdate
from vitfleet.methods.aggregation.rules import MeanParams
from vitfleet.methods.aggregation.weighted_mean import WeightedMean
from vitfleet.methods.averaging.fedavg import FedAvg, FedAvgParams
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.models.net import Net
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.stacking.inputs import RngContext


def message(samples: int, **tensors: Tensor) -> Message:
    return Message(tensors, {"samples": samples, "loss": 0.0})


def mean_of(server: State, *messages: Message) -> Tensors:
    gathering = WeightedMean(server, MeanParams(max_change=None, max_ratio=None))
    for client, one in enumerate(messages):
        gathering.add(client, one)
    return gathering.finish().tensors


def finish(work: ClientGenerator, result: LocalResult) -> ClientUpdate:
    with pytest.raises(StopIteration) as end:
        work.send(result)
    answer: ClientUpdate = end.value.value
    return answer


def test_the_mean_is_weighted_by_samples() -> None:
    random = torch.Generator().manual_seed(1)
    samples = [1, 7, 40, 3]
    sent = [torch.randn(5, 3, generator=random) for _ in samples]
    mean = mean_of(State({"w": torch.zeros(5, 3)}), *(message(n, w=w) for n, w in zip(samples, sent, strict=True)))
    expected = sum((n / 51 * w.double() for n, w in zip(samples, sent, strict=True)), torch.zeros(5, 3).double())
    torch.testing.assert_close(mean["w"].double(), expected, rtol=0, atol=2e-7)
    assert mean["w"].dtype == torch.float32


def test_small_numbers_come_out_exact() -> None:
    mean = mean_of(
        State({"w": torch.zeros(2)}),
        message(1, w=torch.tensor([4.0, 8.0])),
        message(3, w=torch.tensor([0.0, 4.0])),
    )
    assert mean["w"].tolist() == [1.0, 5.0]


def test_a_client_without_samples_has_no_say() -> None:
    state = State({"w": torch.zeros(2)})
    nobody = message(0, w=torch.tensor([float("nan"), 1e30]))
    mean = mean_of(state, nobody, message(2, w=torch.tensor([1.0, 2.0])), nobody)
    assert mean["w"].tolist() == [1.0, 2.0]


def test_a_tensor_is_averaged_over_those_who_sent_it() -> None:
    server = State({"a": torch.tensor([9.0]), "b": torch.tensor([9.0]), "c": torch.tensor([9.0])})
    mean = mean_of(
        server,
        message(1, a=torch.tensor([1.0]), b=torch.tensor([5.0])),
        message(3, a=torch.tensor([2.0])),
    )
    assert {name: tensor.tolist() for name, tensor in mean.items()} == {"a": [1.75], "b": [5.0], "c": [9.0]}


@pytest.mark.parametrize("messages", [[], [message(0, w=torch.ones(2))], [message(4)]])
def test_where_nobody_sent_anything_all_stays(messages: list[Message]) -> None:
    server = State({"w": torch.tensor([0.1, 0.2])}, {"kept": 3})
    gathering = WeightedMean(server)
    for one in messages:
        gathering.add(0, one)
    after = gathering.finish()
    assert torch.equal(after.tensors["w"], server.tensors["w"])
    assert after.numbers == {"kept": 3}


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    samples=st.lists(st.integers(1, 60_000), min_size=1, max_size=12),
)
def test_the_mean_of_equal_weights_is_those_weights(values: list[float], samples: list[int]) -> None:
    weights = torch.tensor(values)
    mean = mean_of(State({"w": torch.zeros_like(weights)}), *(message(n, w=weights) for n in samples))
    assert torch.equal(mean["w"], weights)


def test_averaging_changes_neither_the_server_nor_the_messages() -> None:
    server, sent = torch.tensor([5.0]), torch.tensor([1.0])
    mean_of(State({"w": server}), message(2, w=sent), message(3, w=sent))
    assert (server.tolist(), sent.tolist()) == ([5.0], [1.0])


def test_the_client_half_trains_what_was_sent_and_sends_it_back(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    method = FedAvg(FedAvgParams(), make_context(epochs=2))
    server = method.initial_state(tiny_net.initial_weights())
    down = method.message_to_client(server, round=1, client=4, last_round=None)
    work = method.client_update(ClientRoundInput(1, 4, down, base_weights={}, client_state=None, shard=NO_IMAGES))
    training = next(work)
    assert training.epochs == 2
    assert not training.constants, "a step that needs what was received says so"
    assert set(training.weights) == set(tiny_net.parts.shapes)
    assert all(torch.equal(weight, server.tensors[name]) for name, weight in training.weights.items())
    result = make_trainer(epochs=2).train(training, make_shard(0, 15), RngContext(0, 1, 4))
    answer = finish(work, result)
    assert answer.client_state is None
    assert answer.message.numbers == {"samples": 15, "loss": float(result.loss)}
    assert set(answer.message.tensors) == set(tiny_net.parts.shapes)
    assert all(torch.equal(answer.message.tensors[name], result.weights[name]) for name in result.weights)


def test_a_round_is_the_weighted_mean_of_clients_trained_alone(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    method = FedAvg(FedAvgParams(), make_context())
    trainer = make_trainer(batch_size=8)
    server = method.initial_state(tiny_net.initial_weights())
    gathering = method.aggregator(server, round=1)
    shards = {0: make_shard(0, 5), 1: make_shard(5, 5), 2: make_shard(5, 30)}
    alone = {}
    for client, shard in shards.items():
        training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, epochs=1)
        alone[client] = trainer.train(training, shard, RngContext(0, 1, client)).weights
        down = method.message_to_client(server, round=1, client=client, last_round=None)
        work = method.client_update(
            ClientRoundInput(1, client, down, base_weights={}, client_state=None, shard=NO_IMAGES)
        )
        gathering.add(client, finish(work, trainer.train(next(work), shard, RngContext(0, 1, client))).message)
    after = gathering.finish()
    for name in tiny_net.parts.shapes:
        expected = 5 / 30 * alone[0][name].double() + 25 / 30 * alone[2][name].double()
        torch.testing.assert_close(after.tensors[name].double(), expected, rtol=0, atol=1e-7)
    model = method.model_weights(after, {}, None)
    assert all(torch.equal(model[name], after.tensors[name]) for name in tiny_net.parts.shapes)


def test_the_whole_model_trains_and_nothing_is_left_to_give_once(tiny_net: Net, make_context: MakeContext) -> None:
    method = FedAvg(FedAvgParams(), make_context())
    assert tuple(method.trainable) == tuple(tiny_net.parts.shapes)
    assert not method.initial_broadcast(tiny_net.initial_weights()).tensors
    assert method.has_global_model


@pytest.mark.parametrize(
    ("tensors", "samples", "reason"),
    [
        ({"w": torch.zeros(3)}, -1, "number of samples is -1"),
        ({"w": torch.zeros(3)}, 1.5, r"number of samples is 1\.5"),
        ({"w": torch.zeros(3), "x": torch.zeros(1)}, 2, "its weight 'x' is not part of the model"),
        ({"w": torch.zeros(4)}, 2, r"'w' is torch.float32 \(4,\); expected: torch.float32 \(3,\)"),
        ({"w": torch.zeros(3, dtype=torch.float64)}, 2, "float64"),
        ({"w": torch.tensor([1.0, float("nan"), 0.0])}, 2, "not finite"),
        ({"w": torch.tensor([1.0, float("inf"), 0.0])}, 2, "not finite"),
    ],
)
def test_unsound_weights_are_refused_and_leave_no_trace(
    tensors: dict[str, Tensor], samples: float, reason: str
) -> None:
    mean = WeightedMean(State({"w": torch.ones(3), "b": torch.ones(1)}))
    mean.add(0, Message({"w": torch.full((3,), 5.0)}, {"samples": 4, "loss": 1.0}))
    with pytest.raises(RejectedUpdateError, match=reason):
        mean.add(1, Message({"b": torch.full((1,), 9.0), **tensors}, {"samples": samples, "loss": 1.0}))
    after = mean.finish().tensors
    assert torch.equal(after["w"], torch.full((3,), 5.0))
    assert torch.equal(after["b"], torch.ones(1))
