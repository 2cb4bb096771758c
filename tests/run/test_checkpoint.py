"""Checkpoints: what is committed is read back, and a crash at any moment leaves the last complete one."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vitfleet import files
from vitfleet.costs.virtual_clock import ClientInFlight
from vitfleet.errors import UserError
from vitfleet.message import State
from vitfleet.run.checkpoints import store
from vitfleet.run.checkpoints.manifest import read_manifest
from vitfleet.run.checkpoints.store import Checkpoints
from vitfleet.run.state import InFlight, RunState


def run_state(
    round: int, last_seen: Mapping[int, int], totals: tuple[int, int] = (0, 0), stop_reason: str | None = None
) -> RunState:
    return RunState(state(round), round, *totals, last_seen=last_seen, stop_reason=stop_reason)


def state(value: float) -> State:
    return State({"w": torch.full((3,), value), "b": torch.tensor(value)}, {"list": [1, 2], "value": value})


def assert_state(actual: State, value: float) -> None:
    expected = state(value)
    assert actual.numbers == expected.numbers
    assert set(actual.tensors) == set(expected.tensors)
    assert all(torch.equal(actual.tensors[name], expected.tensors[name]) for name in expected.tensors)


def commit_first(checkpoints: Checkpoints) -> None:
    checkpoints.commit(run_state(1, {0: 1, 3: 1}, (7, 8)), {0: state(10), 3: state(13)}, (100, 40))
    checkpoints.wait()


def commit_second(checkpoints: Checkpoints) -> None:
    changed = {0: None, 3: state(23), 5: state(25)}
    checkpoints.commit(run_state(2, {0: 1, 3: 2, 5: 2}, (14, 16), "no progress"), changed, (200, 80))
    checkpoints.wait()


def assert_first(checkpoints: Checkpoints) -> None:
    latest = checkpoints.latest
    assert latest is not None
    assert (latest.round, latest.records_length, latest.timings_length) == (1, 100, 40)
    assert (latest.total_up_bytes, latest.total_down_bytes, latest.last_seen) == (7, 8, {0: 1, 3: 1})
    assert latest.stop_reason is None
    assert_state(checkpoints.read(latest.server), 1)
    assert set(latest.clients) == {0, 3}
    assert_state(checkpoints.read(latest.clients[0]), 10)
    assert_state(checkpoints.read(latest.clients[3]), 13)


def assert_second(checkpoints: Checkpoints) -> None:
    latest = checkpoints.latest
    assert latest is not None
    assert (latest.round, latest.records_length, latest.timings_length) == (2, 200, 80)
    assert (latest.total_up_bytes, latest.total_down_bytes, latest.last_seen) == (14, 16, {0: 1, 3: 2, 5: 2})
    assert latest.stop_reason == "no progress"
    assert_state(checkpoints.read(latest.server), 2)
    assert set(latest.clients) == {3, 5}
    assert_state(checkpoints.read(latest.clients[3]), 23)
    assert_state(checkpoints.read(latest.clients[5]), 25)


def assert_only_named(checkpoints: Checkpoints) -> None:
    latest = checkpoints.latest
    named = {"checkpoint.json", latest.server, *latest.clients.values()} if latest else set()
    assert {path.name for path in checkpoints.folder.iterdir()} - {"previous", "files.json"} == named
    before = read_manifest(checkpoints.folder / "previous")
    kept = {"checkpoint.json"} | before.files() - named if before else set()
    assert {path.name for path in (checkpoints.folder / "previous").glob("*")} == kept


def test_commit_can_be_read_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest is None
    commit_first(checkpoints)
    assert_first(checkpoints)
    assert_first(Checkpoints(tmp_path))
    commit_second(checkpoints)
    assert_second(checkpoints)
    assert_second(Checkpoints(tmp_path))
    assert_only_named(checkpoints)


def test_commit_does_not_rewrite_unchanged_clients(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    commit_first(checkpoints)
    assert checkpoints.latest is not None
    before = checkpoints.folder / checkpoints.latest.clients[0]
    stamp = before.stat().st_mtime_ns, before.stat().st_ino
    checkpoints.commit(run_state(2, {}), {3: state(23)}, (0, 0))
    checkpoints.wait()
    assert (before.stat().st_mtime_ns, before.stat().st_ino) == stamp
    again = Checkpoints(tmp_path)
    assert again.latest is not None
    assert_state(again.read(again.latest.clients[0]), 10)


def test_files_of_a_checkpoint_that_was_begun_are_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    commit_first(checkpoints)
    begun = ("server-round-000002.safetensors", "client-000009-round-000002.safetensors")
    checkpoints.begin(begun)
    for name in (".checkpoint.json.tmp", *begun):
        (tmp_path / "checkpoint" / name).write_bytes(b"half")
    again = Checkpoints(tmp_path)
    assert_first(again)
    assert_only_named(again)


def test_a_checkpoint_of_another_format_version_is_rejected(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    commit_first(checkpoints)
    manifest = checkpoints.folder / "checkpoint.json"
    for version in (1, 999):
        tree = {**json.loads(manifest.read_text()), "version": version}
        manifest.write_text(json.dumps(tree))
        with pytest.raises(UserError, match=f"another version of vitfleet .format {version}.; start a new run"):
            Checkpoints(tmp_path)


def test_load_returns_the_committed_state(tmp_path: Path) -> None:
    flights = (ClientInFlight(2.5, 3, 1, -1, 0.5), ClientInFlight(4.0, 1, 0, 2, 0.0))
    in_flight = InFlight(1.5, flights, {0: State({"w": torch.zeros(1)}), 1: State({"w": torch.ones(1)})})
    server = replace(state(4), parts={"features-000001": state(5)})
    committed = RunState(server, 2, 7, 8, {0: 1, 3: 2}, in_flight=in_flight, stop_reason="no progress")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load(torch.device("cpu")) is None
    checkpoints.commit(committed, {}, (0, 0))
    checkpoints.wait()
    again = Checkpoints(tmp_path)
    loaded = again.load(torch.device("cpu"))
    assert loaded is not None
    assert_state(loaded.server, 4)
    assert_state(loaded.server.parts["features-000001"], 5)
    assert set(loaded.server.parts) == {"features-000001"}
    assert loaded.in_flight == in_flight
    assert replace(loaded, server=server, in_flight=in_flight) == committed
    # Parts and past states that did not change are not written again.
    before = again.latest
    again.commit(replace(loaded, round=3), {}, (0, 0))
    again.wait()
    assert before is not None
    assert again.latest is not None
    changed = {key for key, name in again.latest.parts.items() if name != before.parts[key]}
    assert changed == {"flights"}


class Crash(BaseException):
    """Stands for the end of the process."""


class CrashCounter:
    """Counts disk operations and crashes before the n-th."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.done = 0

    def guard(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **keywords: Any) -> Any:
            if self.done == self.limit:
                raise Crash
            self.done += 1
            return action(*arguments, **keywords)

        return guarded


def crash_at(limit: int, folder: Path, commit: Callable[[Checkpoints], None]) -> bool:
    """Commit and crash at a disk operation; return whether the commit got that far."""
    checkpoints = Checkpoints(folder)
    counter = CrashCounter(limit)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "fsync"), (os, "replace"), (Path, "replace"), (Path, "unlink"), (Path, "open")):
            patch.setattr(owner, name, counter.guard(getattr(owner, name)))
        try:
            commit(checkpoints)
        except Crash:
            return True
    return False


def test_a_crash_at_any_disk_operation_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    rounds: list[int] = []
    for limit in itertools.count():
        folder = tmp_path / str(limit)
        folder.mkdir()
        commit_first(Checkpoints(folder))
        crashed = crash_at(limit, folder, commit_second)
        again = Checkpoints(folder)
        assert again.latest is not None
        rounds.append(again.latest.round)
        assert_first(again) if rounds[-1] == 1 else assert_second(again)
        assert_only_named(again)
        if rounds[-1] == 1:
            commit_second(again)  # as the resumed run will
        assert_second(Checkpoints(folder))
        if not crashed:
            break
    # Four files are written, in several operations each; the manifest is replaced once and late.
    assert len(rounds) > 12
    assert rounds == sorted(rounds)
    assert rounds.index(2) > 10


def test_a_crash_during_the_first_commit_leaves_no_checkpoint(tmp_path: Path) -> None:
    for limit in itertools.count():
        folder = tmp_path / str(limit)
        folder.mkdir()
        crashed = crash_at(limit, folder, commit_first)
        again = Checkpoints(folder)
        assert_only_named(again)
        if again.latest is None:
            commit_first(again)
        assert_first(Checkpoints(folder))
        if not crashed:
            break
    assert limit > 8


@pytest.mark.parametrize("nth", range(4))
def test_a_half_written_file_is_never_part_of_a_checkpoint(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_first(Checkpoints(tmp_path))
    checkpoints = Checkpoints(tmp_path)
    written: list[Path] = []
    write_durably = files.write_durably

    def half(path: Path, content: files.Data) -> None:
        data = content if isinstance(content, bytes) else b"".join(content)
        written.append(path)
        if len(written) <= nth:
            write_durably(path, data)
            return

        def stop(descriptor: int) -> None:
            os.ftruncate(descriptor, len(data) // 2)
            raise Crash

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", stop)
            write_durably(path, data)

    for module in (store, files):
        monkeypatch.setattr(module, "write_durably", half)
    with pytest.raises(Crash):
        commit_second(checkpoints)
    assert written[-1].exists()
    again = Checkpoints(tmp_path)
    assert_first(again)
    assert_only_named(again)


def test_write_atomically_leaves_only_the_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"one", b"", b"another" * 1000):
        files.write_atomically(path, data)
        assert path.read_bytes() == data
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_client_states_are_read_from_memory_until_the_commit_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    commit_first(checkpoints)
    released = threading.Event()

    def delayed(path: Path, data: files.Data) -> None:
        assert released.wait(60)
        files.write_durably(path, data)

    monkeypatch.setattr(store, "write_durably", delayed)
    checkpoints.commit(run_state(2, {}), {0: None, 3: state(23)}, (0, 0))
    assert_first(checkpoints)
    assert checkpoints.client(0) is None
    unwritten = checkpoints.client(3)
    assert unwritten is not None
    assert_state(unwritten, 23)
    released.set()
    checkpoints.wait()
    assert checkpoints.latest is not None
    assert checkpoints.latest.round == 2
    again = checkpoints.client(3)
    assert again is not None
    assert_state(again, 23)
    assert checkpoints.client(0) is None


def test_an_error_in_the_background_write_is_raised_by_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    commit_first(checkpoints)

    def full(path: Path, data: files.Data) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_durably", full)
    checkpoints.commit(run_state(2, {}), {}, (0, 0))
    with pytest.raises(OSError, match="No space left"):
        commit_second(checkpoints)
    assert_first(Checkpoints(tmp_path))


def test_the_sizes_of_the_last_updates_survive(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.commit(replace(run_state(1, {}), update_sizes=(0.1, 2.5)), {}, (1, 1))
    checkpoints.wait()
    loaded = Checkpoints(tmp_path).load(torch.device("cpu"))
    assert loaded is not None
    assert loaded.update_sizes == (0.1, 2.5)
