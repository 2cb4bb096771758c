"""Tables of the fleet: clients, schedules, simulated hardware."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vitfleet.config.base import Table
from vitfleet.config.registry import SCHEDULES, Parameters

DeviceName = Literal[
    "nano", "tx2", "nx", "agx", "orin-nano", "orin-nx", "orin-agx",
    "pi4-2gb", "pi4-4gb", "pi4-8gb", "phone", "laptop", "server-gpu",
]  # fmt: skip


class Schedule(Table):
    """When a round ends: the table ``[fleet.schedule]``."""

    kind: str = ""


class SynchronousSchedule(Schedule):
    """A round lasts until the slowest of its clients has replied."""

    kind: Literal["synchronous"] = "synchronous"


class DeadlineSchedule(Schedule):
    """A round lasts until its deadline at most; later replies are dropped."""

    kind: Literal["deadline"] = "deadline"
    seconds: float = Field(600.0, gt=0, description="longest round, in virtual seconds")


class OverSelectionSchedule(Schedule):
    """More clients are asked than needed; the first ``fleet.per_round`` replies make the round."""

    kind: Literal["over-selection"] = "over-selection"
    share: float = Field(0.3, gt=0, le=100, description="additional clients, as a fraction of fleet.per_round")


class BufferedSchedule(Schedule):
    """Clients train continuously; every ``fleet.per_round`` replies are aggregated (FedBuff, Nguyen et al., 2022)."""

    kind: Literal["buffered"] = "buffered"
    concurrency: int = Field(10, ge=1, description="clients training at any time")
    staleness: float = Field(
        0.5, ge=0, le=100, description="exponent a: an update s versions old has the weight (1 + s)^−a"
    )


for _schedule in (SynchronousSchedule, DeadlineSchedule, OverSelectionSchedule, BufferedSchedule):
    SCHEDULES.register(_schedule.model_fields["kind"].default, _schedule)(_schedule)


class FleetConfig(Table):
    """The clients, how many take part per round, and the hardware that the virtual clock assumes."""

    # These apply to clients on machines of their own (fleet.kind = "flower").
    names: tuple[str, ...] = Field(
        (), strict=False, description="flower: names of the clients, client 0 first; default: 0, 1, 2, …"
    )
    over_provision: int = Field(
        0, ge=0, description="flower: clients asked beyond per_round; the slowest are not waited for"
    )
    deadline_s: float = Field(600.0, gt=0, description="flower: seconds that a round waits for its replies")
    rejoin_s: float = Field(
        60.0, ge=0, description="flower: seconds that a round waits for a client that was lost; back, it is asked again"
    )
    join_s: float = Field(60.0, ge=0, description="flower: seconds that a server waits for all clients at its start")
    max_message_mb: float = Field(2048.0, gt=0, description="flower: largest message accepted from a client")
    kind: Literal["simulation", "flower"] = Field(
        "simulation", description="where clients run: in this process, or on machines of their own (vitfleet server)"
    )
    clients: int = Field(10, ge=1, le=10**6, description="number of clients")
    per_round: int = Field(5, ge=1, description="clients per round")
    held_out: float = Field(0.0, ge=0, lt=1, description="share of the clients that never train")
    message_dtype: Literal["fp32", "fp16", "bf16"] = Field(
        "fp32",
        description="type in which weights are sent, both ways; they are rounded to it, and float32 again where they "
        "arrive",
    )
    min_replies: int = Field(1, ge=1, description="with fewer usable replies a round changes nothing")
    devices: dict[DeviceName, Annotated[int, Field(ge=1)]] = Field(
        {}, description="hardware mix, as {agx = 2, tx2 = 2, nx = 8, nano = 8}; empty: no virtual clock"
    )
    bandwidth: float | None = Field(
        None, ge=1e-6, le=1e6, description="MB/s per client, up and down; default: the hardware profile's own"
    )
    schedule: Annotated[Schedule, Parameters(SCHEDULES)] = SynchronousSchedule()

    @model_validator(mode="after")
    def _clients_suffice(self) -> FleetConfig:
        not_asked = self.clients - self.per_round
        for key, least, most, what in (
            ("per_round", 1, self.clients, f"fleet.clients = {self.clients}"),
            ("over_provision", 0, not_asked, f"{not_asked}, the clients not asked anyway"),
            ("min_replies", 1, self.per_round, f"fleet.per_round = {self.per_round}"),
        ):
            if getattr(self, key) > most:
                raise ValueError(f"fleet.{key} = {getattr(self, key)}: must be between {least} and {what}")
        return self

    @model_validator(mode="after")
    def _names_fit(self) -> FleetConfig:
        for key, value in (("over_provision", self.over_provision), ("names", list(self.names))):
            if self.kind == "simulation" and value:
                raise ValueError(f"fleet.{key} = {value}: needs fleet.kind = flower")
        if self.names and (len(self.names) != self.clients or len(set(self.names)) != self.clients):
            raise ValueError(
                f"fleet.names = {list(self.names)}: must be fleet.clients = {self.clients} different names"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> FleetConfig:
        schedule = self.schedule
        if not isinstance(schedule, SynchronousSchedule) and self.kind == "flower":
            raise ValueError(
                f"fleet.schedule.kind = {schedule.kind!r}: needs fleet.kind = simulation; "
                "on Flower see fleet.deadline_s and fleet.over_provision"
            )
        if not isinstance(schedule, SynchronousSchedule) and not self.devices:
            raise ValueError(f"fleet.schedule.kind = {schedule.kind!r}: needs hardware profiles; set fleet.devices")
        if isinstance(schedule, OverSelectionSchedule) and self.asked > self.clients:
            raise ValueError(
                f"fleet.schedule.share = {schedule.share}: would ask {self.asked} of fleet.clients = {self.clients}"
            )
        if isinstance(schedule, BufferedSchedule) and schedule.concurrency + self.per_round > self.clients:
            # A client that has just replied is not asked again before the next aggregation.
            most = self.clients - self.per_round
            raise ValueError(
                f"fleet.schedule.concurrency = {schedule.concurrency}: must be at most "
                f"fleet.clients − fleet.per_round = {most}"
            )
        return self

    @model_validator(mode="after")
    def _enough_clients_train(self) -> FleetConfig:
        needed = self.asked + (self.schedule.concurrency if isinstance(self.schedule, BufferedSchedule) else 0)
        left = self.clients - self.num_held_out
        if self.held_out and needed > left:
            raise ValueError(
                f"fleet.held_out = {self.held_out}: leaves {left} of fleet.clients = {self.clients} to train, and a "
                f"round needs {needed}; lower it or fleet.per_round = {self.per_round}"
            )
        return self

    @property
    def num_held_out(self) -> int:
        """Clients that never train: the nearest number to their share, but at least one where there is a share."""
        return max(1, round(self.held_out * self.clients)) if self.held_out else 0

    @property
    def asked(self) -> int:
        """Clients asked per round."""
        extra = self.schedule.share if isinstance(self.schedule, OverSelectionSchedule) else 0.0
        return ceil(self.per_round * (1 + extra)) + self.over_provision

    def name_of(self, client: int) -> str:
        """Return the name of a client."""
        return self.names[client] if self.names else str(client)
