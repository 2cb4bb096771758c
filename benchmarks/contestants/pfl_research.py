"""pfl-research, as in its own CIFAR-10 benchmark: tensors on the device, weights by datapoints, no evaluation.

Under torchrun the clients are balanced over the processes by their sizes, as its documentation recommends.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import torch
from problem import Problem, Stopwatch, Vit, arguments
from torch import Tensor
from torch.nn import functional as F

folder, processes, _ = arguments()
if processes > 1 and torch.cuda.device_count() in range(1, processes):
    # pfl-research requests NCCL, which rejects two processes on one GPU; gloo accepts them.
    os.environ["LOCAL_RANK"] = "0"
    init_process_group = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **options: init_process_group(backend="gloo", **options)

from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402  (it joins the other processes when imported)
from pfl.aggregate.weighting import WeightByDatapoints  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics, Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402


class Module(Vit):
    """The model with the two functions that pfl-research requires."""

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self(pixels), labels)

    @torch.no_grad()
    def metrics(self, pixels: Tensor, labels: Tensor) -> dict[str, Weighted]:
        self.eval()
        return {"loss": Weighted(F.cross_entropy(self(pixels), labels, reduction="sum").item(), len(labels))}


class IterationTimer(TrainingProcessCallback):
    """Measures the time of each iteration."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.watch.start()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.watch.lap()
        return False, Metrics()


def main() -> None:
    np.random.seed(0)  # the same on every process, as pfl-research requires
    problem = Problem(folder)
    spec = problem.spec
    module = Module()
    module.load_state_dict(problem.model().state_dict())
    module.to(problem.device)
    model = PyTorchModel(
        model=module,
        local_optimizer_create=lambda parameters, lr: problem.optimizer(parameters, lr),
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        amp_dtype=torch.bfloat16 if spec.bf16 else None,
    )
    users = [(round, client) for round, clients in enumerate(problem.round_clients, start=1) for client in clients]
    sizes = {(round, client): problem.epoch_orders(round, client).shape[1] for round, client in users}
    next_user = itertools.cycle(users)

    def dataset(user: Any) -> Dataset:
        order = problem.epoch_orders(*user)[0]  # it has one order for all epochs
        return Dataset([problem.images[order], problem.labels[order]], user_id=user)

    data = FederatedDataset(dataset, lambda: next(next_user), sizes if processes > 1 else None)
    watch = Stopwatch(problem)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=spec.rounds,
            evaluation_frequency=spec.rounds + 1,  # the first iteration, which warms up, is always evaluated
            train_cohort_size=spec.per_round,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=spec.batch, local_num_epochs=spec.epochs, local_learning_rate=spec.lr),
        NNEvalHyperParams(local_batch_size=256),
        callbacks=[IterationTimer(watch)],
        send_metrics_to_platform=False,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        watch.finish(module.vit.state_dict())


if __name__ == "__main__":
    main()
