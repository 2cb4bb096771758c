"""Checkpoints: tensors as safetensors, everything else as JSON, committed by one rename.

A checkpoint is a manifest, ``checkpoint.json``, that names the files it consists of. Files are written under
names that were never used before, and only then is the manifest replaced, so a crash at any moment leaves the last
complete checkpoint. A client's state is written when it changed, not in every round. Files that are no longer named by
the manifest are removed after the commit.

Writing overlaps with the next round: states are values that are never modified, and a background thread copies them
from the device and writes them. Until a checkpoint is complete, the client states in it are read from memory, and a
crash leaves the previous checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vitfleet.errors import UserError
from vitfleet.files import sync_folder, write_atomically, write_durably
from vitfleet.message import State
from vitfleet.run.host_copy import HostCopy
from vitfleet.run.in_flight import InFlight, is_past_state
from vitfleet.run.state import RunState
from vitfleet.wire import parse_numbers, read_payload, write_payload

MANIFEST = "checkpoint.json"
VERSION = 2


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes
    ----------
    round
        The last finished round.
    server
        File of the server state.
    records_length, timings_length
        Length in bytes of the records and timings up to this checkpoint.
    total_up_bytes, total_down_bytes, last_seen, update_sizes, stop_reason
        See :class:`vitfleet.run.state.RunState`.
    virtual_seconds
        The virtual clock.
    clients
        File of each client's state.
    parts
        File of each part of the server state that is stored separately.
    """

    round: int
    server: str
    records_length: int
    timings_length: int
    total_up_bytes: int = 0
    total_down_bytes: int = 0
    virtual_seconds: float = 0.0
    stop_reason: str | None = None
    clients: dict[int, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    last_seen: dict[int, int] = field(default_factory=dict)
    update_sizes: list[float] = field(default_factory=list)

    def files(self) -> set[str]:
        """Return the names of the checkpoint's files."""
        return {self.server, *self.clients.values(), *self.parts.values()}


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest in a checkpoint folder; ``None`` before the first checkpoint."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        tree = json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path}: is damaged; it was modified from outside, the run cannot be resumed") from None
    written_by = tree.pop("version", None)
    if written_by != VERSION:
        raise UserError(f"{path}: written by another version of vitfleet (format {written_by}); start a new run")
    for table in ("clients", "last_seen"):  # JSON has no integer keys
        tree[table] = {int(client): value for client, value in tree[table].items()}
    return Manifest(**tree)


@dataclass(frozen=True)
class StoredStates:
    """The states in a checkpoint, for reading: nothing in its folder is changed.

    Attributes
    ----------
    folder
        The checkpoint's folder.
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def of_run(cls, run_folder: Path) -> StoredStates:
        """Return the states in a run's last checkpoint."""
        folder = run_folder / "checkpoint"
        manifest = read_manifest(folder)
        if manifest is None:
            raise UserError(f"{run_folder}: has no checkpoint yet; resume the run with `vitfleet resume {run_folder}`")
        return cls(folder, manifest)

    def server(self) -> State:
        """Read the server's state, without its separately stored parts."""
        return read_payload(State, self.folder / self.manifest.server)

    def client(self, client: int) -> State | None:
        """Read a client's state; ``None`` if it has none."""
        name = self.manifest.clients.get(client)
        return None if name is None else read_payload(State, self.folder / name)

    def clients(self) -> Iterator[State]:
        """Read the states of all clients that have one, one after the other."""
        for _, name in sorted(self.manifest.clients.items()):
            yield read_payload(State, self.folder / name)


class Checkpoints:
    """The checkpoints of one run folder.

    Attributes
    ----------
    latest
        The last complete checkpoint, or ``None`` before the first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoint"
        self.folder.mkdir(exist_ok=True)
        self.latest = read_manifest(self.folder)
        self._parts: Mapping[str, State] = {}  # as last written or read
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._unwritten: Mapping[int, State | None] = {}  # client states of a checkpoint that is not complete yet
        self._remove_unnamed_files()

    def reload(self) -> None:
        """Switch to a checkpoint that another process committed."""
        self.latest = read_manifest(self.folder)

    def read(self, name: str) -> State:
        """Read one of the checkpoint's states."""
        try:
            return read_payload(State, self.folder / name)
        except (UserError, FileNotFoundError) as error:
            raise UserError(f"{self.folder / name}: cannot be read ({error}); the run cannot be resumed") from None

    def client(self, client: int) -> State | None:
        """Return a client's state as of the last commit. Its file is memory-mapped: only what is used is read."""
        unwritten = self._unwritten
        if client in unwritten:
            return unwritten[client]
        name = self.latest.clients.get(client) if self.latest else None
        return None if name is None else self._map(name)

    def clients(self) -> list[int]:
        """Return the clients that have a state in the last complete checkpoint, in ascending order."""
        return sorted(self.latest.clients) if self.latest else []

    def load(self, device: torch.device) -> RunState | None:
        """Return the state of the last checkpoint, without what the records hold; ``None`` before the first.

        Weights are moved to the device. Parts stay on the host, memory-mapped: a method that needs one on the device
        moves it there.
        """
        if self.latest is None:
            return None
        manifest = self.latest
        parts = {key: self._map(name) for key, name in manifest.parts.items()}
        self._parts = {key: part.to(device) if is_past_state(key) else part for key, part in parts.items()}
        stored = replace(self.read(manifest.server).to(device), parts=dict(self._parts))
        server, in_flight = InFlight.unpack(stored, manifest.virtual_seconds)
        return RunState(
            server,
            manifest.round,
            manifest.total_up_bytes,
            manifest.total_down_bytes,
            last_seen=dict(manifest.last_seen),
            in_flight=in_flight,
            update_sizes=tuple(manifest.update_sizes),
            stop_reason=manifest.stop_reason,
        )

    def commit(self, state: RunState, changed_clients: Mapping[int, State | None], lengths: tuple[int, int]) -> None:
        """Start to write a checkpoint, which then replaces the previous one.

        Parameters
        ----------
        changed_clients
            States of the clients that changed since the last commit; ``None`` for a client that has none any more.
        lengths
            Bytes of the records and of the timings.
        """
        self.wait()
        files: dict[str, State] = {}
        clients = dict(self.latest.clients) if self.latest else {}
        for client, client_state in changed_clients.items():
            if client_state is None:
                clients.pop(client, None)
            else:
                clients[client] = f"client-{client:06d}-round-{state.round:06d}.safetensors"
                files[clients[client]] = client_state
        stored = state.in_flight.pack(state.server)
        parts = self._part_files(stored, state.round)
        written = self.latest.files() if self.latest else set()
        files |= {name: stored.parts[key] for key, name in parts.items() if name not in written}
        self._parts = dict(stored.parts)
        server = f"server-round-{state.round:06d}.safetensors"
        files[server] = stored
        manifest = Manifest(
            state.round,
            server,
            *lengths,
            state.total_up_bytes,
            state.total_down_bytes,
            state.in_flight.now,
            state.stop_reason,
            clients,
            parts,
            dict(state.last_seen),
            list(state.update_sizes),
        )
        self._unwritten = dict(changed_clients)
        self._writing = self._writer.submit(self._write, files, manifest, HostCopy.begin(files.values()))

    def _part_files(self, stored: State, round: int) -> dict[str, str]:
        """Return the file of each part: a new one where the part changed since the last commit."""
        previous = self.latest.parts if self.latest else {}
        return {
            key: previous[key]
            if key in previous and self._parts.get(key) is part
            else f"{key}-round-{round:06d}.safetensors"
            for key, part in stored.parts.items()
        }

    def _write(self, files: dict[str, State], manifest: Manifest, host_copy: HostCopy | None) -> None:
        if host_copy is not None:
            files = host_copy.finish(files)
        for name in list(files):
            write_payload(self.folder / name, files.pop(name), write_durably)
        sync_folder(self.folder)
        write_atomically(self.folder / MANIFEST, json.dumps({**asdict(manifest), "version": VERSION}).encode())
        previous, self.latest = self.latest, manifest
        self._unwritten = {}  # only now: a client's state may be requested during the write
        for name in (previous.files() if previous else set()) - manifest.files():
            (self.folder / name).unlink()

    def wait(self) -> None:
        """Wait until the last commit is complete. An error in writing it is raised here."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def map_parts(self, server: State) -> State:
        """Return the server state with every part memory-mapped from its file in the last checkpoint."""
        self.wait()
        assert self.latest is not None
        mapped = {key: self._map(self.latest.parts[key]) for key in server.parts}
        self._parts = {**self._parts, **mapped}
        return replace(server, parts=mapped)

    def _map(self, name: str) -> State:
        path = self.folder / name
        with safe_open(path, "pt") as file:
            numbers = parse_numbers(file.metadata())
        return State(load_file(path), numbers)

    def _remove_unnamed_files(self) -> None:
        """Remove what a crash left behind: files that the manifest does not name."""
        named = {MANIFEST} | (self.latest.files() if self.latest else set())
        for path in self.folder.iterdir():
            if path.name not in named:
                path.unlink()
