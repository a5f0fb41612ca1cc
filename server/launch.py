"""Become a command that dies with its parent: `python launch.py PARENT_PID COMMAND...`. Run by path, it imports nothing of ours.

The kernel sends SIGKILL when the parent's thread that started us ends, however it ends. This is done here, between the
fork and the real command, and not in a `preexec_fn`: that runs in a forked copy of a threaded server, where any lock may
be held for ever. The setting survives exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit("the parent died before its child could be tied to it")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
