"""Estimates of a run: closed forms of its operations, sizes of data sets, free memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from made_photos import draw_photos, make_run
from vitfleet.config import load_config
from vitfleet.config.schema import Config, DataConfig
from vitfleet.costs.dataset_size import DATASET_SIZES, DatasetSize, known_size
from vitfleet.costs.estimate import (
    PROCESS_SECONDS,
    REPORT_SECONDS,
    RunEstimate,
    _free_memory,
    available,
    combine,
    estimate_run,
)
from vitfleet.costs.flops import full_flops
from vitfleet.costs.report import cost_net, typical_labels
from vitfleet.costs.speed import SpeedRequest, measure_speed, product_speed
from vitfleet.data.sources.load import load_dataset


def flops_of(config: Config) -> float:
    """Return the operations that an estimate counts: what a slower machine takes longer for."""
    slow, fast = estimate_run(config, speed=lambda _: 1e6), estimate_run(config, speed=lambda _: 2e6)
    assert slow is not None
    assert fast is not None
    return (slow.seconds - fast.seconds) * 2e6


def test_operations_of_fedavg_are_those_of_its_epochs_and_evaluations() -> None:
    config = load_config("digits", ["rounds=4", "train.epochs=3", "eval.every=2", "data.partition.kind=iid"])
    size = DATASET_SIZES["digits"]
    flops = full_flops(cost_net(config, size))
    clients, asked, images = config.fleet.clients, config.fleet.per_round, round(size.samples / config.fleet.clients)
    training = 4 * asked * 3 * images * flops.training
    evaluation = (4 / 2 * size.test_samples + 4 * asked * size.test_samples / clients) * flops.forward
    assert flops_of(config) == pytest.approx(training + evaluation, rel=1e-6)


def test_all_images_of_a_servers_folder_are_test_images(tmp_path: Path) -> None:
    for common in ("photos", "held/test"):
        draw_photos(tmp_path / common, ("sea", "grass"), 5)
        config = DataConfig(name="mine", path=str(tmp_path / common.partition("/")[0]), test_only=True)
        size, loaded = known_size(config), DatasetSize.of(load_dataset(config))
        assert size is not None
        assert (size.image_size, size.test_samples) == (loaded.image_size, loaded.test_samples) == (16, 10)


def test_a_server_of_remote_clients_only_evaluates_its_model() -> None:
    remote = ["rounds=4", "eval.every=2", "fleet.kind=flower"]
    size = DATASET_SIZES["digits"]
    config = load_config("digits", remote)
    forward = full_flops(cost_net(config, size)).forward
    assert flops_of(config) == pytest.approx(4 / 2 * size.test_samples * forward, rel=1e-6)
    assert flops_of(load_config("digits", [*remote, "method.name=standalone"])) == 0
    here = estimate_run(load_config("digits", ["rounds=4", "method.name=standalone"]), speed=lambda _: 1e9)
    there = estimate_run(load_config("digits", [*remote, "method.name=standalone"]), speed=lambda _: 1e9)
    assert here is not None
    assert there is not None
    assert there.disk_bytes < here.disk_bytes  # clients keep their own models
    assert there.memory_bytes < here.memory_bytes


def test_training_of_eftvits_server_grows_with_its_epochs_and_views() -> None:
    base = ["method.server_epochs=2", "train.epochs=4"]
    one, twice, more = (
        flops_of(load_config("start-eftvit", [*base, *own]))
        for own in ([], ["method.server_epochs=4"], ["method.views=4"])
    )
    assert more - one == pytest.approx(3 * (twice - one), rel=1e-3)
    assert twice > one


def test_rounds_on_tasks_take_the_images_that_clients_draw() -> None:
    """Each client has both classes of a task and a tenth of their images; it is measured on all their test images."""
    stream = ["rounds=10", "data.tasks.count=5", "data.tasks.classes=2", "data.tasks.per_client=[2, 2]"]
    config = load_config("digits", [*stream, "data.tasks.rounds_per_task=2", "data.tasks.share=[0.1, 0.1]"])
    size, fleet = DATASET_SIZES["digits"], config.fleet
    flops = full_flops(cost_net(config, size))
    images = np.mean([len(labels) for labels in typical_labels(config, size)])
    assert images == pytest.approx(0.1 * size.samples / 5, rel=0.1)
    training = 10 * fleet.asked * config.train.epochs * round(images) * flops.training
    measured = 10 * fleet.asked + 5 * fleet.clients * (5 + 1) / 2  # in every round; after every task, on those so far
    evaluation = measured * size.test_samples / 5 * flops.forward
    assert flops_of(config) == pytest.approx(training + evaluation, rel=1e-6)


def test_joint_training_takes_the_images_of_all_tasks_so_far() -> None:
    stream = ["rounds=6", "data.tasks={count = 3, classes = 3, rounds_per_task = 2, per_client = [3, 3]}"]
    one, joint = (load_config("digits", [*stream, f"method.name={name}"]) for name in ("fedper", "joint"))
    counts = [len(labels) for labels in typical_labels(one, DATASET_SIZES["digits"])]
    more = round(np.mean(np.cumsum(counts))) - round(np.mean(counts))  # the evaluations are the same
    training = full_flops(cost_net(one, DATASET_SIZES["digits"])).training
    expected = 6 * one.fleet.asked * one.train.epochs * more * training
    assert flops_of(joint) - flops_of(one) == pytest.approx(expected, rel=1e-6)


def test_stacked_clients_are_not_faster_on_a_cpu() -> None:
    at_once = []

    def speed(request: SpeedRequest) -> float:
        at_once.append(request.clients_at_once)
        return 1e9

    for stack_size in (1, 5):
        estimate_run(
            load_config("digits", ["machine.device=cpu", "machine.workers=2", f"machine.stack_size={stack_size}"]),
            speed=speed,
        )
    assert at_once == [2, 2]


def test_speed_is_measured_where_none_is_given() -> None:
    estimate = estimate_run(load_config("digits"))
    assert estimate is not None
    assert estimate.seconds > 2
    assert estimate.device in {"cpu", "cuda"}


def test_a_large_model_is_timed_on_the_runs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a GPU that the run does not use
    timed = []

    def seconds(action: object, device: torch.device) -> float:
        timed.append(device.type)
        return 1.0

    monkeypatch.setattr("vitfleet.costs.speed._seconds", seconds)
    monkeypatch.setattr(
        "vitfleet.costs.speed.product_speed", product_speed.__wrapped__
    )  # what it tells here is not kept

    def speed(request: SpeedRequest) -> float:
        return measure_speed(replace(request, flops_per_sample=10**12))

    assert estimate_run(load_config("digits", ["machine.device=cpu"]), speed=speed) is not None
    assert timed == ["cpu"]


def test_folder_of_a_run_is_about_as_large_as_estimated(tmp_path: Path) -> None:
    overrides = ("rounds=2", "model.dim=128", "model.depth=1", "data.limit=30", "fleet.devices={}")
    for method in ("fedavg", "standalone"):  # clients of the second keep their models
        config = load_config("digits", [*overrides, f"method.name={method}"])
        estimate = estimate_run(config, speed=lambda _: 1e9)
        run = make_run(tmp_path / method, *overrides, f"method.name={method}")
        size = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
        assert estimate is not None
        assert 1 / 2 < estimate.disk_bytes / size < 2


def test_sizes_of_an_image_folder_are_those_of_the_loaded_data(tmp_path: Path) -> None:
    draw_photos(tmp_path, ("a", "b", "c"), per_class=10)
    for keys in ({}, {"limit": 12}, {"validation": 0.25}):
        config = DataConfig.model_validate({"name": "mine", "path": str(tmp_path), **keys})
        assert known_size(config) == DatasetSize.of(load_dataset(config))


def test_sizes_of_digits_are_those_of_the_loaded_data() -> None:
    assert known_size(DataConfig()) == DatasetSize.of(load_dataset(DataConfig()))


def test_sizes_are_unknown_where_images_would_have_to_be_decoded(tmp_path: Path) -> None:
    assert known_size(DataConfig(name="hf:owner/name")) is None
    assert known_size(DataConfig(name="mine", path=str(tmp_path / "absent"))) is None
    assert estimate_run(load_config("digits", ["data.name=hf:owner/name"])) is None


def test_many_patches_of_large_images_are_remarked_on_with_the_keys(tmp_path: Path) -> None:
    draw_photos(tmp_path, ("sea", "grass"), size=(130, 100))
    photos = ["fleet.clients=2", "fleet.per_round=2", f"data.path={tmp_path}"]

    def remark(*overrides: str) -> str:
        estimate = estimate_run(load_config("digits", [*photos, *overrides]), speed=lambda _: 1e9)
        assert estimate is not None
        assert combine([RunEstimate(1, 1, 1), estimate]).remark == estimate.remark
        return estimate.remark

    slow = remark()
    assert "100 x 100 pixels in 625 patches" in slow  # (100 / 4)²
    advised = re.findall(r"-o (\S+)", slow)
    assert advised == ["model.image_size=64", "model.patch_size=8"]
    assert remark(*advised) == ""
    assert remark("model.image_size=100") == ""  # chosen, so it is known
    assert remark("model.patch_size=10") == ""
    assert f"makes {(64 // 8) ** 2} patches" in slow


def test_runs_at_a_time_need_memory_together_and_disk_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    runs = [RunEstimate(10, 1, 5), RunEstimate(20, 4, 6), RunEstimate(30, 2, 7)]
    page, start = REPORT_SECONDS, PROCESS_SECONDS
    assert combine(runs) == RunEstimate(60 + page, 4, 18)
    # The third run follows the first one: 10 and 30 s, beside 20 s.
    assert combine(runs, jobs=2) == RunEstimate(40 + 2 * start + page, 6, 18)
    assert combine(runs, jobs=8) == RunEstimate(40 + 2 * start + page, 7, 18)
    on_both_cores = [replace(run, cores=2) for run in runs]  # two at a time would have one each
    assert combine(on_both_cores, jobs=2) == RunEstimate(60 + 3 * start + page, 6, 18, cores=2)
    on_a_gpu = [replace(run, device="cuda") for run in runs]
    assert combine(on_a_gpu, jobs=2) == RunEstimate(60 + 3 * start + page, 6, 18, "cuda")


def test_free_memory_is_the_smaller_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert _free_memory(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal: 999 kB\nMemAvailable:     300 kB\n")
    assert _free_memory(meminfo, tmp_path) == 300 * 1024
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _free_memory(meminfo, tmp_path) == 300 * 1024
    (tmp_path / "memory.max").write_text("1500\n")
    assert _free_memory(meminfo, tmp_path) == 500
    (tmp_path / "memory.stat").write_text("anon 200\nfile 700\ninactive_file 600\nactive_file 100\n")
    assert _free_memory(meminfo, tmp_path) == 1100  # files that were read are given up


def test_available_space_is_that_of_the_nearest_existing_folder(tmp_path: Path) -> None:
    found = available("cpu", tmp_path / "not" / "there")
    assert found.disk_bytes is not None
    assert found.disk_bytes > 0
