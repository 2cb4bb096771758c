"""Clients' states that stay where clients are trained."""

from __future__ import annotations

from collections import OrderedDict

from vitfleet.message import State


class StateCache:
    """The states of the clients that were there last, as many as there is room for: reading them back takes longer.

    A state never changes, it is replaced: what is kept here is what the last checkpoint has.

    Parameters
    ----------
    room
        Bytes that may be kept.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._held = 0
        self._states: OrderedDict[int, State] = OrderedDict()

    def get(self, client: int) -> State | None:
        """Return a client's state, if it is here."""
        state = self._states.get(client)
        if state is not None:
            self._states.move_to_end(client)
        return state

    def put(self, client: int, state: State | None) -> None:
        """Keep a client's new state instead of its old one; ``None``: it has none any more."""
        before = self._states.pop(client, None)
        self._held -= 0 if before is None else _bytes(before)
        if state is None or not 0 < _bytes(state) <= self.room:
            return
        self._states[client] = state
        self._held += _bytes(state)
        while self._held > self.room:
            _, oldest = self._states.popitem(last=False)
            self._held -= _bytes(oldest)


def _bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.tensors.values())
