"""How a head is solved in closed form, and what it sees."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from vitfleet.config.base import Table


class HeadSolver(Table):
    """The closed form of a linear head, and the features that the head sees.

    A head that sees the class token of the last block, without random features, is the model's own.
    """

    solver: Literal["ridge", "lda", "means", "means-covariance"] = Field(
        "lda",
        description="ridge: regression (AFL); lda: shared covariance (FedCGS); means: cosine to class means (FedNCM); "
        "means-covariance: the covariance is estimated from the clients' class means (FedCOF)",
    )
    features: Literal["class-token", "mean", "both"] = Field(
        "class-token", description="what the head sees of a block: its class token, the mean of its patch tokens, both"
    )
    blocks: int = Field(1, ge=1, le=64, description="how many of the last blocks the head sees")
    project: int = Field(
        0, ge=0, le=100_000, description="random ReLU features of these, drawn by the seed and never sent; 0: none"
    )
    project_seed: int = Field(0, ge=0, description="seed of the random features: that of the run has no effect on them")
    standardize: Literal["noise", "data"] = Field(
        "noise",
        description="what makes features alike in size before random ones of them: what the body makes of images of "
        "noise, or means and deviations of all clients' images, for which they are asked once more with send = sums",
    )
    regularization: float | Literal["auto", "held-out"] = Field(
        "auto",
        description="γ per image of ridge, shrinkage of lda, γ over the mean variance of means-covariance; auto: from "
        "the sums alone; held-out: by held-out images of the clients",
    )
    held_out: float = Field(
        0.1, gt=0, le=0.5, description="share of a client's images that choose, with regularization = held-out"
    )
    temperature: float | Literal["auto"] = Field(
        "auto", description="what logits are divided by; auto: chosen with the regularization"
    )
    send: Literal["sums", "features"] = Field(
        "sums",
        description="clients send sums of their features, or the features themselves in fp16, with labels; of random "
        "features those that they are made of, and the server expands them",
    )
    dtype: Literal["fp64", "fp32", "bf16"] = Field("fp32", description="type of the sums that are sent")

    @model_validator(mode="after")
    def _check_regularization(self) -> HeadSolver:
        value, highest = self.regularization, 1.0 if self.solver == "lda" else None
        if isinstance(value, float) and (value < 0 or (highest is not None and value > highest)):
            limit = "at least 0" if highest is None else "between 0 and 1"
            raise ValueError(f"regularization = {value}: must be {limit} with solver = {self.solver}")
        if isinstance(self.temperature, float) and self.temperature <= 0:
            raise ValueError(f"temperature = {self.temperature}: must be greater than 0")
        if self.standardize == "data" and not self.project:
            raise ValueError("standardize = data: is for random features; set project, for example to 2000")
        if self.standardize == "data" and value == "held-out":
            raise ValueError("standardize = data: cannot be with regularization = held-out; choose auto or a number")
        return self

    @property
    def asks_twice(self) -> bool:
        """Whether clients are asked a second time before the head is solved."""
        return self.regularization == "held-out" or (self.standardize == "data" and self.send == "sums")


class HeadConfig(HeadSolver):
    """Where the head of the model comes from, for every method: what it sees, how it starts, when it is solved again.

    The keys of the solver decide what is solved, at the start and later.
    """

    start: Literal["random", "closed-form"] = Field(
        "random",
        description="the first head: random, or solved from sums of all clients' images before round 1; with "
        "data.tasks the rows of each task's classes before its first round",
    )
    solve_every: int | None = Field(
        None, ge=1, description="rounds after which the head is replaced by one that is solved on the trained body"
    )
    solve_last: bool = Field(False, description="whether the head is solved on the trained body after the last round")
    last: HeadSolver | None = Field(
        None,
        description="what the last solved head sees and how it is solved, where not as the keys above say; what is "
        "left out is as above. It can see more than the head that trains: then the model of the run has that one",
    )
    freeze_rounds: int = Field(0, ge=0, description="first rounds, in which the head is not trained")
    own_weight: float = Field(
        1.0,
        ge=1,
        description="where heads stay on the clients: how often a client's own images count for its solved head, and "
        "those of others once; 1: all have the same head",
    )

    @model_validator(mode="before")
    @classmethod
    def _last_is_otherwise_the_same(cls, tree: Any) -> Any:
        """Give the table ``last`` the keys of the solver that it leaves out; with it, the head is solved last."""
        last = tree.get("last") if isinstance(tree, dict) else None
        if not isinstance(last, dict):
            return tree
        shared = {key: tree[key] for key in HeadSolver.model_fields if key in tree}
        return {"solve_last": True, **tree, "last": {**shared, **last}}

    @property
    def is_solved_first(self) -> bool:
        """Whether a run starts with a solved head."""
        return self.start == "closed-form"

    @property
    def is_solved(self) -> bool:
        """Whether a head is solved at any time of a run."""
        return self.is_solved_first or self.is_solved_again

    @property
    def is_solved_again(self) -> bool:
        """Whether a head is solved after rounds in which it was trained."""
        return self.solve_every is not None or self.solve_last

    @property
    def reason(self) -> tuple[str, object]:
        """The first key because of which a head is solved, and its value."""
        if self.is_solved_first:
            return "head.start", self.start
        if self.solve_every is not None:
            return "head.solve_every", self.solve_every
        return "head.solve_last", self.solve_last

    def times_solved(self, rounds: int) -> int:
        """Return how often the head that trains is solved from all images in a run of so many rounds.

        Tasks together count once; the head of ``last`` is another.
        """
        after_rounds = sum(self.solve_due(round, round == rounds) for round in range(1, rounds + 1))
        return after_rounds + self.is_solved_first - (self.last is not None)

    def solve_due(self, round: int, is_last: bool) -> bool:
        """Return whether the head is solved after a round."""
        return (is_last and self.solve_last) or (self.solve_every is not None and round % self.solve_every == 0)
