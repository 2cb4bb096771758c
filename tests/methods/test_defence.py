"""The defence against devices that lie, by hand, by brute force, and in whole runs."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import MakeConfig
from poison import POISONED, Cell, accuracy_of
from vitfleet.config import load_config
from vitfleet.message import Message, State
from vitfleet.methods.aggregation.defence import capped, clip_around_median, clip_to_size, usual
from vitfleet.methods.aggregation.rules import MeanParams
from vitfleet.methods.aggregation.weighted_mean import WeightedMean
from vitfleet.run.loop import run_rounds
from vitfleet.run.output.summary import read_summary
from vitfleet.run.setup import open_run

LOOSE = {"max_change": None, "max_ratio": None}


def mean_of(sent: list[dict[str, Tensor]], server: dict[str, Tensor], defence: str, samples: int = 10) -> State:
    aggregator = WeightedMean(State(server), MeanParams(defence=defence, **LOOSE))  # type: ignore[arg-type]
    for client, tensors in enumerate(sent):
        aggregator.add(client, Message(tensors, {"samples": samples}))
    return aggregator.finish()


def test_clipping_by_hand() -> None:
    """The median of 0, 1, 2 and 11 is 1.5; the distances 1.5, 0.5, 0.5 and 9.5 have the lower median 0.5.

    So 0 keeps a ninth of its distance, and of 11 next to nothing remains: 0.5² / 9.5.
    """
    found = clip_around_median(torch.tensor([[0.0], [1.0], [2.0], [11.0]], dtype=torch.float64))
    assert found.flatten().tolist() == pytest.approx([1.5 - 1.5 / 9, 1.0, 2.0, 1.5 + 0.25 / 9.5])


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_clipping_as_numpy_computes_it(count: int) -> None:
    values = torch.randn(count, 2, 3, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    found, given = clip_around_median(values).numpy(), values.numpy()
    center = np.median(given, axis=0)
    distances = [float(np.linalg.norm(value - center)) for value in given]
    longest = sorted(distances)[(count - 1) // 2]
    for one, value, distance in zip(found, given, distances, strict=True):
        np.testing.assert_allclose(one, center + (value - center) * min(1.0, longest / distance) ** 2, rtol=1e-12)
    unchanged = [bool((one == value).all()) for one, value in zip(found, given, strict=True)]
    assert sum(unchanged) >= (count + 1) // 2, "half of the devices are not touched"


@pytest.mark.parametrize("honest", [2, 3, 4])
def test_one_liar_moves_a_weight_no_further_than_honest_devices_are_apart(honest: int) -> None:
    """Brute force: of all lies on a grid, none moves the mean out of twice the honest devices' largest distance."""
    random = torch.Generator().manual_seed(honest)
    values = torch.randn(honest, 2, generator=random, dtype=torch.float64)
    box = values.amax(0) - values.amin(0)
    for lie in itertools.product((-1e9, -30.0, -1.0, -0.1, 0.0, 0.3, 2.0, 1e6), repeat=2):
        sent = torch.cat([values, torch.tensor([lie], dtype=torch.float64)])
        mean = clip_around_median(sent).mean(0)
        assert float((mean - values.mean(0)).norm()) <= 2 * float(box.norm())
    undefended = torch.cat([values, torch.tensor([[-1e9, 0.0]], dtype=torch.float64)]).mean(0)
    assert float((undefended - values.mean(0)).norm()) > 1e8


def test_equal_replies_stay_as_they_are() -> None:
    server = {"w": torch.zeros(5), "n": torch.tensor(3)}
    sent = {"w": torch.randn(5, generator=torch.Generator().manual_seed(0)), "n": torch.tensor(7)}
    for count in (1, 2, 3, 6):
        found = mean_of([sent] * count, server, "clip")
        assert torch.equal(found.tensors["w"], sent["w"])
        assert torch.equal(found.tensors["n"], sent["n"])


def test_a_weight_that_one_device_sent_changes_by_what_is_usual() -> None:
    """Four devices change a weight by 1 each; a fifth one changes another by 50, and its own whole change is 35.4."""
    server = {"w": torch.zeros(4), "rare": torch.zeros(4)}
    sent = [{"w": torch.ones(4)}] * 4 + [{"w": torch.ones(4), "rare": torch.full((4,), 50.0)}]
    found = mean_of(sent, server, "clip").tensors
    torch.testing.assert_close(found["w"], torch.ones(4))
    torch.testing.assert_close(found["rare"], torch.ones(4))
    torch.testing.assert_close(mean_of(sent, server, "off").tensors["rare"], torch.full((4,), 50.0))


def test_small_changes_of_a_weight_that_few_sent_stay_as_they_are() -> None:
    values, reference = torch.tensor([[1.5, 1.0], [0.5, 1.0]], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert torch.equal(clip_to_size(values, reference, 1.0), values)
    torch.testing.assert_close(clip_to_size(values + 10, reference, 2**-0.5).sub(1).norm(dim=1), values.new_ones(2))


def test_two_devices_are_not_compared_with_what_they_sent_before() -> None:
    """A fleet of two has no defence: the smaller one of two honest devices would always be right."""
    server, sent = {"w": torch.zeros(1)}, {0: (torch.ones(1), 10), 1: (torch.full((1,), 5.0), 30)}

    def aggregated(earlier: dict[int, int]) -> float:
        aggregator = WeightedMean(State(server), MeanParams(defence="clip", **LOOSE))  # type: ignore[arg-type]
        aggregator.earlier_samples, aggregator.earlier_sizes = earlier, (1.0, 5.0, 1.0)
        for client, (weights, samples) in sent.items():
            aggregator.add(client, Message({"w": weights}, {"samples": samples}))
        return float(aggregator.finish().tensors["w"])

    assert aggregated({0: 10, 1: 30}) == 4.0
    assert aggregated({0: 10, 1: 30, 2: 10}) == 1.0, "a third device tells how large changes and samples are"


def test_what_is_usual_is_not_the_liars_to_choose() -> None:
    assert usual([1.0, 1.1, 1e9, 1e9], []) == 1.1
    assert usual([1.0, 1e9], []) is None, "of two nobody knows who lies"
    assert usual([1.0, 1e9], [1.2]) == 1.2, "but those of the round before tell"
    assert usual([1.0, 2.0, 3.0], [9.0] * 9) == 2.0
    assert capped([10, 20, 30, 10**8], usual([10, 20, 30, 10**8], [])) == [10, 20, 20, 20]
    assert capped([7], None) == [7]


@pytest.mark.parametrize(
    ("keys", "defends"),
    [
        ((), False),
        (("fleet.kind=flower",), True),
        (("fleet.kind=flower", "aggregate.defence=off"), False),
        (("aggregate.defence=clip",), True),
    ],
)
def test_it_is_on_for_real_devices_and_off_in_a_simulation(keys: tuple[str, ...], defends: bool) -> None:
    assert load_config("start-fedavg", keys).defends is defends


@pytest.mark.parametrize("method", ["fedavg", "transfl", "fed-lora"])
def test_a_run_with_the_defence_trains(method: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    """And is another run than without it: it is not only an entry in the configuration."""
    keys = (f"method.name={method}", *(("method.k=1",) if method == "transfl" else ()))
    states = [
        run_rounds(open_run(tiny_config(*keys, f"aggregate.defence={defence}"), tmp_path / defence)).state.server
        for defence in ("clip", "off")
    ]
    assert [read_summary(tmp_path / name)["defence"] for name in ("clip", "off")] == ["clip", "off"]
    assert all(bool(tensor.isfinite().all()) for tensor in states[0].tensors.values())
    assert any(not torch.equal(states[0].tensors[name], states[1].tensors[name]) for name in states[0].tensors)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedavg", "transfl"])
def test_one_liar_of_ten_costs_three_points_at_most(method: str) -> None:
    """Ten times the update in the wrong direction, with 10⁸ samples; without the defence the model is lost."""

    def accuracy(rule: str, attack: str) -> float:
        found, _ = accuracy_of(Cell("digits", method, rule, attack, 0), POISONED[method], [])
        return float(found)

    honest = accuracy("none", "none")
    assert accuracy("clip", "flip, samples") >= honest - 3
    assert accuracy("none", "flip, samples") < 50
