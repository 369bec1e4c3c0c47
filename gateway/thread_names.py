"""Python's names of threads, where the system's tools see them: `top -H`, `/proc/PID/task/*/comm`, a debugger."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

_LONGEST = 15


def show() -> None:
    """Tell the kernel the names of all threads that run now (Linux; elsewhere nothing happens). Python does so itself
    from 3.14 on."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread():  # its name is the process's
            with contextlib.suppress(OSError):
                Path(f"/proc/self/task/{thread.native_id}/comm").write_text(thread.name[:_LONGEST])
