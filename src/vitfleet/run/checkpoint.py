"""Checkpoints: tensors as safetensors, the rest as JSON, committed by one rename.

A checkpoint is a manifest, ``checkpoint.json``, that names the files it is made of. Files are written under
names never used before and only then is the manifest replaced, so a crash at any moment leaves the last
complete checkpoint. A client's state is written when it changed, not every round. Files that no manifest
names any more are removed after the commit.

Writing goes on beside the next round: states are values that nobody changes, and a thread of its own takes them from
the device and writes them. Until a checkpoint is complete, what it holds of a
client is read from memory, and a crash leaves the one before.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from vitfleet.errors import UserError
from vitfleet.files import sync_folder, write_atomically, write_durably
from vitfleet.message import State
from vitfleet.packing import pack_tensors
from vitfleet.wire import parse_numbers, read_payload, write_payload

MANIFEST = "checkpoint.json"
VERSION = 1
PINNED = 1 << 30  # bytes of a checkpoint: what is pinned once stays so


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is made of.

    Attributes
    ----------
    round
        The last finished round.
    server
        File of the server's state.
    clients
        File of each client's own state.
    parts
        File of each part of the server's state that is kept on its own.
    heard
        The last round in which each client took part.
    records_length, timings_length
        Bytes of the records and timings that belong to this checkpoint.
    """

    round: int
    server: str
    records_length: int
    timings_length: int
    total_up_bytes: int = 0
    total_down_bytes: int = 0
    clients: dict[int, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    last_seen: dict[int, int] = field(default_factory=dict)
    version: int = VERSION


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
        self.latest = self._read_manifest()
        self._parts: Mapping[str, State] = {}  # as they were last written or read
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._unwritten: Mapping[int, State | None] = {}  # clients' states of a checkpoint that is not complete yet
        self._sweep()

    def reload(self) -> None:
        """Go over to a checkpoint that another process committed."""
        self.latest = self._read_manifest()

    def _read_manifest(self) -> Manifest | None:
        path = self.folder / MANIFEST
        if not path.exists():
            return None
        try:
            tree = json.loads(path.read_text())
        except ValueError:
            raise UserError(f"{path}: is damaged; it was changed from outside, the run cannot go on") from None
        if tree.get("version") != VERSION:
            raise UserError(f"{path}: written by another version of vitfleet ({tree.get('version')}); start anew")
        for table in ("clients", "last_seen"):  # JSON has no integer keys
            tree[table] = {int(client): value for client, value in tree[table].items()}
        return Manifest(**tree)

    def read(self, name: str) -> State:
        """Read one of a checkpoint's states."""
        try:
            return read_payload(State, self.folder / name)
        except (UserError, FileNotFoundError) as error:
            raise UserError(f"{self.folder / name}: cannot be read ({error}); the run cannot go on") from None

    def client(self, client: int) -> State | None:
        """Return a client's own state as of the last commit; from its file memory-mapped: only what is used is read."""
        unwritten = self._unwritten
        if client in unwritten:
            return unwritten[client]
        name = self.latest.clients.get(client) if self.latest else None
        return None if name is None else self._map(name)

    def server(self) -> State:
        """Read the server's state of the last checkpoint, with its parts."""
        assert self.latest is not None
        plain = self.read(self.latest.server)
        self._parts = {key: self._map(name) for key, name in self.latest.parts.items()}
        return replace(plain, parts=dict(self._parts))

    def commit(
        self,
        round: int,
        server: State,
        changed: Mapping[int, State | None],
        last_seen: Mapping[int, int],
        lengths: tuple[int, int],
        totals: tuple[int, int],
    ) -> None:
        """Begin to write a checkpoint of a finished round, after which the one before goes."""
        self.wait()
        before = self.latest
        clients = dict(before.clients) if before else {}
        files: dict[str, State] = {}
        unwritten: dict[int, State | None] = {}
        for client, state in changed.items():
            if state is None:
                clients.pop(client, None)
                unwritten[client] = None
            else:
                clients[client] = f"client-{client:06d}-round-{round:06d}.safetensors"
                files[clients[client]] = unwritten[client] = state
        parts: dict[str, str] = {}
        for key, part in server.parts.items():
            if before is not None and self._parts.get(key) is part:
                parts[key] = before.parts[key]
            else:
                parts[key] = f"{key}-round-{round:06d}.safetensors"
                files[parts[key]] = part
        self._parts = dict(server.parts)
        name = f"server-round-{round:06d}.safetensors"
        files[name] = server
        manifest = Manifest(round, name, *lengths, *totals, clients=clients, parts=parts, last_seen=dict(last_seen))
        self._unwritten = unwritten
        self._writing = self._writer.submit(self._write, files, manifest, _Leaving.begin(files.values()))

    def _write(self, files: dict[str, State], manifest: Manifest, leaving: _Leaving | None) -> None:
        if leaving is not None:
            files = leaving.on_host(files)
        for name in list(files):
            write_payload(self.folder / name, files.pop(name), write_durably)
        sync_folder(self.folder)
        write_atomically(self.folder / MANIFEST, json.dumps(asdict(manifest)).encode())
        before, self.latest = self.latest, manifest
        self._unwritten = {}  # only now: somebody may be asking for a client's state meanwhile
        for name in _files(before) - _files(manifest):
            (self.folder / name).unlink()

    def wait(self) -> None:
        """Wait until what was committed is complete; what went wrong with it is raised here."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def mapped(self, server: State) -> State:
        """Return the server's state with every part memory-mapped from its file of the last checkpoint."""
        self.wait()
        assert self.latest is not None
        self._parts = {key: self._map(name) for key, name in self.latest.parts.items()}
        return replace(server, parts=dict(self._parts))

    def _map(self, name: str) -> State:
        path = self.folder / name
        with safe_open(path, "pt") as file:
            numbers = parse_numbers(file.metadata())
        return State(load_file(path), numbers)

    def _sweep(self) -> None:
        """Remove what a crash left behind: files that the manifest does not name."""
        named = {MANIFEST} | _files(self.latest)
        for path in self.folder.iterdir():
            if path.name not in named:
                path.unlink()


def _files(manifest: Manifest | None) -> set[str]:
    return {manifest.server, *manifest.clients.values(), *manifest.parts.values()} if manifest else set()


@dataclass(frozen=True)
class _Leaving:
    """States on their way from a GPU to the host, beside what that does next.

    Attributes
    ----------
    stream
        What they leave on.
    pinned
        Whether into memory that stays where it is, which takes a tenth of the time.
    """

    stream: torch.cuda.Stream
    pinned: bool

    @classmethod
    def begin(cls, states: Collection[State]) -> _Leaving | None:
        """Get ready to take states from a GPU as they are now; ``None`` where none of them is on one."""
        away = [tensor for state in states for tensor in state.tensors.values() if tensor.is_cuda]
        if not away:
            return None
        # Torch deals out the same 32 streams of a priority again and again, and steps are captured on one of the usual.
        stream = torch.cuda.Stream(away[0].device, priority=-1)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(away[0].device))
        return cls(stream, sum(tensor.nbytes for tensor in away) <= PINNED)

    def on_host(self, files: dict[str, State]) -> dict[str, State]:
        """Return the states once they are on the host."""

        def make(count: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(count, dtype=dtype, pin_memory=self.pinned)

        moved: dict[str, State] = {}
        with torch.cuda.stream(self.stream):
            for name, state in files.items():
                away = {key: tensor for key, tensor in state.tensors.items() if tensor.is_cuda}
                moved[name] = State({**state.tensors, **pack_tensors(away, make)}, state.numbers)
        self.stream.synchronize()
        return moved
