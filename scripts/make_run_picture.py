"""Draw the terminal output of ``vitfleet run`` as the SVG file that the README shows.

Example: ``python scripts/make_run_picture.py docs/img/run.svg``. Another command may follow the file.
"""

from __future__ import annotations

import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 84
COMMAND = ["vitfleet", "run"]
CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)")


def record(command: list[str], folder: Path) -> str:
    """Return everything that a command writes to a terminal."""
    written = bytearray()

    def read(descriptor: int) -> bytes:
        chunk = os.read(descriptor, 1024)
        written.extend(chunk)
        return chunk

    os.environ.update({"COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "VITFLEET_DATA": ""})
    before = Path.cwd()
    os.chdir(folder)
    try:
        status = pty.spawn(command, read)
    finally:
        os.chdir(before)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return written.decode()


def last_screen(output: str) -> list[str]:
    """Return the lines that remain on the screen, with their colours: live displays overwrite theirs."""
    lines, row = [""], 0
    for part in CONTROL.split(output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\x1b["):
            row -= int(part[2:-1] or 1)
        elif part in ("\x1b[2K", "\r"):
            lines[row] = "" if part == "\x1b[2K" else lines[row]
        elif part.endswith("m") or not part.startswith("\x1b"):
            lines[row] += part
    return lines


def main() -> None:
    """Run the command in a new folder and draw what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        lines = last_screen(record(sys.argv[2:] or COMMAND, Path(folder)))
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text("$ ./run", style="bold"))
        for line in lines:
            console.print(Text.from_ansi(line))
        console.save_svg(sys.argv[1], title="vitfleet")


if __name__ == "__main__":
    main()
