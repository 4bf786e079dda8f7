"""Processes that tests start."""

import contextlib
import os
import pathlib
import signal
import time
import warnings


def forked(work, seconds):
    """How a fork of this process ends that does `work`: with 0 if that is true, else 1, and 2 if it raises; -9: killed
    after so long."""
    with warnings.catch_warnings():
        # That there are threads is the point.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        # No exit handlers of the parent's, whatever comes.
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
    """The processes that run this command."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        # Others end meanwhile.
        with contextlib.suppress(OSError):
            if path.read_bytes() == command:
                found.append(path.parent.name)
    return found
