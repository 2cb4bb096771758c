"""Joint training: a client trains on its images of all tasks up to the current one.

No paper: it is the upper bound that continual learners are compared with, because no image is ever taken away. Tasks
still arrive one after the other, so its accuracy after each task compares with that of other methods, and its rounds
take longer with every task. Otherwise it is FedPer: body and head are trained together, the body is averaged, the head
is local by default.
"""

from __future__ import annotations

from vitfleet.config.registry import register_method
from vitfleet.methods.personal.shared_body import HeadsParams, SharedBody


class JointParams(HeadsParams):
    """Trains on the images of all tasks so far: the upper bound of continual learning (joint training)."""


@register_method("joint", JointParams, title="Joint training")
class Joint(SharedBody[JointParams]):
    """Federated averaging of the body, on all tasks so far."""

    needs_tasks = True
    accumulates_tasks = True
