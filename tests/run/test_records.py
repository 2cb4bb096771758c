"""Records and summary: lines that are read back unchanged, a truncated last line, the figures of a summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import MakeConfig
from vitfleet.run.output.summary import write_summary
from vitfleet.run.records import (
    Accuracy,
    ClientRecord,
    LineFile,
    RoundRecord,
    read_records,
    read_seconds,
)

finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**60)
accuracies = st.builds(Accuracy, global_=finite, loss=finite, models=counts, local=st.none() | finite)
numbers = st.dictionaries(st.text(max_size=5), st.one_of(counts, finite, st.lists(counts, max_size=3)), max_size=3)
clients = st.builds(
    ClientRecord,
    client=counts,
    down_bytes=counts,
    up_bytes=counts,
    numbers=numbers,
    correct=st.none() | counts,
    tested=st.none() | counts,
    failure=st.none() | st.text(),
)
records = st.builds(
    RoundRecord,
    round=st.integers(1, 10**6),
    lr=finite,
    loss=st.none() | finite,
    accuracy=st.none() | accuracies,
    clients=st.lists(clients, max_size=3),
    total_up_bytes=counts,
    total_down_bytes=counts,
)


@given(records)
def test_round_record_parse_is_the_inverse_of_line(record: RoundRecord) -> None:
    line = record.line()
    assert "\n" not in line
    assert RoundRecord.parse(line) == record
    assert RoundRecord.parse(line).line() == line


def record(
    round: int, accuracy: Accuracy | None = None, failure: str | None = None, correct: int | None = None
) -> RoundRecord:
    tested = None if correct is None else 10
    entries = [
        ClientRecord(0, 100, 50, {"samples": 4, "loss": 0.5}, correct, tested),
        ClientRecord(round, 100, 50, failure=failure),
    ]
    return RoundRecord(round, 0.1, 1.0 / round, accuracy, entries, 100 * round, 200 * round)


def write(folder: Path, *written: RoundRecord) -> None:
    lines = LineFile(folder / "records.jsonl")
    for round_record in written:
        lines.append(round_record.line())
    lines.close()


def test_read_records_yields_records_in_order(tmp_path: Path) -> None:
    write(tmp_path, record(1), record(2), record(3))
    assert list(read_records(tmp_path)) == [record(1), record(2), record(3)]


def test_read_records_of_an_empty_folder_yields_nothing(tmp_path: Path) -> None:
    assert list(read_records(tmp_path)) == []
    assert read_seconds(tmp_path) == 0


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_read_records_skips_a_truncated_last_line(cut: int, tmp_path: Path) -> None:
    write(tmp_path, record(1), record(2), record(3))
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert [round_record.round for round_record in read_records(tmp_path)] == [1, 2]


def test_line_file_append_returns_the_length(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = LineFile(path)
    assert lines.length() == 0
    assert lines.append("één") == lines.length() == len("één\n".encode()) == path.stat().st_size
    lines.close()


def test_line_file_is_truncated_to_a_length_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    first = LineFile(path, 0)
    kept = first.append("one")
    first.append("two")
    first.append("thr")
    first.close()
    path.write_bytes(path.read_bytes() + b"half a li")
    again = LineFile(path, kept)
    assert again.length() == kept
    assert path.read_bytes() == b"one\n"
    again.append("2")
    assert again.length() == path.stat().st_size
    again.close()
    assert path.read_bytes() == b"one\n2\n"


def test_line_file_of_length_zero_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"of a run that was killed before its first checkpoint\n")
    lines = LineFile(path, 0)
    lines.append("one")
    lines.close()
    assert path.read_bytes() == b"one\n"


def test_line_file_without_a_length_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\n")
    lines = LineFile(path)
    lines.append("two")
    lines.close()
    assert path.read_bytes() == b"one\ntwo\n"


def evaluated(accuracy: float) -> Accuracy:
    return Accuracy(global_=accuracy, loss=1.5, models=1, local=0.5)


def test_write_summary_computes_all_figures(tmp_path: Path, tiny_config: MakeConfig) -> None:
    write(
        tmp_path,
        record(1, evaluated(0.6), correct=3),
        record(2, evaluated(0.9), failure="it diverged", correct=9),
        record(3),
        record(4, evaluated(0.8), correct=7),
    )
    (tmp_path / "timings.jsonl").write_text('{"round": 1, "seconds": 1.5}\n{"round": 2, "seconds": 2.25}\n')
    summary = write_summary(tmp_path, tiny_config("seed=5"), costs={"params": 1000, "trainable_params": 600})
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (summary["method"], summary["seed"], summary["rounds"]) == ("fedavg", 5, 4)
    accuracy = summary["accuracy"]
    assert (accuracy["global"], accuracy["local"], accuracy["best"]) == (0.8, 0.7, 0.9)
    # 8 participations in 4 rounds; totals are the last record's.
    assert summary["message"] == {"up_bytes": 400 / 8, "down_bytes": 800 / 8}
    total = summary["total"]
    assert (total["up_bytes"], total["down_bytes"], total["seconds"]) == (400, 800, 3.75)
    assert (total["failures"], total["participations"]) == (1, 8)
    assert summary["client"]["params"] == 1000
    assert summary["client"]["trainable_params"] == 600


def test_local_accuracy_of_the_summary_is_the_mean_of_each_clients_last(
    tmp_path: Path, tiny_config: MakeConfig
) -> None:
    def record_with(round: int, **correct: int) -> RoundRecord:
        entries = [ClientRecord(int(name[1:]), 1, 1, {}, count, 10) for name, count in correct.items()]
        return RoundRecord(round, 0.1, 1.0, evaluated(0.5), entries, 1, 1)

    write(tmp_path, record_with(1, c1=2, c2=10), record_with(2, c1=6, c3=8))
    no_test_images = ClientRecord(4, 1, 1, {}, 0, 0)
    assert no_test_images.accuracy is None
    write(tmp_path, RoundRecord(3, 0.1, 1.0, evaluated(0.5), [no_test_images], 1, 1))
    accuracy = write_summary(tmp_path, tiny_config(), {})["accuracy"]
    assert accuracy["local"] == pytest.approx((0.6 + 1.0 + 0.8) / 3)
    assert accuracy["local_clients"] == 3


def test_write_summary_without_evaluation_has_no_accuracy(tmp_path: Path, tiny_config: MakeConfig) -> None:
    write(tmp_path, record(1))
    accuracy = write_summary(tmp_path, tiny_config(), {})["accuracy"]
    assert (accuracy["global"], accuracy["local"], accuracy["best"]) == (None, None, None)
