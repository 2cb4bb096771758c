"""The models of a run: complete in its folder, each part stored once, whatever the method."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitfleet
from conftest import MakeConfig
from vitfleet.config.schema import Config
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import UserError
from vitfleet.inference.stored_models import load_model_file
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run

TASKS = ("data.tasks.count=2", "data.tasks.classes=2", "data.tasks.rounds_per_task=1", "data.tasks.per_client=[2,2]")
PERSONAL = {
    "eftvit": ("method.local_layers=1", "train.mask_ratio=0.5", "rounds=1"),
    "fedvit": ("method.k=1", "method.head_epochs=1", "train.epochs=2", "rounds=2", *TASKS),
    "fedrep": ("train.epochs=2", "rounds=1"),
    "standalone": ("rounds=1",),
}


def finish(config: Config, folder: Path) -> vitfleet.Run:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.model_dump_json())
    run_rounds(open_run(config, folder))
    return vitfleet.load_run(folder)


PREDICT = """
import json, sys, torch, vitfleet
logits = {}
for method, client in json.loads(sys.argv[1]):
    run = vitfleet.load_run(f"{sys.argv[2]}/{method}")
    images = torch.load(f"{sys.argv[3]}/{method}.pt")
    with torch.inference_mode():
        logits[method, client] = run.model(client)(images)
torch.save(logits, sys.argv[4])
"""


def test_personal_models_predict_in_a_new_process_after_the_folders_were_moved(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Logits of a client equal those of the model with which the run evaluated it."""
    expected: dict[tuple[str, int], torch.Tensor] = {}
    for method, keys in PERSONAL.items():
        config = tiny_config(f"method.name={method}", *keys, "fleet.clients=3", "fleet.per_round=2")
        folder = tmp_path / "runs" / method
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config.model_dump_json())
        context = open_run(config, folder)
        state = run_rounds(context).state
        images = context.data.test.images[:20]
        torch.save(images, tmp_path / f"{method}.pt")
        for client in sorted(state.last_seen)[:2]:
            own = context.fleet.client_state(client)
            weights = context.method.model_weights(state.server, context.base.tensors, own)
            expected[method, client] = context.net(weights, context.trainer.preprocess(images))
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "runs", moved)
    arguments = [json.dumps(list(expected)), str(moved), str(tmp_path), str(tmp_path / "logits.pt")]
    subprocess.run([sys.executable, "-c", PREDICT, *arguments], check=True)
    found = torch.load(tmp_path / "logits.pt")
    for key, logits in expected.items():
        torch.testing.assert_close(found[key], logits)
    for method in PERSONAL:
        first, second = (logits for key, logits in found.items() if key[0] == method)
        assert not torch.allclose(first, second)


def test_eftvits_server_model_has_the_mean_of_the_local_modules(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run = finish(tiny_config("method.name=eftvit", *PERSONAL["eftvit"], "rounds=2"), tmp_path / "run")
    trained = sorted({int(client) for client in run.clients["client"]})
    models = [run.model(client).state_dict() for client in trained]
    server = run.model().state_dict()
    expected = torch.stack([model["vit.blocks.0.mlp.fc1.weight"] for model in models]).mean(dim=0)
    torch.testing.assert_close(server["vit.blocks.0.mlp.fc1.weight"], expected)
    for name in ("vit.blocks.1.mlp.fc1.weight", "vit.head.weight"):
        assert torch.equal(server[name], models[0][name])
    data = load_dataset(run.config.data)
    with torch.inference_mode():
        correct = (run.model()(data.test.images).argmax(dim=1) == data.test.labels).float().mean()
    assert run.summary["server_model"]["averaged_clients"] == len(trained)
    assert run.summary["server_model"]["accuracy"] == pytest.approx(float(correct))


def test_the_server_model_of_a_method_with_local_heads_has_the_servers_body(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    run = finish(tiny_config("method.name=fedper"), tmp_path / "run")
    server, states = run.model().state_dict(), load_file(next((run.path / "checkpoint").glob("server-*")))
    assert all(torch.equal(server[f"vit.{name}"], tensor) for name, tensor in states.items())
    heads = [run.model(int(client)).state_dict()["vit.head.weight"] for client in sorted(set(run.clients["client"]))]
    torch.testing.assert_close(server["vit.head.weight"], torch.stack(heads).mean(dim=0))


@pytest.mark.long
def test_a_hundred_clients_take_the_global_module_and_a_hundred_local_modules(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    config = tiny_config(
        "method.name=eftvit", "fleet.clients=100", "fleet.per_round=100", "rounds=1", "model.depth=6", "data.limit=600",
        "data.partition.kind=iid", *PERSONAL["eftvit"],
    )  # fmt: skip
    run = finish(config, tmp_path / "run")
    states = list((run.path / "checkpoint").glob("client-*"))
    whole, local = ((run.path / name).stat().st_size for name in ("model.safetensors", "base.safetensors"))
    stored = sum(path.stat().st_size for path in [*states, *(run.path / "checkpoint").glob("server-*")])
    assert len(states) == 100
    assert local < whole / 3
    assert stored <= whole + 100 * local
    assert run.model(99).state_dict()["vit.head.weight"].shape == (10, 16)


def test_models_do_not_need_the_file_of_the_initial_weights(tiny_config: MakeConfig, tmp_path: Path) -> None:
    source = finish(tiny_config("rounds=1"), tmp_path / "first")
    weights = tmp_path / "initial.safetensors"
    save_file(load_file(source.path / "model.safetensors"), weights)
    run = finish(tiny_config("rounds=1", "method.name=fed-head", f"model.weights={weights}"), tmp_path / "run")
    before = run.model().state_dict()
    weights.unlink()
    after = run.model().state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    name = "blocks.1.mlp.fc1.weight"  # frozen: as in the first run's model
    assert torch.equal(after[f"vit.{name}"], load_file(source.path / "model.safetensors")[name])


ADAPTED = {
    "fed-prompt": (),
    "fed-lora": (),
    "dytox": ("rounds=2", *TASKS),
    "lvt": ("rounds=2", *TASKS, "method.heads=shared"),
}


@pytest.mark.parametrize("method", ADAPTED)
def test_a_model_file_is_used_as_the_run_measured_it(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    """What a method adds to the architecture takes part in the forward pass."""
    config = tiny_config(f"method.name={method}", "train.lr=1e-2", *ADAPTED[method])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(config.model_dump_json())
    context = open_run(config, tmp_path / "run")
    state = run_rounds(context).state
    images = context.data.test.images[:30]
    weights = context.method.model_weights(state.server, context.base.tensors, None)
    expected = context.net(weights, context.trainer.preprocess(images))
    run, path = vitfleet.load_run(tmp_path / "run"), tmp_path / "run" / "model.safetensors"
    if context.method.has_global_model:
        torch.testing.assert_close(load_model_file(path)(images), expected)
    torch.testing.assert_close(run.model()(images), load_model_file(path)(images))


def test_files_that_are_not_models_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"other.safetensors: is not a model file of vitfleet"):
        load_model_file(tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="no such file"):
        load_model_file(tmp_path / "none.safetensors")
