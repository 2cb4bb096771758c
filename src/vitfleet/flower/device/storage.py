"""A client's files of one run: the initial broadcast, its state after the last rounds, cached views, its own model.

Each run has a folder. A state file is named after its round. Every request from the server names the last round whose
reply it accepted, and the client continues from its state after that round. So a round whose reply was late, lost or
rejected does not count, and a server that was killed during a round can repeat it. A client therefore stores two
states: the one before a round and the one after it.

Beside the runs' folders is one with a cache of decoded images. All of them count towards the owner's limit. The cache
gives way to runs' files: it only saves time.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from vitfleet.data.images import Shard
from vitfleet.errors import RefusedRequestError, UserError
from vitfleet.files import MODEL_FILE
from vitfleet.message import Message, State
from vitfleet.training.views.cache import ViewStore, digest
from vitfleet.training.views.frozen import VIEWS
from vitfleet.wire import PayloadType, encoded_size, read_payload, write_payload

MEGABYTE = 1_000_000
IMAGES_FOLDER = "images"  # of the cache of decoded images, in the folder of all runs


def free_bytes(root: Path, limit_mb: int) -> int:
    """Return how many bytes the owner's limit leaves in the folder of all runs; negative where there are too many."""
    sizes = [path.stat().st_size for path in root.glob("*/*") if path.is_file()]  # `root` itself has links to them
    return limit_mb * MEGABYTE - sum(sizes)


class ClientStorage:
    """Reads and writes a client's files of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_run(cls, root: Path, run_id: str) -> ClientStorage:
        """Return the storage of a run. The server chooses the run id, so the id itself is never used as a path."""
        return cls(root / sha256(run_id.encode()).hexdigest()[:16])

    def check_room(self, new_bytes: int, limit_mb: int) -> None:
        """Check that the owner's limit leaves room for a file of this size, before it is written.

        The cache of decoded images is deleted if there is no room beside it.
        """
        root = self.folder.parent
        if free_bytes(root, limit_mb) < new_bytes:
            for cached in (root / IMAGES_FOLDER).glob("*"):
                cached.unlink(missing_ok=True)
        missing = new_bytes - free_bytes(root, limit_mb)
        if missing > 0:
            raise RefusedRequestError(
                f"the files of this client's runs would take {limit_mb + missing / MEGABYTE:,.1f} MB; its owner allows "
                f"{limit_mb:,} (vitfleet client --limit disk_mb=…), and can delete the folders of runs that are over"
            )

    def load_base(self) -> Message | None:
        """Return the initial broadcast; ``None`` if it is missing."""
        return self._read(Message, self._base_path)

    def save_base(self, base: Message) -> None:
        """Write the initial broadcast and delete all states: only a new client receives it, and that has no state."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("after-*"):
            path.unlink()
        write_payload(self._base_path, base)

    def load_state(self, round: int) -> State | None:
        """Return the state after a round; ``None`` if it is missing. An empty state means that none is needed."""
        return self._read(State, self._state_path(round))

    def save_state(self, round: int, state: State | None, last_round: int | None) -> None:
        """Write the state after a round and delete all others except the one after ``last_round``."""
        write_payload(self._state_path(round), state or State())
        needed = {self._state_path(number) for number in (round, last_round) if number is not None}
        for path in set(self.folder.glob("after-*")) - needed:
            path.unlink()

    def load_views(self, version: str) -> Tensor | None:
        """Return the cached views of a version; ``None`` if there are none, or others."""
        views = self._read(State, self._views_path(version))
        return None if views is None else views.tensors[VIEWS]

    def save_views(self, version: str, views: Tensor, limit_mb: int) -> None:
        """Write cached views in the place of all others, if the owner's limit leaves room for them."""
        for path in self.folder.glob("views-*"):
            path.unlink()
        state = State({VIEWS: views.cpu()})
        self.check_room(encoded_size(state), limit_mb)
        write_payload(self._views_path(version), state)

    @property
    def model_path(self) -> Path:
        """File of the client's own whole model, as it trained it last."""
        return self.folder / MODEL_FILE

    def model_bytes(self) -> int:
        """Return the size of that file; 0 if there is none yet."""
        return self.model_path.stat().st_size if self.model_path.exists() else 0

    @property
    def _base_path(self) -> Path:
        return self.folder / "base.safetensors"

    def _state_path(self, round: int) -> Path:
        return self.folder / f"after-{round:06d}.safetensors"

    def _views_path(self, version: str) -> Path:
        return self.folder / f"views-{version}.safetensors"

    def _read(self, kind: type[PayloadType], path: Path) -> PayloadType | None:
        try:
            return read_payload(kind, path)
        except (FileNotFoundError, UserError):  # a damaged file counts as missing: the server sends its content again
            return None


class StoredViews(ViewStore):
    """Cached views in a client's storage of a run: they outlast the process, within the owner's limit."""

    def __init__(self, storage: ClientStorage, limit_mb: int, device: torch.device, max_bytes: float) -> None:
        super().__init__(max_bytes)
        self.storage = storage
        self.limit_mb = limit_mb
        self.device = device
        self._digest_of_images: tuple[Tensor, str] | None = None

    def images_version(self, shard: Shard) -> str:
        """Return a hash of the images: those of another process may be others."""
        images = shard.images.images
        if self._digest_of_images is None or self._digest_of_images[0] is not images:
            self._digest_of_images = images, digest(images)
        return f"{self._digest_of_images[1]} {digest(shard.index)}"

    def load(self, version: str) -> Tensor | None:
        """Return the views of a version, from memory or from the file."""
        held = super().load(version)
        if held is not None:
            return held
        stored = self.storage.load_views(version)
        return None if stored is None else stored.to(self.device)

    def save(self, version: str, shard: Shard, values: Tensor) -> None:
        """Keep views in memory and in a file."""
        self.storage.save_views(version, values, self.limit_mb)
        super().save(version, shard, values)
