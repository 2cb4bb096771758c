"""The tables of a run's configuration.

Bounds that a table can know are checked here; those that need the data or the model (more clients than
samples, a layer count) are checked by the room that knows them, with the same kind of error.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from vitfleet.config.base import Table
from vitfleet.config.methods import AGemConfig, FedAvgConfig, FedVitConfig, GemConfig, MethodConfig


class IidPartition(Table):
    """Every client draws from the same distribution."""

    kind: Literal["iid"] = "iid"
    imbalance: float = Field(0.0, ge=0, le=5, description="log-normal σ of the clients' sample counts; 0: equal")


class DirichletPartition(Table):
    """Each class is spread over the clients by Dirichlet(β): small β, few classes a client."""

    kind: Literal["dirichlet"] = "dirichlet"
    beta: float = Field(0.5, gt=0, description="concentration β of the Dirichlet distribution")
    min_samples: int = Field(0, ge=0, description="every client gets at least this many; 0 allows empty clients")


class ClassesPartition(Table):
    """Each client holds a fixed number of classes, whose samples it shares evenly with others."""

    kind: Literal["classes"] = "classes"
    per_client: int = Field(2, ge=1, description="classes a client")


class ShardsPartition(Table):
    """Sorted by label, cut into equal shards, dealt to the clients (McMahan et al., 2017)."""

    kind: Literal["shards"] = "shards"
    per_client: int = Field(2, ge=1, description="shards a client")


class SourcePartition(Table):
    """One client a source: the folder, session or writer each image came from."""

    kind: Literal["source"] = "source"


class FilePartition(Table):
    """A partition saved by an earlier run."""

    kind: Literal["file"] = "file"
    path: str = Field(description="a run folder, or its partition.safetensors")


PartitionConfig = Annotated[
    IidPartition | DirichletPartition | ClassesPartition | ShardsPartition | SourcePartition | FilePartition,
    Field(discriminator="kind"),
]


class TasksConfig(Table):
    """A stream of tasks: the classes are parted into tasks, and every client learns one task after the other."""

    count: int = Field(10, ge=1, description="tasks; a table data.tasks makes a run one of task after task")
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
    incremental: Literal["task", "class"] = Field(
        "task", description="whether an image's task is known, or its class is looked for among all"
    )

    @model_validator(mode="after")
    def _bounds(self) -> TasksConfig:
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
        """Return how many tasks lie behind a client in a round (both of them counted as everywhere: rounds from 1)."""
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


class DataConfig(Table):
    """Which images, and how they are dealt to the clients."""

    name: str = Field("digits", description="a known set, or a name for your own (then set data.path)")
    path: str | None = Field(None, description="your own image folder or parquet file or folder")
    dir: str | None = Field(None, description="where named sets lie; --data-dir and VITFLEET_DATA set it")
    test_share: float = Field(0.2, gt=0, lt=1, description="held out where a set has no test split")
    max_corrupt: float = Field(0.01, ge=0, le=1, description="share of unreadable images that is tolerated")
    limit: int | None = Field(None, ge=1, description="use only this many training images (and a fifth of it to test)")
    partition: PartitionConfig = DirichletPartition()
    tasks: TasksConfig | None = None
    augment: AugmentConfig = AugmentConfig()


class ModelConfig(Table):
    """Which ViT. ``vit`` is built from the sizes below; any other name is timm's."""

    name: str = Field("vit", description="vit, or a name of timm's, such as vit_tiny_patch16_224")
    image_size: int | None = Field(None, ge=4, le=1024, description="default: the data's size, or timm's own")
    patch_size: int | None = Field(None, ge=1, le=64, description="default: 4, or timm's own")
    dim: int = Field(64, ge=8, description="embedding width (for vit)")
    depth: int | None = Field(None, ge=1, le=64, description="number of layers; default: 4, or timm's own")
    heads: int = Field(4, ge=1, description="attention heads (for vit)")
    mlp_ratio: float = Field(4.0, gt=0, description="MLP width over embedding width (for vit)")
    weights: str | None = Field(None, description="pretrained: a .safetensors file, a folder of them, or 'hub'")

    @model_validator(mode="after")
    def _heads_divide_dim(self) -> ModelConfig:
        if self.name == "vit" and self.dim % self.heads:
            raise ValueError(f"model.heads = {self.heads}: must divide model.dim = {self.dim}")
        return self


class TrainConfig(Table):
    """A client's local training."""

    epochs: int = Field(1, ge=1, description="passes over a client's images in a round")
    batch_size: int = Field(32, ge=1, description="images a step")
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="fresh for every client and round")
    lr: float = Field(1e-3, gt=0, description="largest learning rate of the schedule")
    weight_decay: float = Field(0.05, ge=0, description="on every weight that trains")
    momentum: float = Field(0.9, ge=0, lt=1, description="for sgd")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="over the rounds of the run, or of a task")
    warmup_rounds: int = Field(0, ge=0, description="rounds of linear warm-up before the cosine")
    clip: float | None = Field(None, gt=0, description="largest norm of a step's gradient")
    mask_ratio: float = Field(0.0, ge=0, lt=1, description="share of an image's patches dropped at every step")


DeviceName = Literal["nano", "tx2", "nx", "agx", "pi4-2gb", "pi4-4gb", "pi4-8gb", "phone", "laptop", "server-gpu"]


class SynchronousSchedule(Table):
    """A round lasts until the slowest of its clients has answered."""

    kind: Literal["synchronous"] = "synchronous"


class DeadlineSchedule(Table):
    """A round lasts until its deadline at most; who is later is left out."""

    kind: Literal["deadline"] = "deadline"
    seconds: float = Field(600.0, gt=0, description="virtual seconds a round may last")


class OverSelectionSchedule(Table):
    """More clients are asked than are needed; the first ``fleet.per_round`` answers make the round."""

    kind: Literal["over-selection"] = "over-selection"
    share: float = Field(0.3, gt=0, description="clients asked in addition, as a share of fleet.per_round")


class BufferedSchedule(Table):
    """Clients train all the time; every ``fleet.per_round`` answers the server moves (FedBuff, Nguyen et al., 2022)."""

    kind: Literal["buffered"] = "buffered"
    concurrency: int = Field(10, ge=1, description="clients that train at any time")
    staleness: float = Field(0.5, ge=0, description="an update s versions old counts (1 + s)^−this as much")


ScheduleConfig = Annotated[
    SynchronousSchedule | DeadlineSchedule | OverSelectionSchedule | BufferedSchedule, Field(discriminator="kind")
]


class FleetConfig(Table):
    """The clients, how many take part, and on what devices the virtual clock sees them."""

    kind: Literal["inline", "flower"] = Field(
        "inline", description="where the clients live: in this process, or on machines of their own (vitfleet server)"
    )
    clients: int = Field(10, ge=1, description="clients in all")
    per_round: int = Field(5, ge=1, description="clients asked each round")
    min_replies: int = Field(1, ge=1, description="a round with fewer usable replies changes nothing")
    names: tuple[str, ...] = Field(
        (), strict=False, description="flower: the devices' names, client 0 first; default: 0, 1, 2, …"
    )
    spare: int = Field(0, ge=0, description="flower: clients asked beyond per_round; the slowest are not waited for")
    deadline_s: float = Field(600.0, gt=0, description="flower: seconds that a round waits for its replies")
    join_s: float = Field(60.0, ge=0, description="flower: seconds that a server, at its start, waits for every device")
    max_message_mb: float = Field(2048.0, gt=0, description="flower: largest message accepted from a device")
    devices: dict[DeviceName, Annotated[int, Field(ge=1)]] = Field(
        {}, description="the fleet's mix, as {agx = 2, tx2 = 2, nx = 8, nano = 8}; empty: no virtual clock"
    )
    bandwidth: float | None = Field(
        None, gt=0, description="MB/s of every client's line, up and down; default: its device's own"
    )
    schedule: ScheduleConfig = SynchronousSchedule()

    @model_validator(mode="after")
    def _no_more_than_there_are(self) -> FleetConfig:
        if self.per_round > self.clients:
            raise ValueError(
                f"fleet.per_round = {self.per_round}: must be between 1 and fleet.clients = {self.clients}"
            )
        if self.per_round + self.spare > self.clients:
            room = self.clients - self.per_round
            raise ValueError(f"fleet.spare = {self.spare}: must be between 0 and {room}, the clients not asked anyway")
        if self.min_replies > self.per_round:
            raise ValueError(
                f"fleet.min_replies = {self.min_replies}: must be between 1 and fleet.per_round = {self.per_round}"
            )
        return self

    @model_validator(mode="after")
    def _names_fit(self) -> FleetConfig:
        if self.kind == "inline" and (self.spare or self.names):
            key, value = ("spare", self.spare) if self.spare else ("names", list(self.names))
            raise ValueError(f"fleet.{key} = {value}: needs fleet.kind = flower")
        if self.names and (len(self.names) != self.clients or len(set(self.names)) != self.clients):
            raise ValueError(
                f"fleet.names = {list(self.names)}: must be fleet.clients = {self.clients} different names"
            )
        return self

    @model_validator(mode="after")
    def _schedule_can_be_kept(self) -> FleetConfig:
        schedule = self.schedule
        if schedule.kind != "synchronous" and self.kind == "flower":
            raise ValueError(
                f"fleet.schedule.kind = {schedule.kind!r}: needs fleet.kind = inline; "
                "on Flower see fleet.deadline_s and fleet.spare"
            )
        if schedule.kind != "synchronous" and not self.devices:
            raise ValueError(
                f"fleet.schedule.kind = {schedule.kind!r}: needs devices to know who is slow; set fleet.devices"
            )
        if schedule.kind == "over-selection" and self.asked > self.clients:
            raise ValueError(
                f"fleet.schedule.share = {schedule.share}: would ask {self.asked} of fleet.clients = {self.clients}"
            )
        if schedule.kind == "buffered" and schedule.concurrency + self.per_round > self.clients:
            # Who has just answered is not asked again before the server has moved.
            most = self.clients - self.per_round
            raise ValueError(
                f"fleet.schedule.concurrency = {schedule.concurrency}: must be at most "
                f"fleet.clients − fleet.per_round = {most}"
            )
        return self

    @property
    def asked(self) -> int:
        """Clients that are asked in a round."""
        extra = self.schedule.share if self.schedule.kind == "over-selection" else 0.0
        return ceil(self.per_round * (1 + extra)) + self.spare

    def name_of(self, client: int) -> str:
        """Return the name of a client's device."""
        return self.names[client] if self.names else str(client)


class AggregateConfig(Table):
    """How the weights that clients send are made one, and which are refused. For methods that average weights."""

    rule: Literal["mean", "trimmed", "median"] = Field(
        "mean", description="weighted mean; mean without the extremes; median: both by coordinate, all clients alike"
    )
    trim: float = Field(0.1, ge=0, lt=0.5, description="trimmed: share of the clients left out at either end")
    clip: float | None = Field(None, gt=0, description="an update longer than this is shortened to it (Euclidean norm)")
    max_norm: float | None = Field(None, gt=0, description="an update longer than this is refused (Euclidean norm)")
    norm_factor: float | None = Field(
        None, gt=1, description="an update, or features, this many times the round's median size are refused"
    )
    max_samples: int | None = Field(None, ge=1, description="a client that says it has more samples is refused")

    @property
    def holds(self) -> bool:
        """Whether a round's replies must all be there before any can be used: memory grows with their number."""
        return self.rule != "mean" or self.norm_factor is not None


class EvalConfig(Table):
    """When accuracy is measured, and on how many models."""

    every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    batch_size: int = Field(256, ge=1, description="images evaluated at a time")
    clients: int | None = Field(
        100, ge=0, description="clients whose models stand for a server that has none, drawn anew each time; null: all"
    )


class MachineConfig(Table):
    """What the run computes on."""

    device: str = Field("auto", description="auto, cpu, cuda, cuda:1")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 where the GPU, or the CPU for models 128 wide or more, has it; else fp32"
    )
    deterministic: bool = Field(False, description="bit-identical on a GPU too, at some cost; a CPU always is")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: torch's own")
    workers: int | None = Field(
        None,
        ge=1,
        description="clients trained side by side on a CPU, which share its threads; default: one a thread, where "
        "memory allows",
    )
    cohort: int | None = Field(
        None, ge=1, description="clients trained at once, stacked; default: 1 on a CPU, on a GPU as many as fit"
    )
    graphs: bool = Field(True, description="on a GPU, capture training steps in CUDA graphs and replay them")
    kernels: bool = Field(
        True, description="on a GPU, own kernels for attention over few tokens and for the optimisers of a cohort"
    )
    compile: bool = Field(False, description="compile the model's forward and backward pass; pays off in long runs")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        ("tensorboard",), strict=False, description="where curves are shown; wandb and mlflow are extras to install"
    )

    @field_validator("trackers", mode="before")
    @classmethod
    def _one_is_a_list_too(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value


class Config(Table):
    """A whole run."""

    title: str = Field("", description="one line for `vitfleet presets` and the report")
    seed: int = Field(0, ge=0, description="addresses every draw of the run")
    rounds: int = Field(
        10, ge=1, description="rounds of the whole run; the schedule runs over them (data.tasks: follows from it)"
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = FedAvgConfig()
    train: TrainConfig = TrainConfig()
    fleet: FleetConfig = FleetConfig()
    aggregate: AggregateConfig = AggregateConfig()
    eval: EvalConfig = EvalConfig()
    machine: MachineConfig = MachineConfig()

    @property
    def schedule_rounds(self) -> int:
        """Rounds over which the learning rate's schedule runs: those of a task, or all."""
        return self.data.tasks.rounds_per_task if self.data.tasks else self.rounds

    @property
    def num_tasks(self) -> int:
        """Tasks that every client learns, one after the other; 1 where there are none."""
        return self.data.tasks.count if self.data.tasks else 1

    @property
    def task_known(self) -> bool:
        """Whether a model is told an image's task, so that only the task's classes can win."""
        return self.data.tasks is not None and self.data.tasks.incremental == "task"

    def task_index(self, round: int) -> int:
        """Return how many tasks lie behind a client in a round; 0 where there are none."""
        return self.data.tasks.task_index(round) if self.data.tasks else 0

    @model_validator(mode="before")
    @classmethod
    def _rounds_of_tasks(cls, tree: Any) -> Any:
        """Let the rounds of a run of tasks follow from them, where they are left out."""
        data = tree.get("data") if isinstance(tree, dict) and "rounds" not in tree else None
        try:
            tasks = DataConfig.model_validate(data or {}).tasks
        except ValidationError:  # it will be complained of in its own place
            return tree
        return {**tree, "rounds": tasks.rounds} if tasks else tree

    @model_validator(mode="after")
    def _tasks_fit(self) -> Config:
        tasks = self.data.tasks
        if tasks is None:
            if isinstance(self.method, GemConfig | AGemConfig | FedVitConfig):
                raise ValueError(
                    f"method.name = {self.method.name}: learns task after task; add a table data.tasks, for example "
                    "-o data.tasks.count=5 -o data.tasks.classes=2"
                )
            return self
        if self.rounds != tasks.rounds:
            raise ValueError(
                f"rounds = {self.rounds}: must be {tasks.rounds}, data.tasks.count × data.tasks.rounds_per_task, "
                "or be left out"
            )
        return self

    @model_validator(mode="after")
    def _head_epochs_leave_some(self) -> Config:
        head_epochs = getattr(self.method, "head_epochs", 0)
        if head_epochs >= self.train.epochs:
            raise ValueError(
                f"method.head_epochs = {head_epochs}: must be below train.epochs = {self.train.epochs}, "
                "the rest of which trains the body"
            )
        return self

    @model_validator(mode="after")
    def _devices_can_follow(self) -> Config:
        """Let a server go back one round at most: a device keeps what it had before a round and after it."""
        if self.fleet.kind == "flower" and self.machine.checkpoint_every != 1:
            raise ValueError(
                f"machine.checkpoint_every = {self.machine.checkpoint_every}: must be 1 with fleet.kind = flower"
            )
        return self

    @model_validator(mode="after")
    def _layers_exist(self) -> Config:
        """Complain before any data is read; a timm model's own depth is only known once it is built."""
        depth = self.model.depth
        if depth is None:
            return self
        limits = {("transfl", "k"): depth, ("fedbfpt", "local_layers"): depth, ("eftvit", "local_layers"): depth - 1}
        for (method, key), limit in limits.items():
            value = getattr(self.method, key, None)
            if self.method.name == method and value is not None and value > limit:
                raise ValueError(
                    f"method.{key} = {value}: must be between 1 and {limit}, the model having {depth} layers"
                )
        return self
