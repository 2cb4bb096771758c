"""Tables of the fleet: clients, schedules, simulated hardware."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vitfleet.config.base import Table

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
