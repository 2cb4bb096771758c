"""A plain loop: timm's module, torch's optimizer, one client after the other, a weighted mean."""

from __future__ import annotations

import torch
from problem import Problem, Stopwatch, arguments, train


def main() -> None:
    problem = Problem(arguments()[0])
    model = problem.model()
    weights = {name: tensor.clone() for name, tensor in model.vit.state_dict().items()}
    watch = Stopwatch(problem)
    watch.start()
    for round, clients in enumerate(problem.round_clients, start=1):
        sums = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        total = 0
        for client in clients:
            model.vit.load_state_dict(weights)
            samples = train(model, problem, round, client)
            for name, tensor in model.vit.state_dict().items():
                sums[name].add_(tensor, alpha=samples)
            total += samples
        weights = {name: tensor / total for name, tensor in sums.items()}
        watch.lap()
    watch.finish(weights)


if __name__ == "__main__":
    main()
