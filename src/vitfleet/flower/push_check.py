"""What a client may push: replies, in its own name.

Flower's SuperLink verifies that the signature of a request is that of its ``node``. It does not verify that the
messages inside are from that node, nor that they reply to anything. A client could send messages in the server's name,
and to the server: Flower hands them over together with another client's reply, which is lost if they cannot be read.
"""

from __future__ import annotations

from flwr.proto.fleet_pb2 import PushMessagesRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]


def has_own_replies_only(body: bytes) -> bool:
    """Whether the body of a request to push messages has replies of the node that signs it, and nothing else."""
    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    metadata = [message.metadata for message in request.messages_list]
    return bool(metadata) and all(
        entry.src_node_id == request.node.node_id and entry.reply_to_message_id for entry in metadata
    )
