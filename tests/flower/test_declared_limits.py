"""A device owner's limits apply to the work that really runs, as the method declares it."""

from __future__ import annotations

import pytest

from conftest import MakeConfig
from vitfleet.config.schema import Config
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import UserError
from vitfleet.flower.device.checks import check_run, describe_run
from vitfleet.flower.device.limits import ClientLimits
from vitfleet.flower.server.fleet import make_run_spec
from vitfleet.flower.transport.payloads import RunSpec

TASKS = "data.tasks={count=3, classes=3, per_client=[1, 3], rounds_per_task=1}"


def asked_of_a_client(config: Config) -> tuple[Config, RunSpec]:
    """Return what a client receives."""
    spec = make_run_spec(config, load_dataset(config.data), "run")
    return Config.model_validate_json(spec.config), spec


@pytest.fixture
def check(tiny_config: MakeConfig) -> Check:
    return Check(tiny_config)


class Check:
    """Checks the run of a method, with batches of 16 images, against limits."""

    def __init__(self, make_config: MakeConfig) -> None:
        self.make_config = make_config

    def __call__(self, limits: str, *keys: str) -> None:
        check_run(*asked_of_a_client(self.make_config(*keys)), ClientLimits.parse(limits.split()))

    def refusal(self, limits: str, *keys: str) -> str:
        with pytest.raises(UserError) as refused:
            self(limits, *keys)
        return str(refused.value).partition(" (")[0]


def test_a_share_of_weights_is_no_share_of_images(check: Check) -> None:
    check("stored_share=0.1", "method.name=fedknow", "method.kept_share=0.5", TASKS)
    refusal = check.refusal("stored_share=0.1", "method.name=gem", "method.stored_share=0.2", TASKS)
    assert refusal == "the server asks for stored_share = 0.2"


def test_both_terms_of_der_count(check: Check) -> None:
    """Each term with a weight draws samples of its own."""
    table = "method.name=der++", TASKS
    assert check.refusal("batch_size=32", *table) == "the server asks for batch_size = 48"
    check("batch_size=48", *table)
    check("batch_size=32", *table, "method.beta=0")
    assert check.refusal("batch_size=79", *table, "method.replays=2") == "the server asks for batch_size = 80"


def test_epochs_of_tuning_and_training_add_up(check: Check) -> None:
    table = "method.name=fedvit", "train.epochs=3", "method.tune_epochs=3", TASKS
    assert check.refusal("epochs=3", *table) == "the server asks for epochs = 6"
    check("epochs=6", *table)


@pytest.mark.parametrize(
    ("name", "more"),
    [("fedknow", 1), ("ewc", 1), ("mas", 1), ("lvt", 1), ("gem", 0), ("dytox", 0), ("fedweit", 0), ("joint", 0)],
)
def test_epochs_that_measure_count(name: str, more: int, check: Check) -> None:
    table = f"method.name={name}", "train.epochs=3", TASKS
    check(f"epochs={3 + more}", *table)
    assert check.refusal(f"epochs={2 + more}", *table) == f"the server asks for epochs = {3 + more}"


def test_epochs_that_centre_features_count(check: Check) -> None:
    table = "method.name=fedbfpt", "method.local_layers=2", "train.epochs=3"
    check("epochs=3", *table)
    assert check.refusal("epochs=4", *table, "method.center_features=true") == "the server asks for epochs = 5"


def test_passes_of_an_image_are_limited(check: Check) -> None:
    assert check.refusal("passes=1", "method.name=apfl") == "the server asks for passes = 2"
    check("passes=1", "method.name=fedprox")
    long_game = "method.name=bcn", "method.ascent_steps=100", "method.descent_steps=100", TASKS
    assert check.refusal("passes=200", *long_game) == "the server asks for passes = 201"
    check("passes=201", *long_game)


def test_an_owner_is_told_what_really_runs(tiny_config: MakeConfig) -> None:
    shown = describe_run(*asked_of_a_client(tiny_config("method.name=lvt", "train.epochs=2", TASKS)))
    assert "rounds of 3 epochs (batch 32), 3 tasks" in shown
