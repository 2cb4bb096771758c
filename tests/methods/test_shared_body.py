"""What a client with a body that is shared sends."""

from __future__ import annotations

from dataclasses import replace

from conftest import MakeContext, MakeShard, MakeTrainer
from vitfleet.message import Message, Tensors
from vitfleet.methods import ClientRoundInput
from vitfleet.methods.personal.fedper import FedPer, FedPerParams
from vitfleet.methods.personal.shared_body import ClientTraining
from vitfleet.models.net import Net
from vitfleet.training.driver import run_update
from vitfleet.training.stacking.inputs import RngContext


class SendsNothing(FedPer):
    """Trains as FedPer does, and selects no weight to send."""

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        trained = yield from super().local_training(job, weights)
        return replace(trained, sent=self.parts.union())


def test_an_empty_selection_sends_nothing(
    tiny_net: Net, make_context: MakeContext, make_trainer: MakeTrainer, make_shard: MakeShard
) -> None:
    """It is not the same as no selection, which sends the whole body."""
    shard, job = (
        make_shard(0, 10),
        ClientRoundInput(1, 0, Message(tiny_net.initial_weights()), {}, None, make_shard(0, 10)),
    )
    for method, sent in (
        (SendsNothing(FedPerParams(), make_context()), set()),
        (FedPer(FedPerParams(), make_context()), set(tiny_net.parts.body)),
    ):
        answer = run_update(method.client_update(job), make_trainer(), shard, RngContext(0, 1, 0))
        assert set(answer.message.tensors) == sent
        assert answer.message.numbers["samples"] == 10
