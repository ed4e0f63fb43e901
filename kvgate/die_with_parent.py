"""Asks Linux to end this process when its parent does; run as a script, it then becomes another program."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent is gone; elsewhere than on Linux, nothing.

    The kernel's "parent" is the THREAD that started the process: the signal also comes when that thread ends
    while its process lives on. The request outlives an exec.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if os.getppid() != parent:  # it went before the kernel was asked
        os.kill(os.getpid(), signal_number)


if __name__ == "__main__":
    die_with_parent()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - becoming that program is the purpose
    except OSError as problem:
        sys.exit(f"{sys.argv[1]} cannot be run: {problem}")
