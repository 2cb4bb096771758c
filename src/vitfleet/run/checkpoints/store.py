"""Checkpoints: tensors as safetensors, everything else as JSON, committed by one rename.

A checkpoint is a manifest, ``checkpoint.json``, that names the files it consists of. Files are written under
names that were never used before, and only then is the manifest replaced, so a crash at any moment leaves the last
complete checkpoint. A client's state is written when it changed, not in every round. The checkpoint before the last is
kept in the folder ``previous``, with the files that only it names. A manifest holds the checksums of its files. When a
run is opened they are compared; if a file is damaged, the run goes on from the checkpoint before.

Writing overlaps with the next round: states are values that are never modified, and a background thread copies them
from the device and writes them. Until a checkpoint is complete, the client states in it are read from memory, and a
crash leaves the previous checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from vitfleet.errors import UserError
from vitfleet.files import CHECKPOINT_FOLDER, RECORDS_FILE, Data, refuse_links, sync_folder, write_durably
from vitfleet.message import State
from vitfleet.packing import pack_tensors
from vitfleet.run.checkpoints.manifest import (
    MANIFEST,
    OWN_FILES,
    PREVIOUS,
    DamagedManifestError,
    Manifest,
    find_file,
    keep_states,
    kept_folder,
    read_manifest,
    read_own_files,
    write_manifest,
    write_own_files,
)
from vitfleet.run.state import InFlight, RunState, is_past_state
from vitfleet.wire import parse_numbers, read_payload, write_payload

# Names of parts of a stored server state: what the server optimiser keeps, the head of ``[head.last]``, and the sums of
# heads of earlier tasks
_MOMENTS, _LAST_HEAD, _HEAD_SUMS = "moments", "last-head", "head-sums"

logger = logging.getLogger(__name__)

TEMPORARY = {f".{name}.tmp" for name in (MANIFEST, OWN_FILES)}  # what a crash leaves of these
MAX_PINNED_BYTES = 1 << 30  # per checkpoint: torch does not return pinned memory to the system


@dataclass(frozen=True)
class StoredStates:
    """The states in a checkpoint, for reading: nothing in its folder is changed."""

    folder: Path
    manifest: Manifest

    @classmethod
    def of_run(cls, run_folder: Path) -> StoredStates:
        """Return the states in a run's last checkpoint."""
        return cls.of_folder(run_folder / CHECKPOINT_FOLDER)

    @classmethod
    def of_folder(cls, folder: Path) -> StoredStates:
        """Return the states in a folder: that of a checkpoint, or one of those kept after each task."""
        manifest = read_manifest(folder)
        if manifest is None:
            run = folder.parent
            raise UserError(f"{run}: has no checkpoint yet; resume the run with `vitfleet resume {run}`")
        return cls(folder, manifest)

    def server(self) -> State:
        """Read the server's state, without its separately stored parts."""
        return _read_state(self.folder / self.manifest.server)

    def last_head(self) -> State | None:
        """Read the head of ``[head.last]``; ``None`` before it is solved."""
        name = self.manifest.parts.get(_LAST_HEAD)
        return None if name is None else _read_state(self.folder / name)

    def client(self, client: int) -> State | None:
        """Read a client's state; ``None`` if it has none."""
        name = self.manifest.clients.get(client)
        return None if name is None else _read_state(self.folder / name)

    def clients(self) -> Iterator[State]:
        """Read the states of all clients that have one, one after the other."""
        for _, name in sorted(self.manifest.clients.items()):
            yield _read_state(self.folder / name)


class Checkpoints:
    """The checkpoints of one run folder.

    Of several processes one verifies the files. With ``keep_every`` rounds of a task, the states at the end of each
    task are kept.
    """

    def __init__(self, folder: Path, verify: bool = True, keep_every: int | None = None) -> None:
        self.folder = folder / CHECKPOINT_FOLDER
        self.keep_every = keep_every
        refuse_links(self.folder, self.folder / PREVIOUS)
        self.folder.mkdir(exist_ok=True)
        self.latest: Manifest | None = None
        if verify:
            self.latest = self._last_sound()
            self._keep()  # a crash may have come between a checkpoint and its copy
            self._sort_files()
        else:
            self.reload()
        self._parts: Mapping[str, State] = {}  # as last written or read
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._unwritten: Mapping[int, State | None] = {}  # client states of a checkpoint that is not complete yet

    def reload(self) -> None:
        """Switch to a checkpoint that another process committed."""
        self.latest = read_manifest(self.folder)

    def _last_sound(self) -> Manifest | None:
        """Return the last checkpoint whose files are sound, and make it the last one; ``None`` before the first."""
        before = self.folder / PREVIOUS
        latest, damage = _read_sound(self.folder, (self.folder, before))
        if damage is None and (latest is not None or not (before / MANIFEST).exists()):
            return latest
        previous, _ = _read_sound(before, (before, self.folder))
        damage = damage or f"{self.folder / MANIFEST} is missing"
        if previous is None:
            raise UserError(
                f"{damage}, and there is no earlier checkpoint that is sound: the weights of the run are lost, its "
                f"records are in {self.folder.parent / RECORDS_FILE}; start a new run"
            )
        logger.warning("%s; the run goes on from its checkpoint of round %d", damage, previous.round)
        for name in previous.files():
            if (path := find_file(name, (before,))) is not None:
                path.replace(self.folder / name)
        sync_folder(self.folder)
        write_manifest(self.folder, previous)
        return previous

    def read(self, name: str) -> State:
        """Read one of the checkpoint's states."""
        return _read_state(self.folder / name)

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
        self._parts = {
            key: part.to(device) if is_past_state(key) or key in (_MOMENTS, _LAST_HEAD, _HEAD_SUMS) else part
            for key, part in parts.items()
        }
        parts = dict(self._parts)
        moments, last_head, head_sums = (parts.pop(key, State()) for key in (_MOMENTS, _LAST_HEAD, _HEAD_SUMS))
        stored = replace(self.read(manifest.server).to(device), parts=parts)
        server, in_flight = InFlight.unpack(stored, manifest.virtual_seconds)
        return RunState(
            server,
            manifest.round,
            manifest.total_up_bytes,
            manifest.total_down_bytes,
            last_seen=dict(manifest.last_seen),
            in_flight=in_flight,
            update_sizes=tuple(manifest.update_sizes),
            moments=moments,
            last_head=last_head,
            head_sums=head_sums,
            stop_reason=manifest.stop_reason,
        )

    def commit(self, state: RunState, changed_clients: Mapping[int, State | None], lengths: tuple[int, int]) -> None:
        """Start to write a checkpoint, which then replaces the previous one.

        ``changed_clients`` has ``None`` for a client that has no state any more; ``lengths`` are the bytes of the
        records and of the timings.
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
        own_parts = {_MOMENTS: state.moments, _LAST_HEAD: state.last_head, _HEAD_SUMS: state.head_sums}
        more = {key: part for key, part in own_parts.items() if part.tensors}
        stored = replace(stored, parts={**stored.parts, **more})
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
        self._writing = self._writer.submit(self._write, files, manifest, _HostCopy.begin(files.values()))

    def _part_files(self, stored: State, round: int) -> dict[str, str]:
        """Return the file of each part: a new one where the part changed since the last commit."""
        previous = self.latest.parts if self.latest else {}
        return {
            key: previous[key]
            if key in previous and self._parts.get(key) is part
            else f"{key}-round-{round:06d}.safetensors"
            for key, part in stored.parts.items()
        }

    def _write(self, files: dict[str, State], manifest: Manifest, host_copy: _HostCopy | None) -> None:
        if host_copy is not None:
            files = host_copy.finish(files)
        checksums, new = dict(self.latest.checksums) if self.latest else {}, list(files)
        self.begin(new)
        try:
            for name in new:
                write_payload(self.folder / name, files.pop(name), _hashing_writer(name, checksums))
        except OSError:  # the disk is full or has become read-only: what was written is of no use
            for name in new:
                with suppress(OSError):
                    (self.folder / name).unlink(missing_ok=True)
            raise
        sync_folder(self.folder)
        if self.latest is not None:
            (self.folder / PREVIOUS).mkdir(exist_ok=True)
            write_manifest(self.folder / PREVIOUS, self.latest)
        manifest = manifest.with_checksums(checksums)
        write_manifest(self.folder, manifest)
        self.latest = manifest
        self._unwritten = {}  # only now: a client's state may be requested during the write
        self._keep()
        self._sort_files()

    def begin(self, new: Iterable[str]) -> None:
        """Say which files are about to be written, before the first of them is: a crash may leave some of them."""
        previous, _ = _read_sound(self.folder / PREVIOUS, ())
        named = [manifest.files() for manifest in (self.latest, previous) if manifest is not None]
        write_own_files(self.folder, set(new).union(*named))

    def _keep(self) -> None:
        """Keep the states of the last checkpoint if it is at the end of a task."""
        if self.latest is not None and self.keep_every is not None and self.latest.round % self.keep_every == 0:
            target = kept_folder(self.folder.parent, self.latest.round // self.keep_every)
            keep_states(self.folder, self.latest, target)

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

    def _sort_files(self) -> None:
        """Move files that only the checkpoint before the last names to its folder; remove those that none names.

        Only files of checkpoints are removed: whatever else is in the folder is not theirs.
        """
        before = self.folder / PREVIOUS
        latest = set() if self.latest is None else self.latest.files()
        manifest, _ = _read_sound(before, ())
        previous = set() if manifest is None else manifest.files()
        own = latest | previous | read_own_files(self.folder)
        own = own - {MANIFEST, OWN_FILES} | TEMPORARY
        for path in [path for path in self.folder.iterdir() if path.name in own - latest]:
            if path.name in previous:
                path.replace(before / path.name)
            else:
                path.unlink()
        for path in list(before.iterdir()) if before.is_dir() else ():
            if path.name in own and path.name not in previous - latest:
                path.unlink()


def _read_sound(folder: Path, folders: tuple[Path, ...]) -> tuple[Manifest | None, str | None]:
    """Return a folder's checkpoint, or what is wrong with it; without ``folders`` its files are not read."""
    try:
        manifest = read_manifest(folder)
    except DamagedManifestError as error:
        return None, str(error)
    damage = manifest.damage(folders) if manifest is not None and folders else None
    return (manifest, None) if damage is None else (None, damage)


def _read_state(path: Path) -> State:
    try:
        return read_payload(State, path)
    except (UserError, FileNotFoundError) as error:
        raise UserError(f"{path}: cannot be read ({error}); resume the run to go back to a sound checkpoint") from None


def _hashing_writer(name: str, checksums: dict[str, str]) -> Callable[[Path, Data], None]:
    """Return a function that writes a file durably and notes its checksum."""

    def write(path: Path, data: Data) -> None:
        digest = sha256()

        def hashed() -> Iterator[bytes | memoryview]:
            for chunk in [data] if isinstance(data, bytes) else data:
                digest.update(chunk)
                yield chunk

        write_durably(path, hashed())
        checksums[name] = digest.hexdigest()

    return write


@dataclass(frozen=True)
class _HostCopy:
    """A copy of states from a GPU to the host, while the GPU continues with the next round."""

    stream: torch.cuda.Stream  # the CUDA stream of the copy
    pinned: bool  # whether the copy goes to pinned memory, which takes a tenth of the time

    @classmethod
    def begin(cls, states: Iterable[State]) -> _HostCopy | None:
        """Prepare to copy states as they are now; ``None`` if none of them is on a GPU."""
        on_gpu = [tensor for state in states for tensor in state.tensors.values() if tensor.is_cuda]
        if not on_gpu:
            return None
        # Torch reuses the same 32 streams per priority, and steps are captured on one of default priority.
        stream = torch.cuda.Stream(on_gpu[0].device, priority=-1)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(on_gpu[0].device))
        return cls(stream, sum(tensor.nbytes for tensor in on_gpu) <= MAX_PINNED_BYTES)

    def finish(self, files: dict[str, State]) -> dict[str, State]:
        """Return the states once they are on the host."""

        def make(count: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(count, dtype=dtype, pin_memory=self.pinned)

        copies: dict[str, State] = {}
        with torch.cuda.stream(self.stream):
            for name, state in files.items():
                on_gpu = {key: tensor for key, tensor in state.tensors.items() if tensor.is_cuda}
                copies[name] = State({**state.tensors, **pack_tensors(on_gpu, make)}, state.numbers)
        self.stream.synchronize()
        return copies
