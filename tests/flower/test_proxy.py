"""What the proxy of a server forwards, and what it writes to its log."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from flwr.app import ConfigRecord
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as FlowerMessage
from flwr.proto.message_pb2 import Metadata, PushObjectRequest
from flwr.proto.node_pb2 import Node
from test_connections import certs, poll, with_proxy

from vitfleet import wire
from vitfleet.flower import processes
from vitfleet.flower.certificates import Certs
from vitfleet.flower.server.connections import ConnectionLimits, ConnectionTable
from vitfleet.flower.server.processes import PROXY_LOG, SUPERLINK_LOG, ServerSettings
from vitfleet.flower.server.proxy import MAX_PUSH_BYTES, MAX_REQUEST_BYTES, PUSH_MESSAGES
from vitfleet.flower.server.serve import follow
from vitfleet.flower.transport.payloads import CHUNK

__all__ = ["certs"]  # a fixture


async def is_empty(table: ConnectionTable) -> None:
    """Wait until the table has no connection."""
    while len(table):
        await asyncio.sleep(0.05)
        table.sweep()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("POST /v1/fleet/x HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\nabc", None),
        ("POST /v1/fleet/%00 HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n", b"404"),
        ("POST /v1/fleet/../control HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n", b"404"),
        ("POST /v1/fleet/x HTTP/1.1\r\nhost: [\r\ncontent-length: 0\r\n\r\n", b"200"),
        ("POST /v1/fleet/x HTTP/1.1\r\nhost: a\r\nx: \xe9\r\ncontent-length: 0\r\n\r\n", b"400"),
        ("garbage\r\n\r\n", b"400"),
    ],
)
def test_no_request_leaves_a_trace_in_the_log(
    request_: str,
    status: bytes | None,
    certs: Certs,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``None``: the sender ends before its request does."""

    async def send(port: int, paths: list[str], table: ConnectionTable) -> None:
        verify = ssl.create_default_context(cafile=str(certs.ca))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=verify)
        writer.write(request_.encode("latin-1"))
        if status is not None:
            assert (await asyncio.wait_for(reader.readline(), 20)).split()[1] == status
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await asyncio.wait_for(is_empty(table), 20)

    with_proxy(ConnectionLimits(), certs, send)
    assert not [record for record in caplog.records if record.name.startswith(("uvicorn", "asyncio"))]
    assert not capsys.readouterr().err


def test_logs_of_a_server_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink goes on writing where its log ends now."""
    monkeypatch.setattr(processes, "MAX_LOG_BYTES", 10)
    settings = ServerSettings("127.0.0.1", 1, tmp_path, None)
    (tmp_path / PROXY_LOG).write_bytes(b"short")
    with (tmp_path / SUPERLINK_LOG).open("ab", buffering=0) as superlink:
        superlink.write(b"x" * 1000 + b"the last 9")

        def write_more(seconds: float) -> None:
            superlink.write(b", more")
            (tmp_path / "summary.json").touch()

        monkeypatch.setattr("vitfleet.flower.server.serve.time.sleep", write_more)
        follow(settings, tmp_path, 1)
    assert (tmp_path / SUPERLINK_LOG).read_bytes() == b", more"
    assert (tmp_path / "superlink.old.log").read_bytes() == b"the last 9"
    assert (tmp_path / PROXY_LOG).read_bytes() == b"short"


def test_chunks_of_messages_are_forwarded() -> None:
    chunk = ConfigRecord({CHUNK: b"x" * wire.CHUNK}).deflate()
    request = PushObjectRequest(node=Node(node_id=OWN), object_id="a" * 64, object_content=chunk, session_id="b" * 64)
    assert request.ByteSize() < MAX_REQUEST_BYTES


OWN, OTHER, SUPERLINK = 7, 8, 1  # nodes; the last one is the server's


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([(OWN, "request")], 200),
        ([(OTHER, "request")], 403),
        ([(OWN, "")], 403),
        ([(SUPERLINK, "")], 403),
        ([(OWN, "request"), (SUPERLINK, "")], 403),
        ([], 403),
    ],
)
def test_clients_send_replies_in_their_own_name_only(
    messages: list[tuple[int, str]], status: int, certs: Certs
) -> None:
    """With sender, and the request that it replies to. Flower's SuperLink accepts all but the empty one."""
    body = PushMessagesRequest(
        node=Node(node_id=OWN),
        messages_list=[
            FlowerMessage(metadata=Metadata(src_node_id=source, reply_to_message_id=request))
            for source, request in messages
        ],
    ).SerializeToString()

    async def push(port: int, paths: list[str], table: ConnectionTable) -> None:
        assert (await poll(port, certs.ca, PUSH_MESSAGES, body)).status_code == status
        assert paths == ([PUSH_MESSAGES] if status == 200 else [])
        assert (await poll(port, certs.ca, PUSH_MESSAGES, body + b"\xff")).status_code == 403
        assert (await poll(port, certs.ca, PUSH_MESSAGES, b"x" * (MAX_PUSH_BYTES + 1))).status_code == 413

    with_proxy(ConnectionLimits(), certs, push)
