"""Whatever is written into a configuration is accepted, or rejected with one sentence; and what is accepted runs."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from case_limits import MIB, MemoryUse, case_limits, settled_memory
from forged import forged_override
from generated_values import accepted_values, as_text, keys_by_variant, values
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from conftest import RecordProperty
from vitfleet import register_method
from vitfleet.config import load_config
from vitfleet.config.base import MAX_FLOAT, MethodParams
from vitfleet.config.load import validate
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config
from vitfleet.errors import UserError
from vitfleet.methods.averaging.fedavg import WeightAveraging
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run
from vitfleet.training.optimizers.optimizer import learning_rate

SMALL_RUN: tuple[str, ...] = (
    *("rounds=2", "data.limit=120", "model.dim=16", "model.depth=2", "model.heads=2", "fleet.clients=6"),
    *("fleet.per_round=3", "fleet.devices={nano = 1, agx = 1}", "machine.device=cpu", "machine.threads=1"),
    *("train.epochs=1", "train.batch_size=16", "trackers={}"),
)
# Keys that decide how much work a run is, or where it reads and computes: they are fuzzed without training.
WORK = {"rounds", "data", "model", "machine", "plugins", "trackers", "fleet.kind", "fleet.clients", "train.epochs"}
WORK |= {"method.server_epochs", "method.tune_epochs", "method.prompts", "method.views", "method.replays", "eval.every"}
TASKS = "data.tasks={count = 2, classes = 5, rounds_per_task = 1}"


class LooseParams(MethodParams):
    """A plug-in's table that states no limits."""

    strength: float = Field(1.0, description="a number")
    steps: int = Field(1, description="a whole number")
    optional: float | None = Field(None, description="a number or nothing")
    pair: tuple[float, float] = Field((0.0, 1.0), strict=False, description="two numbers")
    shares: dict[str, float] = Field({}, description="numbers by name")


class Loose(WeightAveraging[LooseParams]):
    """FedAvg under another name."""


@pytest.fixture
def plugin() -> None:
    register_method("loose", LooseParams)(Loose)


def one_sentence(error: UserError) -> None:
    text = str(error)
    assert text.strip(), "an empty message"
    for word in ("pydantic", "Traceback", "validation error"):
        assert word not in text


def outcome(overrides: Any) -> Config | None:
    """Load a configuration; ``None`` if it is rejected."""
    try:
        config = load_config("digits", overrides)
    except UserError as error:
        one_sentence(error)
        return None
    saved = config.model_dump_json()
    json.loads(saved, parse_constant=lambda constant: pytest.fail(f"{constant} in {saved}"))
    assert validate(json.loads(saved)) == config
    for round in (1, config.rounds):
        assert 0 <= learning_rate(config.train, round, config.schedule_rounds) <= MAX_FLOAT
    return config


def overrides(as_texts: bool) -> st.SearchStrategy[list[str] | dict[str, Any]]:
    """Return one to four keys with values, and what selects the components they belong to, as texts or as values."""
    keys = keys_by_variant()

    @st.composite
    def build(draw: st.DrawFn) -> list[str] | dict[str, Any]:
        chosen = draw(st.lists(st.sampled_from(keys), min_size=1, max_size=4))
        plausible = draw(st.booleans())
        pairs = {key.name: draw(st.sampled_from(accepted_values(key)) if plausible else values) for key, _ in chosen}
        selections = sorted({selection for _, selection in chosen if selection})
        if as_texts:
            return [*selections, *(f"{name}={as_text(value)}" for name, value in pairs.items())]
        return {**dict(selection.split("=") for selection in selections), **pairs}

    return build()


def check_configurations(examples: int, counts: Counter[str]) -> MemoryUse:
    """Load so many configurations, half of them from texts as after ``-o``, half from values."""
    use = MemoryUse()
    outcome({})  # the schema is built when it is used first

    def check(drawn: list[str] | dict[str, Any]) -> None:
        form = "texts" if isinstance(drawn, list) else "values"
        with case_limits(len(repr(drawn)), use=use):
            config = outcome(drawn)
        counts[f"{form} {'rejected' if config is None else 'accepted'}"] += 1

    with settled_memory():
        for as_texts in (True, False):
            settings(max_examples=examples // 2, database=None, derandomize=True)(given(overrides(as_texts))(check))()
    return use


def check_forged(examples: int, counts: Counter[str]) -> MemoryUse:
    """Load configurations that are made to grow when they are parsed."""
    use, rng = MemoryUse(), random.Random(0)
    outcome({})
    with settled_memory():
        for _ in range(examples):
            text = forged_override(rng, rng.choice([1000, 30_000, 120_000, 3 * MIB]))
            with case_limits(len(text.encode()), use=use):
                config = outcome([text])
            counts[f"forged {'rejected' if config is None else 'accepted'}"] += 1
    return use


@pytest.mark.usefixtures("plugin")
def test_configurations() -> None:
    counts: Counter[str] = Counter()
    check_configurations(120, counts)
    # Which ones are drawn changes with the schema: that some of both are accepted is held by the long test.
    assert sum(counts.values()) >= 120
    assert counts["texts accepted"] + counts["values accepted"]


def test_forged_configurations() -> None:
    counts: Counter[str] = Counter()
    check_forged(15, counts)
    assert counts["forged rejected"] > 7


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("plugin")
def test_ten_thousand_configurations(record_property: RecordProperty) -> None:
    counts: Counter[str] = Counter()
    use, forged = check_configurations(10_000, counts), check_forged(500, counts)
    record_property("configurations", dict(sorted(counts.items())))
    record_property("memory of configurations", f"{use}; of forged ones: {forged}")
    assert min(counts["texts accepted"], counts["values accepted"]) > 100


@pytest.mark.parametrize(
    "override",
    [
        *("fleet.bandwidth=5e-324", "train.lr=5e-324", "train.lr=1e300", "train.weight_decay=1e31", "rounds=10000001"),
        *("fleet.schedule={kind='over-selection', share=1e308}", "seed=99999999999999999999", "model.dim=1000000"),
        *("method={name='loose', strength=1e300}", "method={name='loose', strength=-1e31}"),
        *("method={name='loose', strength=1e-31}", "method={name='loose', steps=1000000001}"),
        *("method={name='loose', pair=[0.0, 1e300]}", "method={name='loose', shares={a = 1e300}}"),
        *(
            "method={name='loose', optional=5e-324}",
            "method={name='eftvit', server_epochs=100000000000000000000000000}",
        ),
    ],
)
@pytest.mark.usefixtures("plugin")
def test_a_number_at_the_edge_of_floats_is_rejected_with_its_key(override: str) -> None:
    with pytest.raises(UserError, match=r"^\S+ = \S.*: must be .*\d"):
        load_config("digits", ["fleet.devices={nano = 1}", override])


@pytest.mark.parametrize("override", ["strength=1e30", "strength=-1e-30", "steps=1000000000", "strength=0.0"])
@pytest.mark.usefixtures("plugin")
def test_a_number_within_the_limits_is_accepted(override: str) -> None:
    load_config("digits", ["method.name=loose", f"method.{override}"])


def check_runs(examples: int, folder: Path) -> Counter[str]:
    """Run configurations whose numbers lie at the limits of their keys for two rounds."""
    counts: Counter[str] = Counter()
    numeric = [(key, selection) for key, selection in keys_by_variant() if "number" in key.allowed]
    cheap = [pair for pair in numeric if pair[0].name not in WORK and pair[0].name.split(".")[0] not in WORK]
    cheap += [pair for pair in numeric if pair[0].name.startswith(("data.partition.", "data.augment."))]
    pairs = st.sampled_from(cheap).flatmap(
        lambda pair: st.tuples(st.just(pair), st.sampled_from(accepted_values(pair[0])))
    )

    @settings(max_examples=examples, database=None, derandomize=True)
    @given(st.lists(pairs, min_size=1, max_size=3))
    def check(drawn: list[Any]) -> None:
        (first, selection), _ = drawn[0]
        chosen = [(key, value) for (key, other), value in drawn if other in ("", selection)]
        texts = [*SMALL_RUN, *([selection] if selection else []), *(f"{key.name}={value}" for key, value in chosen)]
        if "method" in first.name and METHODS[selection.partition("=")[2]].target.needs_tasks:
            texts = [*texts, TASKS]
        config = outcome(texts)
        if config is None:
            counts["rejected"] += 1
            return
        try:
            run_rounds(open_run(config, folder / str(sum(counts.values()))))
        except UserError as error:
            one_sentence(error)
            counts["ended with a sentence"] += 1
        else:
            counts["finished"] += 1

    check()
    return counts


@pytest.mark.usefixtures("plugin")
def test_what_is_accepted_runs(tmp_path: Path) -> None:
    assert sum(check_runs(5, tmp_path).values()) >= 5


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("plugin")
def test_many_that_are_accepted_run(tmp_path: Path, record_property: RecordProperty) -> None:
    counts = check_runs(600, tmp_path)
    record_property("runs of configurations at their limits", dict(sorted(counts.items())))
    assert counts["finished"] > 50
