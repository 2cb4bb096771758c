"""What a client tells its owner."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vitfleet.fleet.base import EvalResult, Reply, Request
from vitfleet.flower.activity import MAX_BYTES, ActivityLog, ActivityReader, round_line
from vitfleet.flower.device import supernode
from vitfleet.flower.transport.payloads import RunSpec, TrainPayload
from vitfleet.message import Message


def payload(run_id: str = "ab12") -> TrainPayload:
    return TrainPayload(Request(3, 0, Message()), RunSpec(run_id, "{}", [], 1, 8), None)


def test_line_of_a_round_names_images_loss_and_accuracy() -> None:
    message = Message({}, {"samples": 140, "loss": 0.41234})
    line = round_line(payload(), Reply(0, message, EvalResult(30, 40)))
    assert line == "run ab12, round 3: trained on 140 images, loss 0.412, accuracy 75.0% on 40 own test images"
    assert round_line(payload(), Reply(0, message)) == "run ab12, round 3: trained on 140 images, loss 0.412"
    assert round_line(payload(), Reply(0, None, failure="no room")) == "run ab12, round 3: not trained: no room"


def test_reader_returns_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "state" / "activity.log"
    log, early = ActivityLog(path), ActivityReader(path)
    assert early.new_lines() == []
    log.add("one\nline")
    late = ActivityReader(path)
    log.add("two")
    assert early.new_lines() == ["one line", "two"]
    assert late.new_lines() == ["two"]
    with path.open("a") as file:
        file.write("half")
        file.flush()
        assert late.new_lines() == []
        file.write(" a line\n")
    assert late.new_lines() == ["half a line"]


def test_a_long_file_is_begun_anew(tmp_path: Path) -> None:
    log, reader = ActivityLog(tmp_path / "activity.log"), ActivityReader(tmp_path / "activity.log")
    log.path.write_text("x" * MAX_BYTES + "\n")
    assert len(reader.new_lines()) == 1
    log.add("next")
    assert reader.new_lines() == ["next"]
    assert (tmp_path / "activity.log").read_text() == "next\n"


def test_a_refused_run_cannot_forge_lines_or_control_the_owners_terminal(tmp_path: Path) -> None:
    log, reader = ActivityLog(tmp_path / "activity.log"), ActivityReader(tmp_path / "activity.log")
    run_id = "x\r\x1b]0;owned\x07\x1b[2Jrun good\u2028forged\x85\x0b\x9b"
    log.add(round_line(payload(run_id), Reply(0, None, failure="bad\u202e\nname")))
    assert reader.new_lines() == ["run x ?]0;owned??[2Jrun good forged  ?, round 3: not trained: bad? name"]


def test_a_line_is_short_whatever_a_server_sends(tmp_path: Path) -> None:
    log = ActivityLog(tmp_path / "activity.log")
    line = round_line(payload("x" * 5_000_000), Reply(0, None, failure="no room"))
    assert line.endswith("x…, round 3: not trained: no room"), "the reason is still shown"
    log.add(line)
    log.add("y" * 5_000_000)
    assert log.path.stat().st_size < 2000


def test_a_deleted_file_counts_as_empty(tmp_path: Path) -> None:
    log = ActivityLog(tmp_path / "activity.log")
    log.add("before")
    reader = ActivityReader(log.path)
    log.path.unlink()
    assert reader.new_lines() == []
    log.add("a longer line than the one before")
    assert reader.new_lines() == ["a longer line than the one before"]


def test_client_reports_its_lines_and_keeps_flowers_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activity = tmp_path / "runs" / "activity.log"
    script = f"""
import sys
from vitfleet.flower.activity import ActivityLog
from pathlib import Path
print("INFO:     Started server process [1]", file=sys.stderr)
ActivityLog(Path({str(activity)!r})).add("round 1: trained")
sys.exit(3)
"""

    def stop(seconds: float) -> None:
        if seconds == supernode.RESTART_DELAY_S:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", stop)
    reported: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        supernode.run_forever([sys.executable, "-c", script], tmp_path / "flower", activity, reported.append)
    log = tmp_path / "flower" / "supernode.log"
    assert reported[0] == "round 1: trained"
    assert reported[1].startswith(f"Flower's SuperNode ended with code 3 (see {log})")
    assert "INFO:     Started server process [1]" in log.read_text()
