"""`python -m unweight` runs the `unweight` command installed with this package."""

from __future__ import annotations

import os
import pathlib
import sys
import sysconfig


def _command() -> pathlib.Path:
    """Returns the path of the command: in the scripts of this Python, the user's scripts, or, after `pip --target`, in
    `bin` next to the package. Exits with a message if it is in none of them."""
    schemes = [sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")]
    folders = [pathlib.Path(sysconfig.get_path("scripts", scheme)) for scheme in schemes]
    folders.append(pathlib.Path(__file__).resolve().parent.parent / "bin")
    commands = [folder / "unweight" for folder in folders]
    for command in commands:
        if command.is_file():
            return command
    paths = ", ".join(str(command) for command in commands)
    sys.exit(f"unweight: the command is missing; install the package again with pip (looked for {paths})")


def main() -> None:
    """Replaces this process with the command."""
    command = str(_command())
    os.execv(command, [command, *sys.argv[1:]])


if __name__ == "__main__":
    main()
