"""Helpers for tests that start processes."""

import contextlib
import os
import pathlib
import signal
import time
import warnings


def forked(work, seconds):
    """Runs `work` in a fork of this process and returns the exit code: 0 if it returns true, else 1; 2 if it raises; -9
    if it is killed after `seconds`."""
    with warnings.catch_warnings():
        # Python warns about forking with threads, which is what these tests are about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        # Skips the parent's exit handlers in any case.
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def running(command):
    """Returns the pids of processes with this command line, its arguments ended by NUL."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        # A process may end meanwhile.
        with contextlib.suppress(OSError):
            if path.read_bytes() == command:
                found.append(path.parent.name)
    return found
