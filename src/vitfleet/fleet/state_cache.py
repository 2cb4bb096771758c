"""Cache of client states on the training device."""

from __future__ import annotations

from collections import OrderedDict

from vitfleet.message import State


class StateCache:
    """Least-recently-used cache of client states, limited in bytes. Reading a state from disk takes longer.

    A state is never modified, only replaced. A cached state equals the one in the last checkpoint.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._used_bytes = 0
        self._states: OrderedDict[int, State] = OrderedDict()

    def get(self, client: int) -> State | None:
        """Return a client's state if it is cached."""
        state = self._states.get(client)
        if state is not None:
            self._states.move_to_end(client)
        return state

    def put(self, client: int, state: State | None) -> None:
        """Replace a client's cached state; ``None`` removes it."""
        replaced = self._states.pop(client, None)
        self._used_bytes -= 0 if replaced is None else replaced.num_bytes
        if state is None or not 0 < state.num_bytes <= self.max_bytes:
            return
        self._states[client] = state
        self._used_bytes += state.num_bytes
        while self._used_bytes > self.max_bytes:
            _, oldest = self._states.popitem(last=False)
            self._used_bytes -= oldest.num_bytes
