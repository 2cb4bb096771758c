"""What a user, a file system or a wrong certificate can refuse is one sentence, with exit code 2."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import Command
from made_photos import draw_photos
from vitfleet.errors import UserError, describe_os_error
from vitfleet.flower.certificates import Certs, make_certs
from vitfleet.flower.device.server_address import check_server


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "1.png").write_bytes(b"")
    return tmp_path / "photos"


def refusal(result: object) -> str:
    """Return the one line that a command printed before it ended with code 2."""
    code, output = result.returncode, result.stderr  # type: ignore[attr-defined]
    assert code == 2, output
    lines = str(output).strip().splitlines()
    assert len(lines) == 1, output
    return lines[0]


def test_a_class_folder_that_cannot_be_read(
    photos: Path, vitfleet: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterdir = Path.iterdir

    def guarded(self: Path) -> Iterator[Path]:  # the tests may run as root, who may read everything
        if self.name == "dog":
            raise PermissionError(13, "Permission denied", str(self))
        return iterdir(self)

    monkeypatch.setattr(Path, "iterdir", guarded)
    line = refusal(vitfleet(tmp_path, "run", "digits", "-o", "data.name=mine", "-o", f"data.path={photos}"))
    assert "photos/dog: cannot be read (permission denied)" in line


def test_a_folder_name_that_is_not_text(vitfleet: Command, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    draw_photos(photos, ("cat", "dog", os.fsdecode(b"caf\xe9")))
    line = refusal(vitfleet(tmp_path, "run", "digits", "-o", "data.name=mine", "-o", f"data.path={photos}"))
    assert "is not valid UTF-8; rename it" in line


@pytest.mark.parametrize("insecure", [[], ["--insecure"]])
def test_a_device_name_of_300_characters(vitfleet: Command, tmp_path: Path, insecure: list[str]) -> None:
    arguments = ["client", "--server", "127.0.0.1:1", "--data", ".", "--name", "a" * 300]
    assert "at most 63 characters" in refusal(vitfleet(tmp_path, *arguments, *insecure))
    assert "at most 63 characters" in refusal(
        vitfleet(tmp_path, "export-data", "digits", "--out", "x", "--names", "a" * 300)
    )


def test_an_output_folder_whose_name_is_too_long(vitfleet: Command, tmp_path: Path) -> None:
    assert "File name too long" in refusal(vitfleet(tmp_path, "run", "digits", "--out", "a" * 300))


def test_only_what_lies_outside_the_program_is_a_sentence() -> None:
    assert describe_os_error(PermissionError(13, "Permission denied", "/x")) == "/x: Permission denied"
    assert describe_os_error(OSError(28, "No space left on device")) == "No space left on device; make room"
    assert describe_os_error(BrokenPipeError(32, "Broken pipe")) is None


@contextmanager
def tls_server(certs: Certs) -> Iterator[str]:
    """Run a server with a fleet's certificate and yield its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs.server, certs.server_key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)

        def serve() -> None:
            try:
                connection, _ = listener.accept()
            except TimeoutError:  # nobody came
                return
            try:
                context.wrap_socket(connection, server_side=True).close()
            except OSError:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_another_authoritys_server_is_named_before_flower_connects(tmp_path: Path) -> None:
    own, other = (make_certs(tmp_path / name, [], ["kitchen"]) for name in ("own", "other"))
    with tls_server(own) as address:
        check_server(address, own.ca)
    with tls_server(other) as address, pytest.raises(UserError, match=rf"server at {address} is not the one that .*ca"):
        check_server(address, own.ca)
    check_server("127.0.0.1:1", own.ca)  # nobody answers: a client waits
    (tmp_path / "no.crt").write_text("nothing")
    with pytest.raises(UserError, match="is no certificate"):
        check_server("127.0.0.1:1", tmp_path / "no.crt")


def test_a_client_says_so_before_it_starts_flower(
    vitfleet: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitfleet.flower.device.supernode.run_forever", lambda *_: pytest.fail("Flower is started"))
    own, other = (make_certs(tmp_path / name, [], ["kitchen"]) for name in ("own", "other"))
    with tls_server(other) as address:
        line = refusal(
            vitfleet(
                tmp_path,
                *("client", "--server", address, "--name", "kitchen", "--certs", own.ca.parent),
                *("--data", ".", "--state", "state"),
            )
        )
    assert f"server at {address} is not the one that" in line
    assert not (tmp_path / "state").exists()
