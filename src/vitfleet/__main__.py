"""The command, as installed and as ``python -m vitfleet``."""

import vitfleet.fleet_cli  # noqa: F401  (its commands join those of cli)
from vitfleet.cli import main

if __name__ == "__main__":
    main()
