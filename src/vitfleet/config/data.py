"""Tables of the data: which images, how they are partitioned, tasks, augmentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from vitfleet.config.base import PartitionParams, Table
from vitfleet.config.registry import DATASETS, PARTITIONS, Parameters
from vitfleet.errors import ConfigError

#: The images that every accuracy of a run is measured on.
EvalSplit: TypeAlias = Literal["test", "validation"]


class TasksConfig(Table):
    """A stream of tasks: the classes are parted into tasks, and every client learns one task after the other."""

    count: int = Field(10, ge=1, le=10**4, description="tasks; a table data.tasks makes a run one of task after task")
    classes: int = Field(10, ge=1, description="classes of a task")
    rounds_per_task: int = Field(
        10, ge=1, description="rounds of a task; the schedule of the rate begins anew with each"
    )
    per_client: tuple[int, int] = Field(
        (2, 5), strict=False, description="least and most classes of a task that a client holds"
    )
    share: tuple[float, float] = Field(
        (0.05, 0.1), strict=False, description="least and largest share of a class's images that a client holds"
    )
    split: Literal["random", "listed"] = Field(
        "random", description="whether classes are put into tasks at random or as the data lists them"
    )
    order: Literal["own", "common"] = Field("own", description="each client learns the tasks in its own order, or not")
    partitioned: bool = Field(
        False,
        description="with order = common: data.partition divides each task's images over the clients, in place of "
        "per_client and share, and the server's model is evaluated on all classes so far (class-incremental learning)",
    )
    scenario: Literal["task", "class"] = Field(
        "task", description="task: an image's task is known; class: its class is looked for among those of all tasks"
    )
    keep_models: bool = Field(
        False, description="keep the clients' models after each task, so that the accuracies can be computed again"
    )

    @model_validator(mode="after")
    def _partitioned_tasks_are_common(self) -> TasksConfig:
        if not self.partitioned:
            return self
        if self.order != "common":
            raise ValueError("data.tasks.partitioned = true: needs data.tasks.order = common; tasks are those of all")
        if self.keep_models:
            raise ValueError("data.tasks.keep_models = true: must be false with data.tasks.partitioned")
        for key in ("per_client", "share"):
            if getattr(self, key) != TasksConfig.model_fields[key].default:
                raise ValueError(f"data.tasks.{key}: has no effect with data.tasks.partitioned = true; leave it out")
        return self

    @model_validator(mode="after")
    def _bounds(self) -> TasksConfig:
        if self.partitioned:
            return self
        for key, (least, most), limit in (("per_client", self.per_client, self.classes), ("share", self.share, 1)):
            if not 0 < least <= most <= limit:
                raise ValueError(
                    f"data.tasks.{key} = [{least}, {most}]: must be the least and the most, above 0 and at most {limit}"
                )
        return self

    @property
    def rounds(self) -> int:
        """Rounds of all tasks together."""
        return self.count * self.rounds_per_task

    def task_index(self, round: int) -> int:
        """Return the index of the task that is learned in a round; rounds count from 1, tasks from 0."""
        return (round - 1) // self.rounds_per_task


class AugmentConfig(Table):
    """What is done to a training image, on the device, batched. All off by default."""

    crop: float = Field(0.0, ge=0, le=0.5, description="random shift, as a share of the image's side")
    flip: bool = Field(False, description="mirror half of the images")
    brightness: float = Field(0.0, ge=0, lt=1, description="scale brightness by 1 ± this")

    @property
    def active(self) -> bool:
        """Whether anything is drawn at all."""
        return self.crop > 0 or self.flip or self.brightness > 0


def tasks_divide(kind: str) -> ConfigError:
    """Return the error of a partition that tasks would not follow."""
    remedy = (
        "has no effect with data.tasks, which divide the images (classes, per_client, share); leave one of them out, "
        "or set data.tasks.order = common and data.tasks.partitioned = true"
    )
    return ConfigError("data.partition.kind", kind, remedy)


class DataConfig(Table):
    """Which images, where they come from, and how they are partitioned among the clients."""

    name: str = Field(
        "digits", description="a registered data set, hf:owner/name[:config], or a name for your own (with data.path)"
    )
    path: str | None = Field(None, description="your own image folder, parquet file or folder of parquet files")
    dir: str | None = Field(None, description="folder of the named data sets; --data-dir and VITFLEET_DATA set it")
    image_column: str | None = Field(None, description="parquet and hub: column of images; default: image, img")
    label_column: str | None = Field(
        None, description="parquet and hub: column of classes; default: fine_label, label, labels, class"
    )
    source_column: str | None = Field(
        None, description="parquet and hub: column of sources; default: source, client, writer, user, domain, if any"
    )
    train_split: str | None = Field(None, description="hf:owner/name: split to train on; default: train")
    test_split: str | None = Field(
        None, description="hf:owner/name: split to test on; default: test, valid, validation, val"
    )
    params: Annotated[dict[str, Any], Parameters(DATASETS)] = Field(
        {}, description="parameters of a registered data set that has any", validate_default=True
    )
    fingerprint: str | None = Field(
        None, description="hash of data that was passed from Python: resuming needs the same data again"
    )
    test_share: float = Field(0.2, gt=0, lt=1, description="share of each class held out if there is no test split")
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of each class held out of the training images, to measure accuracy on, not on test images",
    )
    test_only: bool = Field(
        False, description="a server's data.path without a test split: all of its images are test images"
    )
    max_corrupt: float = Field(0.01, ge=0, le=1, description="share of unreadable images that is tolerated")
    limit: int | None = Field(None, ge=1, description="number of training images to use, and a fifth of it for testing")
    partition: Annotated[PartitionParams, Parameters(PARTITIONS, default="dirichlet")] = Field(
        default_factory=lambda: PARTITIONS.make_params("dirichlet")
    )
    tasks: TasksConfig | None = None
    augment: AugmentConfig = AugmentConfig()

    @model_validator(mode="after")
    def _tasks_divide_the_images(self) -> DataConfig:
        if self.tasks is None:
            return self
        if self.tasks.partitioned:
            if self.partition.kind == "file":
                remedy = "is one of all images; with data.tasks.partitioned choose another, which divides each task"
                raise ConfigError("data.partition.kind", "file", remedy)
            return self
        if self.partition != PARTITIONS.make_params("dirichlet"):
            raise tasks_divide(self.partition.kind)
        return self

    @property
    def eval_split(self) -> EvalSplit:
        """The images that every accuracy is measured on."""
        return "validation" if self.validation else "test"
