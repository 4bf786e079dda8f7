"""`python -m unweight`: the `unweight` command that came with this package."""

from __future__ import annotations

import os
import pathlib
import sys
import sysconfig


def _command() -> pathlib.Path:
    """Where pip put it: beside this Python, in the user's folder, or in `bin` beside the package (`--target`)."""
    schemes = [sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")]
    places = [pathlib.Path(sysconfig.get_path("scripts", scheme)) for scheme in schemes]
    places.append(pathlib.Path(__file__).resolve().parent.parent / "bin")
    commands = [place / "unweight" for place in places]
    for command in commands:
        if command.is_file():
            return command
    looked = ", ".join(str(command) for command in commands)
    sys.exit(f"unweight: the command is missing; install the package again with pip (looked for {looked})")


def main() -> None:
    """Becomes the command."""
    command = str(_command())
    os.execv(command, [command, *sys.argv[1:]])


if __name__ == "__main__":
    main()
