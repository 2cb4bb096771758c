"""EFTViT: the split, the recording, the message, the store and the server's training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conftest import InterruptAfter, MakeConfig, context_of
from vitfleet.config import load_config
from vitfleet.config.schema import ModelConfig
from vitfleet.data.batches import Batch
from vitfleet.data.features import FeatureBlock, FeatureLoader, Features, FeatureSet, dequantize, quantize
from vitfleet.errors import ConfigError, UserError
from vitfleet.fleet.base import Request
from vitfleet.message import Message, State
from vitfleet.methods import MethodContext
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.methods.split.eftvit import EftVit, EftVitParams
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.wire import encoded_size

CPU = torch.device("cpu")


def setting_of(net: Net, **train: Any) -> MethodContext:
    return context_of(net, train, num_classes=100)


@pytest.fixture(scope="module")
def vit_b() -> Net:
    with torch.device("meta"):
        return build_model(ModelConfig(name="vit_base_patch16_224"), 100, 3, 224, 0)


@pytest.fixture
def eftvit_config(tiny_config: MakeConfig) -> MakeConfig:
    common = ("method.name=eftvit", "method.local_layers=1", "model.patch_size=2", "train.mask_ratio=0.5")
    return partial(tiny_config, *common)


@pytest.mark.parametrize(("layers", "millions"), [(1, 7.16), (2, 14.25), (3, 21.34), (4, 28.43), (6, 42.60)])
def test_trainable_parameters_on_the_client_are_the_papers(vit_b: Net, layers: int, millions: float) -> None:
    context = setting_of(vit_b)
    payload = EftVit(EftVitParams(local_layers=layers, train_embedding=False), context)
    count = vit_b.parts.count_parameters(payload.trainable)
    assert count == layers * 7_087_872 + 76_900
    assert round(count / 1e6, 2) == millions
    whole = EftVit(EftVitParams(local_layers=layers), context)
    assert vit_b.parts.count_parameters(whole.trainable) == count + 742_656


@pytest.mark.parametrize(
    ("ratio", "tokens", "gmac"),
    [(0, 197, 17.563), (0.25, 148, 13.061), (0.5, 99, 8.647), (0.6, 79, 6.871), (0.75, 50, 4.322), (0.9, 20, 1.717)],
)
def test_forward_flops_of_masked_images_are_those_of_the_kept_patches(
    vit_b: Net, ratio: float, tokens: int, gmac: float
) -> None:
    weights = {name: torch.empty(shape, device="meta") for name, shape in vit_b.parts.shapes.items()}
    kept = vit_b.num_kept_patches(ratio)
    assert vit_b.num_prefix_tokens + kept == tokens
    keep = torch.empty(1, kept, dtype=torch.long, device="meta") if ratio else None
    with FlopCounterMode(display=False) as counter:
        vit_b(weights, torch.empty(1, 3, 224, 224, device="meta"), keep)
    assert counter.get_total_flops() / 2e9 == pytest.approx(gmac, rel=0.005)


def test_until_and_onward_are_the_model() -> None:
    net = build_model(ModelConfig(dim=16, depth=3, heads=2, patch_size=4), 5, 1, 8, 0)
    weights, images, keep = net.initial_weights(), torch.randn(2, 1, 8, 8), torch.tensor([[0, 2], [3, 1]])
    for block in (1, 2):
        features = net.forward_to(weights, images, keep, block)
        assert features.shape == (2, 3, 16)
        assert torch.equal(net.forward_from(weights, features, block), net(weights, images, keep))


def play(context: RunContext, rounds: int) -> tuple[State, list[RoundRecord]]:
    state, records = load_state(context), []
    for round in range(1, rounds + 1):
        state, record = run_round(context, state, round)
        records.append(record)
    return state.server, records


def test_the_frozen_global_module_is_bit_identical_after_client_training(
    eftvit_config: MakeConfig, tmp_path: Path
) -> None:
    context = open_run(eftvit_config(), tmp_path)
    method = context.method
    assert isinstance(method, EftVit)
    down = method.message_to_client(load_state(context).server, 1, 0, None)
    before = {name: tensor.clone() for name, tensor in down.tensors.items()}
    client = max(range(6), key=lambda one: len(context.partition.train.for_client(one)))
    reply = next(context.fleet.train([Request(1, client, down)]))
    context.fleet.commit([client])
    assert reply.message is not None
    for name in method.global_module:
        assert torch.equal(down.tensors[name], before[name])
    assert set(reply.message.tensors) == {"features", "labels"}, "no weights leave the client"
    own = context.fleet.client_state(client)
    assert own is not None
    assert set(own.tensors) == set(method.local_module)
    moved = [n for n in method.local_module if not torch.equal(own.tensors[n], context.base.tensors[n])]
    assert len(moved) >= len(method.local_module) - 1  # but for the keys' bias, which has no gradient


@pytest.mark.parametrize("values", ["fp32", "bf16", "fp16", "int8"])
def test_what_is_sent_is_what_the_local_module_made_balanced_over_classes(
    eftvit_config: MakeConfig, tmp_path: Path, values: str
) -> None:
    # A rate of next to nothing: features can be made again from the initial weights.
    config = eftvit_config(f"method.feature_dtype={values}", "train.lr=1e-12", "train.mask_ratio=0", "train.epochs=2")
    context = open_run(config, tmp_path)
    client = max(range(6), key=lambda one: len(context.partition.train.for_client(one)))
    index = torch.from_numpy(context.partition.train.for_client(client))
    server = load_state(context).server
    reply = next(context.fleet.train([Request(1, client, context.method.message_to_client(server, 1, client, None))]))
    assert reply.message is not None
    labels = reply.message.tensors["labels"]
    counts = torch.bincount(labels.long())
    assert len(set(counts[counts > 0].tolist())) == 1
    images = context.trainer.preprocess(context.data.train.images[index])
    made = context.net.forward_to({**context.base.tensors, **server.tensors}, images, None, 1)
    sent = dequantize(reply.message.tensors["features"], reply.message.tensors.get("scales"))
    tolerance = {"fp32": 1e-5, "bf16": 0.02, "fp16": 2e-3, "int8": 0.02}[values]
    for row, label in zip(sent, labels.tolist(), strict=True):
        same = context.data.train.labels[index] == label
        assert (made[same] - row).abs().amax(dim=(1, 2)).min() < tolerance


def test_the_store_keeps_each_clients_latest_and_the_server_trains_on_all(
    eftvit_config: MakeConfig, tmp_path: Path
) -> None:
    context = open_run(eftvit_config(), tmp_path)
    before = dict(load_state(context).server.tensors)
    server, (first, second) = play(context, 2)
    seen = {entry.client for record in (first, second) for entry in record.clients if entry.numbers["samples"]}
    assert set(server.parts) == {f"features-{client:06d}" for client in seen}
    assert all(not torch.equal(server.tensors[name], before[name]) for name in ("head.weight", "norm.weight"))

    only = open_run(eftvit_config("method.store=latest-round"), tmp_path / "latest")
    server, (_, last) = play(only, 2)
    assert set(server.parts) == {f"features-{e.client:06d}" for e in last.clients if e.numbers["samples"]}


def test_the_servers_training_does_not_depend_on_where_its_store_lies(
    eftvit_config: MakeConfig, tmp_path: Path
) -> None:
    states = []
    for place in ("device", "host"):
        context = open_run(eftvit_config(f"method.store_on={place}", "method.feature_dtype=int8"), tmp_path / place)
        server, _ = play(context, 2)
        states.append(server.tensors)
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def made_parts(sizes: Sequence[int], seed: int = 0) -> list[Features]:
    random = torch.Generator().manual_seed(seed)
    parts = []
    for size in sizes:
        values, scales = quantize(torch.randn(size, 2, 5, generator=random))
        parts.append(Features(values, torch.randint(0, 9, (size,), generator=random).to(torch.int16), scales))
    return parts


def batch_of(indices: torch.Tensor, weights: torch.Tensor | None = None) -> Batch:
    even = torch.full(indices.shape, 1 / indices.shape[-1])
    return Batch(indices, indices, even if weights is None else weights, torch.ones(indices.shape[:-1]))


def test_feature_loader_reads_the_same_batches_from_the_block_and_from_the_parts() -> None:
    parts = made_parts((3, 1, 4))
    loaders = [FeatureLoader(FeatureSet(parts, on_device=resident), CPU, FeatureBlock()) for resident in (True, False)]
    batch = batch_of(torch.tensor([[7, 0, 3], [2, 4, 4]]))
    in_block, in_parts = (loader.complete(batch) for loader in loaders)
    for left, right in zip(in_block.tensors(), in_parts.tensors(), strict=True):
        assert torch.equal(left, right)
    together = torch.cat([dequantize(part.values, part.scales) for part in parts])
    assert in_block.features is not None
    assert torch.equal(dequantize(in_block.features, in_block.scales), together[batch.image_indices])


def test_feature_block_copies_only_new_parts_and_holds_every_part_after_any_replacement() -> None:
    random = torch.Generator().manual_seed(1)
    block, parts = FeatureBlock(), {}
    copied: list[int] = []
    for load in range(40):
        for client in torch.randint(0, 8, (2,), generator=random).tolist():
            size = int(torch.randint(1, 7, (1,), generator=random))
            (parts[client],) = made_parts((size,), seed=100 * load + client)
        held = block.load([parts[client] for client in sorted(parts)])[0].values.data_ptr() if load % 2 else None
        rows, index = block.load([parts[client] for client in sorted(parts)])
        assert held in (None, rows.values.data_ptr()), "a load without new parts allocates nothing"
        expected = torch.cat([parts[client].values for client in sorted(parts)])
        assert torch.equal(rows.values[index], expected)
        assert torch.equal(rows.labels[index], torch.cat([parts[client].labels for client in sorted(parts)]))
        copied.append(len(rows))
    assert len(set(copied)) < 15, "the block grows by more than what is added, so that it rarely has to"


def test_every_client_counts_the_same_or_every_sample() -> None:
    parts = [Features(torch.zeros(size, 1, 2), torch.zeros(size, dtype=torch.int16)) for size in (1, 3)]
    order, padded = torch.tensor([0, 1, 2, 3]), torch.tensor([0.5, 0.5, 0, 0])

    def weights(batch: Batch, equal_clients: bool) -> torch.Tensor:
        features = FeatureSet(parts, on_device=True, equal_clients=equal_clients)
        return FeatureLoader(features, CPU, FeatureBlock()).complete(batch).sample_weight

    torch.testing.assert_close(weights(batch_of(order), True), torch.tensor([3.0, 1, 1, 1]) / 6)
    torch.testing.assert_close(weights(batch_of(order), False), torch.full((4,), 0.25))
    torch.testing.assert_close(weights(batch_of(order, padded), False), padded)


def test_a_store_on_disk_is_read_from_the_checkpoint(eftvit_config: MakeConfig, tmp_path: Path) -> None:
    context = open_run(eftvit_config("method.store_on=disk", "rounds=2"), tmp_path)
    server = run_rounds(context).state.server
    partition_io = context.checkpoints.latest
    assert partition_io is not None
    assert partition_io.parts
    for key, name in partition_io.parts.items():
        part = server.parts[key].tensors["features"]
        path = str(tmp_path / "checkpoint" / name)
        # The tensor's memory is the file: Linux lists it among the process's mappings.
        start = part.untyped_storage().data_ptr()
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
        spans = [[int(end, 16) for end in line[0].split("-")] for line in lines]
        assert any(low <= start < high for low, high in spans)


def test_int8_is_within_half_a_unit_and_zeros_stay() -> None:
    tokens = torch.randn(4, 3, 16) * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    tokens[0, 0] = 0
    values, scales = quantize(tokens)
    error = (values.float() * scales[..., None] - tokens).abs()
    assert (error <= scales[..., None] * 0.5 * 1.001).all()
    assert not values[0, 0].any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"features": torch.full((4, 5, 8), float("nan"))}, "not finite"),
        ({"features": torch.zeros(4, 5, 9)}, "shape"),
        ({"features": torch.zeros(4, 6, 8)}, "shape"),
        ({"features": torch.zeros(3, 5, 8)}, "shape"),
        ({"features": torch.zeros(4, 5, 8, dtype=torch.float64)}, "float64"),
        ({"labels": torch.tensor([0, 1, 2, 5], dtype=torch.int16)}, "labels"),
        ({"labels": torch.tensor([0, -1, 2, 3], dtype=torch.int16)}, "labels"),
    ],
)
def test_unsound_features_are_refused(change: dict[str, torch.Tensor], reason: str) -> None:
    net = build_model(ModelConfig(dim=8, depth=2, heads=2, patch_size=4), 5, 1, 8, 0)
    method = EftVit(EftVitParams(local_layers=1, feature_dtype="fp32"), context_of(net))
    sound = {"features": torch.zeros(4, 5, 8), "labels": torch.tensor([0, 1, 2, 4], dtype=torch.int16)}
    gathering = method.aggregator(State(), 1)
    gathering.add(0, Message(sound, {"samples": 4}))
    with pytest.raises(RejectedUpdateError, match=reason):
        gathering.add(1, Message({**sound, **change}, {"samples": 4}))
    assert set(gathering.finish().parts) == {"features-000000"}


def test_a_refused_message_is_named_and_counted_and_the_round_goes_on(
    eftvit_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = open_run(eftvit_config(), tmp_path)
    real = context.fleet.train

    def poisoned(requests: Any) -> Any:
        for position, reply in enumerate(real(requests)):
            if position == 0 and reply.message is not None:
                bad = {**reply.message.tensors, "labels": reply.message.tensors["labels"] + 100}
                yield type(reply)(reply.client, Message(bad, reply.message.numbers), reply.evaluation)
            else:
                yield reply

    monkeypatch.setattr(context.fleet, "train", poisoned)
    state, record = run_round(context, load_state(context), 1)
    failures = [entry.failure for entry in record.clients]
    assert failures[0] == "its labels are not all between 0 and 9"
    assert failures[1:] == [None, None]
    assert f"features-{record.clients[0].client:06d}" not in state.server.parts
    assert len(state.server.parts) == 2


@pytest.mark.parametrize("store_on", ["device", "host", "disk"])
def test_store_and_local_modules_survive_a_restart_bit_for_bit(
    eftvit_config: MakeConfig, tmp_path: Path, store_on: str
) -> None:
    config = eftvit_config("rounds=4", f"method.store_on={store_on}")
    (tmp_path / "whole").mkdir()
    (tmp_path / "parted").mkdir()
    run_rounds(open_run(config, tmp_path / "whole"))
    for stop in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            run_rounds(open_run(config, tmp_path / "parted"), callbacks=[InterruptAfter(stop)])
    run_rounds(open_run(config, tmp_path / "parted"))
    left, correct = ((tmp_path / name / "records.jsonl").read_bytes() for name in ("whole", "parted"))
    assert left == correct
    manifests = [json.loads((tmp_path / n / "checkpoint" / "checkpoint.json").read_text()) for n in ("whole", "parted")]
    for partition_io in manifests:
        del partition_io["timings_length"]  # the clock's digits
    assert manifests[0] == manifests[1]
    for name in [manifests[0]["server"], *manifests[0]["parts"].values(), *manifests[0]["clients"].values()]:
        files = [(tmp_path / run / "checkpoint" / name).read_bytes() for run in ("whole", "parted")]
        assert files[0] == files[1], name


@pytest.mark.parametrize(("values", "mebibytes"), [("bf16", 15.3), ("int8", 7.8), ("fp32", 30.0)])
def test_the_upload_of_the_papers_typical_client(values: str, mebibytes: float) -> None:
    dtype = {"bf16": torch.bfloat16, "int8": torch.int8, "fp32": torch.float32}[values]
    tensors = {
        "features": torch.empty(203, 50, 768, dtype=dtype, device="meta"),
        "labels": torch.empty(203, dtype=torch.int16, device="meta"),
    }
    if values == "int8":
        tensors["scales"] = torch.empty(203, 50, device="meta")
    size = encoded_size(Message(tensors, {"samples": 500, "loss": 1.2345678901234567})) / 2**20
    assert size <= mebibytes


def test_accuracy_is_the_mean_over_clients_and_unseen_clients_share_one_model(
    eftvit_config: MakeConfig, tmp_path: Path
) -> None:
    context = open_run(eftvit_config("fleet.clients=6", "fleet.per_round=2"), tmp_path)
    state, record = run_round(context, load_state(context), 1)
    assert record.accuracy is not None
    assert record.accuracy.models == 6
    by_hand = [
        context.evaluator.evaluate(
            context.method.model_weights(state.server, context.base.tensors, context.fleet.client_state(client))
        )
        for client in range(6)
    ]
    assert record.accuracy.global_ == pytest.approx(sum(float(correct.mean()) for correct, _ in by_hand) / 6)


def test_the_local_module_must_leave_a_layer_to_the_global_one() -> None:
    with pytest.raises(UserError, match=r"method\.local_layers = 4: must be between 1 and 3"):
        load_config("eftvit-digits", ["method.local_layers=4"])
    net = build_model(load_config("eftvit-digits").model, 10, 1, 8, 0)
    with pytest.raises(ConfigError, match=r"method\.local_layers = 4: must be between 1 and 3"):
        EftVit(EftVitParams(local_layers=4), setting_of(net))
