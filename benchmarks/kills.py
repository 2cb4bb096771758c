"""SIGKILL at drawn moments to the server and the clients of a real fleet, which must end as if nothing had happened.

    .venv/bin/python benchmarks/kills.py --method fedvit --out /tmp/kills

The moments are drawn from a seed: in most rounds either the server or one client is killed, with all processes that it
started, and restarted at once. A round that the server did not finish is repeated, and a client that was killed during
its round receives its request again. No reply may be lost: server state and records must equal those of the same run in
one process. ``tests/run/test_kill.py`` does the same to runs in one process, with every method.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from pathlib import Path

from chaos import METHODS, TINY, FaultPlan, FleetProcesses, check

NAMES = ("ada", "bob", "cid")
ROUNDS = 10
LATEST_S = 6.0  # after the beginning of a round
DEADLINE_S = 600.0  # Flower takes up to a minute to notice that a client is gone, and only then accepts it again


def drawn_kills(kills: int, seed: int) -> list[tuple[int, str, float]]:
    """Return the round, the process and the delay of every kill; the server's and the clients' in turn."""
    draws = random.Random(seed)
    rounds = sorted(draws.sample(range(2, ROUNDS + 1), kills))
    names = ["server" if number % 2 == 0 else draws.choice(NAMES) for number in range(kills)]
    return [(round, name, draws.uniform(0, LATEST_S)) for round, name in zip(rounds, names, strict=True)]


def run_with_kills(method: str, kills: int, seed: int, out: Path) -> None:
    """Run a fleet, kill its processes, and compare the result with a run in one process."""
    plan = FaultPlan(NAMES, ROUNDS, (*TINY, *METHODS[method]), {}, {}, {}, 0, deadline=DEADLINE_S)
    fleet = FleetProcesses(out, plan)
    fleet.prepare()
    try:
        fleet.start_server()
        for client in range(len(NAMES)):
            fleet.start_client(client)
        for round, name, delay in drawn_kills(kills, seed):
            fleet.wait_for_round(round)
            time.sleep(delay)
            fleet.kill(name)
            print(f"{time.strftime('%X')} round {round}: killed {name} after {delay:.1f} s", flush=True)
            if name == "server":
                fleet.start_server()
            else:
                fleet.start_client(NAMES.index(name))
        if fleet.processes["server"].wait() != 0:
            raise RuntimeError(f"the server failed: see {out / 'server.log'}")
    finally:
        for name in fleet.processes:
            fleet.kill(name)
    lost = check(plan, out)
    if lost:
        raise RuntimeError(f"replies were lost: {lost}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=sorted(METHODS), default="fedvit")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    run_with_kills(arguments.method, arguments.kills, arguments.seed, out)
    print(f"{arguments.kills} kills, no reply lost; server state and records are the same, bit for bit")


if __name__ == "__main__":
    main()
