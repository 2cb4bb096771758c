"""Replies are put into the order of the requests."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from vitfleet.fleet.base import Reply, in_request_order
from vitfleet.message import Message


@given(st.data())
def test_in_request_order_yields_every_reply_once_in_order(data: st.DataObject) -> None:
    clients = data.draw(st.lists(st.integers(0, 10_000), unique=True, max_size=30))
    arrival = data.draw(st.permutations(clients))
    replies = {client: Reply(client, Message(numbers={"loss": float(client)})) for client in clients}
    ordered = list(in_request_order((replies[client] for client in arrival), clients))
    assert [reply.client for reply in ordered] == clients
    assert all(reply is replies[reply.client] for reply in ordered)


def test_in_request_order_pulls_no_more_replies_than_needed() -> None:
    pulled: list[int] = []

    def replies() -> Iterator[Reply]:
        for client in (0, 2, 1, 3):
            pulled.append(client)
            yield Reply(client, Message())

    ordered = in_request_order(replies(), [0, 1, 2, 3])
    assert (next(ordered).client, pulled) == (0, [0])
    assert (next(ordered).client, pulled) == (1, [0, 2, 1])
    assert (next(ordered).client, pulled) == (2, [0, 2, 1])
    assert (next(ordered).client, pulled) == (3, [0, 2, 1, 3])


def test_in_request_order_reports_missing_replies() -> None:
    ordered = list(in_request_order([Reply(1, Message())], [0, 1]))
    assert [(reply.client, reply.failure) for reply in ordered] == [(0, "no reply"), (1, None)]
