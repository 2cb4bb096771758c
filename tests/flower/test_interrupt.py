"""After Ctrl-C of a server and its clients in the middle of a run nothing is left of them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from chaos import METHODS, TINY, FaultPlan, FleetProcesses
from soak import fleet_processes, interrupt

NAMES = ("garden", "kitchen")


@pytest.mark.long
@pytest.mark.timeout(900)  # a busy machine takes minutes to start so many processes
def test_nothing_is_left_after_ctrl_c(tmp_path: Path) -> None:
    plan = FaultPlan(NAMES, 100, (*TINY, *METHODS["fedavg"]), {}, {}, {}, 0, deadline=600.0)
    fleet = FleetProcesses(tmp_path, plan)
    fleet.prepare()
    try:
        fleet.start_server()
        for client in range(len(NAMES)):
            fleet.start_client(client)
        fleet.wait_for_round(3)
        started = {process.pid for process in fleet_processes(fleet)}
        assert len(started) > 6, "SuperLink, proxy, rounds, SuperNodes and workers too"
        assert interrupt(fleet) == []
        codes = {name: process.returncode for name, process in fleet.processes.items()}
        assert set(codes.values()) <= {0, 130}, codes
        with socket.socket() as port:  # nobody listens there any more
            assert port.connect_ex(("127.0.0.1", fleet.port)) != 0
        assert "Traceback" not in (tmp_path / "server.log").read_text()
    finally:
        for name, process in fleet.processes.items():
            if process.poll() is None:
                fleet.kill(name)
