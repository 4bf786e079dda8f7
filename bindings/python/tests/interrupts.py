"""Interrupts calls of the package wherever Python handles signals."""

import dis
import functools
import pathlib
import sys
from types import CodeType, FrameType
from typing import Any, Callable, Iterator

import unweight

_PACKAGE = str(pathlib.Path(unweight.__file__).parent)


@functools.cache
def _offsets(code: CodeType) -> frozenset[int]:
    """Returns the offsets of the instructions before which Python handles signals: after calls, and at the start."""
    instructions = list(dis.get_instructions(code))
    after = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
    return frozenset(
        following.offset for one, following in zip(instructions, instructions[1:]) if one.opname.startswith(after)
    )


def everywhere(call: Callable[[], Any]) -> Iterator[bool]:
    """Calls `call` until it is not interrupted: each time, a `KeyboardInterrupt` comes at a later place in the package.
    Yields after each call whether it was the last."""
    at, done = 0, False
    while not done:
        at += 1
        left = at

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.startswith(_PACKAGE):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            left -= event == "opcode" and frame.f_lasti in _offsets(frame.f_code)
            if left == 0:
                left = -1
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        # Python 3.12 looks for opcode events in `settrace` only.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(trace)
        try:
            call()
            done = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        yield done
