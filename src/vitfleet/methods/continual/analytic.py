"""Analytic continual learning: a head in closed form on a frozen pretrained body, whose sums add up over tasks.

ACIL (Zhuang et al., "ACIL: Analytic Class-Incremental Learning with Absolute Memorization and Privacy Protection",
NeurIPS 2022) solves the ridge regression of one-hot labels on features of a frozen body. With φ of all images so far

    W = (Σφφᵀ + nγI)⁻¹ Σφyᵀ

needs nothing but two sums, and those of a new task are added to those of earlier ones: its recursion is this sum,
written for the inverse. So nothing is forgotten: after each task the head is the one of all images so far in one
place, for any order of tasks and however images are spread over clients. No image is stored, and no task is told at
test time. RanPAC (McDonnell et al., NeurIPS 2023) computes random ReLU features first (``method.project``). With
``solver = "lda"`` the same sums give linear discriminant analysis.

All of this is the method ``closed-form`` (:mod:`vitfleet.methods.closed_form.closed_form`): here a client is asked once
in each task for the sums of its images of it. Images of clients that are not asked in any round of a task never count,
so all are to be asked: ``fleet.per_round = fleet.clients`` and one round per task are enough.
"""

from __future__ import annotations

from collections.abc import Callable

from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError, UserError
from vitfleet.message import Message, State
from vitfleet.methods.closed_form.closed_form import ClosedForm, ClosedFormParams


class AnalyticParams(ClosedFormParams):
    """A head in closed form whose sums add up over tasks, on the pretrained body (ACIL, RanPAC)."""


@register_method("analytic", AnalyticParams, title="Analytic")
class Analytic(ClosedForm):
    """Adds sums of features over clients and tasks, and solves the head of all classes so far."""

    needs_tasks = True

    @classmethod
    def check_config(cls, params: ClosedFormParams, config: Config) -> None:
        """Check that clients are asked once in a task."""
        if params.regularization == "held-out":
            raise ConfigError(
                "method.regularization", "held-out", "asks clients twice about all images; choose auto or a number"
            )
        super().check_config(params, config)

    def without_client(self, server_state: State, client: int, sent: Callable[[], Message]) -> State:
        """Refuse: what a client sent in its tasks is not computed once more."""
        raise UserError(f"--client {client}: with analytic, sums of several tasks are not subtracted; run again")
