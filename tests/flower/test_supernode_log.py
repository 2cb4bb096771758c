"""Causes are read from logs that SuperNodes of flwr 1.41 wrote in a fleet on loopback (``supernode_logs/``)."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from vitfleet.errors import UserError
from vitfleet.flower.device import supernode
from vitfleet.flower.device.supernode import HEAD_BYTES, TAIL_BYTES, SuperNodeLog, ending_cause, read_log_from
from vitfleet.flower.processes import MAX_LOG_BYTES

LOGS = Path(__file__).parent / "supernode_logs"
KEY = Path("/srv/fleet/nodes/kitchen")


def cause_of(log: str, key: Path | None = KEY) -> str | None:
    return ending_cause((LOGS / f"{log}.txt").read_text(), "kitchen", key)


@pytest.mark.parametrize("log", ["unknown-key", "already-connected"])
def test_refused_key_is_named_with_its_remedy(log: str) -> None:
    cause = cause_of(log)
    assert cause is not None
    assert f"does not accept the key {KEY} of client kitchen" in cause
    assert "`vitfleet certs DIR --names kitchen`" in cause
    assert "copy DIR/ca.crt and DIR/nodes/kitchen" in cause
    assert "a client with the same key is connected" in cause


@pytest.mark.parametrize(
    ("log", "cause"),
    [("server-restarted", "the server was started again"), ("no-tls", "does not use TLS"), ("wrong-clock", "clock")],
)
def test_other_causes(log: str, cause: str) -> None:
    assert cause in (cause_of(log) or "")


def test_a_log_without_a_known_cause_is_not_explained() -> None:
    assert cause_of("stopped-while-waiting") is None
    assert cause_of("wrong-clock", key=None) is None  # without keys there are no signatures
    assert ending_cause("", "kitchen", KEY) is None


def test_of_much_text_beginning_and_end_are_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"old" + b"a" * HEAD_BYTES + b"b" * 10 + b"c" * TAIL_BYTES)
    assert read_log_from(log, 3) == "a" * HEAD_BYTES + "\n" + "c" * TAIL_BYTES
    log.write_bytes(b"oldnew")
    assert read_log_from(log, 3) == "new"


def test_a_deleted_log_is_empty(tmp_path: Path) -> None:
    assert read_log_from(tmp_path / "supernode.log", 7) == ""
    log = SuperNodeLog(tmp_path / "supernode.log")
    with log.open() as file:
        log.path.unlink()
        file.write(b"lost")
    log.cut()
    assert log.text() == ""


def test_a_log_stays_short_while_it_is_written_and_its_last_part_is_kept(tmp_path: Path) -> None:
    log = SuperNodeLog(tmp_path / "supernode.log")
    log.path.write_bytes(b"earlier")
    with log.open() as file:
        file.write(b"head")
        for part in (b"a", b"b", b"c"):
            file.write(part * (MAX_LOG_BYTES + 1))
            file.flush()
            log.cut()
            assert log.path.stat().st_size == 0
            assert (tmp_path / "supernode.old.log").read_bytes() == part * MAX_LOG_BYTES
        file.write(b"end")
    assert log.path.read_bytes() == b"end"
    assert log.text() == "head" + "a" * (HEAD_BYTES - 4) + "end", "what it wrote first shows whether it connected"


def test_a_start_does_not_keep_the_text_of_the_one_before(tmp_path: Path) -> None:
    log = SuperNodeLog(tmp_path / "supernode.log")
    for text in ("first" * MAX_LOG_BYTES, "second"):
        with log.open() as file:
            file.write(text.encode())
    assert log.text() == "second"
    assert log.path.read_text() == "second"


def test_client_reports_the_cause_of_this_start_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperNode that is refused at its first start, and ends for another reason at the second."""
    script = f"""
import sys
from pathlib import Path
seen = Path({str(tmp_path / "seen")!r})
print("Started server process [1]")
if seen.exists():
    sys.exit(7)
seen.touch()
print(Path({str(LOGS / "unknown-key.txt")!r}).read_text())
sys.exit(1)
"""
    starts: list[float] = []

    def stop_at_second(seconds: float) -> None:
        starts.extend([seconds] if seconds == supernode.RESTART_DELAY_S else [])
        if len(starts) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", stop_at_second)
    reported: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        supernode.run_forever(
            [sys.executable, "-S", "-c", script],
            tmp_path / "flower",
            tmp_path / "activity.log",
            reported.append,
            partial(ending_cause, name="kitchen", key=KEY),
        )
    first, second = reported
    assert first.startswith(f"the server does not accept the key {KEY}")
    assert str(tmp_path / "flower" / "supernode.log") in first
    assert second.startswith("Flower's SuperNode ended with code 7")


def test_a_supernode_that_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    script = "raise SystemExit('Error: the file is missing')"
    with pytest.raises(UserError, match="cannot start: Error: the file is missing"):
        supernode.run_forever(
            [sys.executable, "-S", "-c", script], tmp_path / "flower", tmp_path / "activity.log", print
        )


def test_a_server_is_looked_at_until_it_accepts_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernode, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(supernode, "REPORT_INTERVAL_S", 0.05)

    def refuse() -> None:
        raise UserError("the server uses TLS")

    waiting = "print('Started server process', flush=True); import time; time.sleep(60)"
    with pytest.raises(UserError, match="uses TLS"):
        supernode.run_forever(
            [sys.executable, "-S", "-c", waiting],
            tmp_path / "flower",
            tmp_path / "activity.log",
            print,
            check=refuse,
        )
