"""What a device may claim: its weight, its size, its form. One that lies is bounded or refused, and harms no other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fedweit_clients import make_fedweit, random_sparse
from torch import Tensor

from conftest import MakeConfig, MakeContext
from vitfleet.config import load_config
from vitfleet.config.base import AggregationParams
from vitfleet.config.registry import AGGREGATIONS
from vitfleet.errors import ConfigError, UserError
from vitfleet.fleet.base import Reply
from vitfleet.flower.transport.codec import pack_reply, unpack_reply
from vitfleet.message import Message, State
from vitfleet.methods.aggregation.weighted_mean import WeightedMean
from vitfleet.methods.continual.sparse_weights import check_sparse
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.models.net import Net
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run

SERVER = State({"w": torch.zeros(4)})


def params(rule: str = "mean", **keys: object) -> AggregationParams:
    made: AggregationParams = AGGREGATIONS.make_params(rule, **keys)
    return made


def aggregated(
    sent: Mapping[int, tuple[Tensor, int]], config: AggregationParams, before: Mapping[int, int] | None = None
) -> tuple[Tensor, WeightedMean]:
    """Return the aggregate of clients' weights and samples, and the aggregator."""
    aggregator = WeightedMean(SERVER, config)
    aggregator.earlier_samples = before or {}
    for client, (weights, samples) in sent.items():
        aggregator.add(client, Message({"w": weights}, {"samples": samples}))
    return aggregator.finish().tensors["w"], aggregator


HONEST = {client: (torch.ones(4), 10 * (client + 1)) for client in range(4)}  # of 10, 20, 30, 40 samples


# Samples


def test_a_device_counts_with_the_rounds_median_of_samples_at_most() -> None:
    """The median of 10, 20, 30, 40 and 10⁸ is 30."""
    mean, aggregator = aggregated({**HONEST, 4: (torch.full((4,), 1.0), 10**8)}, params(defence="clip"))
    assert torch.equal(mean, torch.ones(4))
    assert aggregator.counted_samples == {3: 30, 4: 30}, "what it counted with is known, for the records"


def test_of_few_replies_the_samples_of_the_round_before_tell() -> None:
    sent = {0: (torch.ones(4), 10), 1: (torch.ones(4), 10**8)}
    _, aggregator = aggregated(sent, params(defence="clip"), before={2: 20, 3: 30})
    assert aggregator.counted_samples == {1: 20}


def test_without_the_defence_samples_count_as_they_are() -> None:
    mean, aggregator = aggregated({**HONEST, 4: (-torch.ones(4), 100)}, params())
    assert torch.equal(mean, torch.zeros(4))
    assert not aggregator.counted_samples


@pytest.mark.parametrize("defence", ["clip", "off"])
def test_weights_may_be_equal(defence: str) -> None:
    sent = {0: (torch.zeros(4), 10), 1: (torch.ones(4), 30)}
    mean, aggregator = aggregated(sent, params(equal_weights=True, defence=defence))
    assert torch.equal(mean, torch.full((4,), 0.5))
    assert not aggregator.counted_samples


def test_the_record_says_with_how_many_samples_a_device_counted(tiny_config: MakeConfig, tmp_path: Path) -> None:
    context = opened(tiny_config("aggregate.defence=clip"), tmp_path)
    state, honest = load_state(context), replies(context)
    lying = Lying(context, honest, samples=10**7)
    _, record = run_round(replace(context, fleet=lying), state, 1)  # type: ignore[arg-type]
    reported = sorted(int(reply.message.numbers["samples"]) for reply in honest[1:] if reply.message is not None)  # type: ignore[arg-type]
    liar = next(entry for entry in record.clients if entry.client == honest[0].client)
    assert liar.numbers["samples"] == 10**7
    assert liar.counted is not None
    assert liar.counted in reported
    assert '"counted":' in record.line()
    plain = replace(record, clients=[replace(entry, counted=None) for entry in record.clients])
    assert '"counted":' not in plain.line(), "records of runs without the defence stay as they were"


# Rules


def test_a_rule_that_can_drop_nobody_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"aggregate\.rule = .trimmed.: needs 10 replies, and fleet\.per_round = 5"):
        load_config("start-fedavg", ["aggregate.rule=trimmed", "aggregate.trim=0.1"])
    load_config("start-fedavg", ["aggregate.rule=trimmed", "aggregate.trim=0.2"])


@pytest.mark.parametrize("rule", ["trimmed", "median", "geometric-median", "multi-krum"])
def test_a_rule_with_too_few_replies_changes_nothing_and_says_so(rule: str) -> None:
    sent = {0: (torch.ones(4), 10), 1: (-torch.ones(4), 10)}
    mean, aggregator = aggregated(sent, params(rule))
    assert torch.equal(mean, torch.zeros(4))
    assert set(aggregator.rejected) == {0, 1}
    assert all(f"aggregate.rule = {rule}" in reason for reason in aggregator.rejected.values())


@pytest.mark.parametrize("rule", ["trimmed", "median", "geometric-median", "multi-krum"])
def test_one_liar_of_five_moves_no_robust_rule(rule: str) -> None:
    random = torch.Generator().manual_seed(0)
    honest = {client: (1 + 0.1 * torch.randn(4, generator=random), 10) for client in range(4)}
    loose = params(rule, max_change=None, max_ratio=None)
    without, _ = aggregated(honest, params("mean"))
    attacked, _ = aggregated({**honest, 4: (torch.full((4,), -1000.0), 10**8)}, loose)
    assert float((attacked - without).norm()) < 0.3


def test_the_geometric_median_is_where_the_distances_have_the_least_sum() -> None:
    random = torch.Generator().manual_seed(1)
    points = torch.randn(7, 4, generator=random)
    found, _ = aggregated({client: (point, 10) for client, point in enumerate(points)}, params("geometric-median"))

    def total(point: Tensor) -> float:
        return float((points - point).norm(dim=1).sum())

    least = total(found)
    for direction in torch.randn(50, 4, generator=random):
        assert least <= total(found + 0.05 * direction) + 1e-4


def test_multi_krum_averages_the_updates_that_are_nearest_to_others() -> None:
    near = {client: (torch.tensor([1.0, 1.0, 1.0, 1.0 + 0.01 * client]), 10) for client in range(4)}
    far = {4: (torch.tensor([1.0, 1.0, -1.0, 1.0]), 10)}
    found, _ = aggregated({**near, **far}, params("multi-krum"))
    assert float(found[2]) == pytest.approx(1.0)


# Form


def opened(config: object, folder: Path) -> RunContext:
    return open_run(config, folder)  # type: ignore[arg-type]


def replies(context: RunContext) -> list[Reply]:
    """Return the honest replies of the first round."""
    recorded: list[Reply] = []

    class Recorder:
        def __getattr__(self, name: str) -> object:
            return getattr(context.fleet, name)

        def train(self, requests: object) -> object:
            for reply in context.fleet.train(requests):  # type: ignore[arg-type]
                recorded.append(reply)
                yield reply

    run_round(replace(context, fleet=Recorder()), load_state(context), 1)  # type: ignore[arg-type]
    return recorded


class Lying:
    """Replies what it was given; the first client's reply is changed."""

    def __init__(
        self, context: RunContext, honest: list[Reply], tensors: Mapping[str, Tensor] | None = None, **numbers: object
    ) -> None:
        self.inner = context.fleet
        first = honest[0]
        assert first.message is not None
        message = Message(
            first.message.tensors if tensors is None else tensors,
            {**first.message.numbers, **numbers},  # type: ignore[dict-item]
        )
        self.replies = [replace(first, message=message), *honest[1:]]

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def train(self, requests: object) -> object:
        list(requests)  # type: ignore[call-overload]
        yield from self.replies

    def commit(self, accepted: object) -> None:
        """Keep no states."""


METHODS = ("fedavg", "fedper", "fed-lora", "transfl", "apfl")
TASKS = "data.tasks={count = 2, classes = 2, rounds_per_task = 2, per_client = [1, 2], share = [0.3, 0.5]}"


def failure_of(
    method: str, config: MakeConfig, folder: Path, change: object, *keys: str, **numbers: object
) -> str | None:
    """Return why a round refuses the first client's reply, whose tensors ``change`` has changed."""
    options = {"transfl": ("method.k=1",), "eftvit": ("method.local_layers=1",), "fedbfpt": ("method.local_layers=2",)}
    context = opened(config(f"method.name={method}", *options.get(method, ()), *keys), folder)
    honest = replies(context)
    message = honest[0].message
    assert message is not None
    tensors = change(dict(message.tensors))  # type: ignore[operator]
    lying = Lying(context, honest, tensors, **numbers)
    _, record = run_round(replace(context, fleet=lying), load_state(context), 1)  # type: ignore[arg-type]
    failures = {entry.client: entry.failure for entry in record.clients}
    assert not any(failure for client, failure in failures.items() if client != honest[0].client)
    return failures[honest[0].client]


def without_last(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    del tensors[max(tensors)]
    return tensors


@pytest.mark.parametrize("method", METHODS)
def test_a_reply_without_one_of_its_tensors_is_refused(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    failure = failure_of(method, tiny_config, tmp_path, without_last)
    assert failure is not None
    assert "is missing" in failure


@pytest.mark.parametrize("method", METHODS)
def test_a_reply_with_samples_and_no_tensors_is_refused(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    assert failure_of(method, tiny_config, tmp_path, lambda tensors: {}) is not None


def test_a_plug_ins_replies_are_checked_too(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """The aggregator of this plug-in checks nothing: what an honest device sends is known all the same."""
    plugin = tmp_path / "trusting.py"
    plugin.write_text(TRUSTING)
    named = f"{plugin}:Trusting"
    assert "is missing" in (failure_of(named, tiny_config, tmp_path / "0", without_last) or "")
    assert failure_of(named, tiny_config, tmp_path / "1", lambda t: {**t, "junk": torch.ones(3)}) is not None
    assert failure_of(named, tiny_config, tmp_path / "2", dict, undeclared=1) is not None
    assert failure_of(named, tiny_config, tmp_path / "3", dict) is None


TRUSTING = '''
from vitfleet import register_method
from vitfleet.config.base import MethodParams
from vitfleet.message import State
from vitfleet.methods.averaging.fedavg import WeightAveraging
from vitfleet.methods.base import Aggregator


class TrustingParams(MethodParams):
    """Takes the last update."""


@register_method("trusting", TrustingParams)
class Trusting(WeightAveraging):
    """Takes the last update."""

    def aggregator(self, server_state, round):
        return Last(server_state)


class Last(Aggregator):
    def __init__(self, server_state):
        self.state = server_state

    def add(self, client, message):
        self.state = State({**self.state.tensors, **message.tensors})

    def finish(self):
        return self.state
'''


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("fedavg", {"undeclared": 1}),
        ("fedavg", {"samples": 0}),
        ("apfl", {"alpha": 7.0}),
        ("transfl", {"layers": [0, 0]}),
        ("fedbfpt", {"layer": 10**8}),
        ("transfl", {"layers": [1.5]}),
        ("transfl", {"gradients": [-1.0, 1.0]}),
    ],
)
def test_impossible_numbers_are_refused(
    method: str, numbers: dict[str, object], tiny_config: MakeConfig, tmp_path: Path
) -> None:
    failure = failure_of(method, tiny_config, tmp_path, dict, **numbers)
    assert failure is not None
    assert next(iter(numbers)) in failure


def test_running_statistics_that_cannot_be_are_refused() -> None:
    server = State(
        {
            "norm.running_mean": torch.zeros(3),
            "norm.running_var": torch.ones(3),
            "norm.num_batches_tracked": torch.tensor(5),
        }
    )
    WeightedMean(server).add(0, Message(server.tensors, {"samples": 1}))
    impossible = {
        "norm.running_var": -torch.ones(3),
        "norm.num_batches_tracked": torch.tensor(-(2**63)),
    }
    for name, tensor in impossible.items():
        with pytest.raises(RejectedUpdateError, match=name):
            WeightedMean(server).add(0, Message({**server.tensors, name: tensor}, {"samples": 1}))


def test_a_reply_of_an_earlier_round_is_refused() -> None:
    reply = Reply(0, Message({"w": torch.ones(2)}, {"samples": 1, "loss": 1.0}))
    assert unpack_reply(pack_reply(reply, 3), 0, 3, 10**6).failure is None
    failure = unpack_reply(pack_reply(reply, 2), 0, 3, 10**6).failure
    assert failure == "its reply is to round 2, not 3"


# FedWEIT


def test_indices_whose_differences_overflow_are_refused() -> None:
    """In int32 −2³¹ − (2³¹ − 1) is 1: the indices seem to rise."""
    indices = torch.tensor([0, 2**31 - 1, -(2**31), 5], dtype=torch.int32)
    with pytest.raises(RejectedUpdateError, match="do not rise"):
        check_sparse({"values": torch.ones(4), "indices": indices}, 10)


def test_empty_vectors_of_others_cost_a_client_nothing(make_context: MakeContext, tiny_net: Net) -> None:
    """A server may claim thousands of other clients with no adaptive weights: none of them becomes a dense model."""
    method = make_fedweit(make_context)
    empty = {"values": torch.zeros(0), "indices": torch.zeros(0, dtype=torch.int32)}
    knowledge = {f"knowledge.{row:04d}.{name}": tensor for row in range(5000) for name, tensor in empty.items()}
    one = {f"knowledge.9999.{name}": tensor for name, tensor in random_sparse(method, 0).tensors().items()}
    received = method.received_knowledge({**knowledge, **one})
    assert [len(vector) for vector in received] == [300]


def test_more_adaptive_weights_than_there_are_clients_are_refused(make_context: MakeContext, tiny_net: Net) -> None:
    method = make_fedweit(make_context)
    clients = method.context.config.fleet.clients
    sparse = random_sparse(method, 0, kept=3).tensors()
    knowledge = {f"knowledge.{row:04d}.{name}": tensor for row in range(clients) for name, tensor in sparse.items()}
    with pytest.raises(UserError, match="adaptive weights of"):
        method.received_knowledge(knowledge)


# EFTViT


def many_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.repeat(100, *[1] * (tensor.dim() - 1)) for name, tensor in tensors.items()}


def test_rows_of_features_are_bounded_by_the_samples(tiny_config: MakeConfig, tmp_path: Path) -> None:
    failure = failure_of("eftvit", tiny_config, tmp_path, many_rows)
    assert failure is not None
    assert "features of" in failure


def test_the_store_of_features_has_a_limit(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("method.name=eftvit", "method.local_layers=1", "method.store_mb=0.01")
    context = opened(config, tmp_path)
    state, record = run_round(context, load_state(context), 1)
    failures = [entry.failure for entry in record.clients if entry.failure is not None]
    assert all("method.store_mb = 0.01" in failure for failure in failures)
    assert 0 < len(failures) < len(record.clients)
    assert sum(part.num_bytes for part in state.server.parts.values()) <= 10_000


def test_features_of_a_device_that_claims_many_images_are_cut(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("method.name=eftvit", "method.local_layers=1", "aggregate.defence=clip")
    context = opened(config, tmp_path)
    honest = replies(context)
    assert honest[0].message is not None
    lying = Lying(context, honest, many_rows(dict(honest[0].message.tensors)), samples=10**8)
    state, record = run_round(replace(context, fleet=lying), load_state(context), 1)  # type: ignore[arg-type]
    assert not any(entry.failure for entry in record.clients)
    rows = {name: len(part.tensors["labels"]) for name, part in state.server.parts.items()}
    liar = rows.pop(f"features-{honest[0].client:06d}")
    assert liar <= 20 * max(rows.values())
