"""pfl-research, as its own CIFAR-10 benchmark uses it: tensors on the device, weights by datapoints, no evaluation.

Several processes are torchrun's; a cohort is then balanced over them by the clients' sizes, as its documentation says.
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
    # NCCL, which pfl-research asks for, refuses two processes on one GPU; gloo does not.
    os.environ["LOCAL_RANK"] = "0"
    join = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **given: join(backend="gloo", **given)

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
    """The model with the two functions that pfl-research asks of it."""

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self(pixels), labels)

    @torch.no_grad()
    def metrics(self, pixels: Tensor, labels: Tensor) -> dict[str, Weighted]:
        self.eval()
        return {"loss": Weighted(F.cross_entropy(self(pixels), labels, reduction="sum").item(), len(labels))}


class Laps(TrainingProcessCallback):
    """Takes the time of each iteration."""

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
    np.random.seed(0)  # the same on every process, as pfl-research wants it
    problem = Problem(folder)
    run_spec = problem.run_spec
    module = Module()
    module.load_state_dict(problem.model().state_dict())
    module.to(problem.device)
    model = PyTorchModel(
        model=module,
        local_optimizer_create=lambda parameters, lr: problem.optimizer(parameters, lr),
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        amp_dtype=torch.bfloat16 if run_spec.bf16 else None,
    )
    users = [(round, client) for round, clients in enumerate(problem.chosen, start=1) for client in clients]
    sizes = {(round, client): problem.make_epoch_batches(round, client).shape[1] for round, client in users}
    turns = itertools.cycle(users)

    def dataset(user: Any) -> Dataset:
        order = problem.make_epoch_batches(*user)[0]  # it knows one order for all epochs
        return Dataset([problem.images[order], problem.labels[order]], user_id=user)

    data = FederatedDataset(dataset, lambda: next(turns), sizes if processes > 1 else None)
    watch = Stopwatch(problem)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=run_spec.rounds,
            evaluation_frequency=run_spec.rounds + 1,  # the first iteration, which warms up, is always evaluated
            train_cohort_size=run_spec.per_round,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_batch_size=run_spec.batch, local_num_epochs=run_spec.epochs, local_learning_rate=run_spec.lr
        ),
        NNEvalHyperParams(local_batch_size=256),
        callbacks=[Laps(watch)],
        send_metrics_to_platform=False,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        watch.finish(module.vit.state_dict())


if __name__ == "__main__":
    main()
