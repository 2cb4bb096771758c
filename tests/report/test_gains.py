"""What a method gains against another, in a sentence."""

from __future__ import annotations

from typing import Any

from vitfleet.report.console.results import gain_sentence, gain_sentences
from vitfleet.run.comparison.results import ComparisonRow


def row(name: str, accuracy: float, up: float, gflops: float) -> ComparisonRow:
    summary: dict[str, Any] = {
        "accuracy": {"global": accuracy},
        "message": {"up_bytes": up},
        "client": {"round_gflops": gflops},
    }
    return ComparisonRow(name, [summary])


def test_savings_are_named_where_there_are_any() -> None:
    fedavg = row("fedavg", 0.95, 200, 5)
    assert gain_sentence(fedavg, fedavg) == "FedAvg: 95.0% accuracy; every client sends the whole model."
    assert (
        gain_sentence(row("transfl", 0.925, 100, 5), fedavg)
        == "TransFL: 92.5% accuracy, 2.5 points less than FedAvg, with 50% of its upload: here it pays with accuracy "
        "for what it saves."
    )
    assert (
        gain_sentence(row("eftvit", 0.96, 50, 2), fedavg)
        == "EFTViT: 96.0% accuracy, 1.0 points more than FedAvg, with 25% of its upload and 40% of its operations "
        "on the client."
    )
    assert gain_sentence(row("fedprox", 0.95, 200, 5), fedavg) == "FedProx: 95.0% accuracy, as much as FedAvg."
    lora = row("fed-lora", 0.95, 20, 5)
    assert gain_sentence(lora, lora) == "Fed-LoRA: 95.0% accuracy."


def test_rows_with_tasks_are_compared_with_the_first_of_them() -> None:
    def on_tasks(name: str, accuracy: float, forgetting: float) -> ComparisonRow:
        return ComparisonRow(name, [{"continual": {"average_accuracy": accuracy, "forgetting": forgetting}}])

    rows = [row("fedavg", 0.95, 200, 5), on_tasks("fedavg tasks=3", 0.369, 0.935), on_tasks("fedvit", 0.824, 0.087)]
    assert gain_sentences(rows) == [
        "FedAvg: 95.0% accuracy; every client sends the whole model.",
        "FedAvg tasks=3: 36.9% accuracy over all tasks after the last one; forgets 94 points.",
        "FedViT: 82.4% accuracy over all tasks after the last one; forgets 9 points, FedAvg tasks=3 forgets 94 points.",
    ]
