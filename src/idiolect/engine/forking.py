"""The process that workers are forks of. It takes seconds to import torch, as a command does itself: nothing here
needs torch, so that a command starts that process first, and both import at once."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, parent_process, resource_tracker, util
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

LONGEST = 60  # letters of a directory in which sockets find room


def context() -> ForkServerContext:
    """What starts workers, which find the engine imported."""
    _shorten()
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["idiolect.engine.workers"])
    return found


def begin() -> None:
    """Start the process that workers will be forks of, unless there is one."""
    context()
    resource_tracker.ensure_running()  # not below: it unblocks the signal
    with undisturbed():
        forkserver.ensure_running()


def _shorten() -> None:
    """A socket's path has room for a hundred letters: it does without a long TMPDIR. Where sockets lie is settled once:
    what is started later shares the folder, and this process removes it when it ends."""
    asked = tempfile.tempdir
    if len(tempfile.gettempdir()) > LONGEST and os.access("/tmp", os.W_OK):
        tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = asked


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C waits until this is over; a process that is started in here never hears of it."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    heard: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *_: heard.append(_))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited, unlike the handler
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if heard:
            signal.raise_signal(signal.SIGINT)


def leave() -> None:
    """The end of a worker. Where the process that started it was killed, nobody else removes its folder of sockets."""
    parent = parent_process()
    # that nobody holds the other end says only that this worker was given up
    if parent is not None and wait([parent.sentinel], timeout=0.01) and not _lives(parent.pid):
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    os._exit(0)


def _lives(pid: int | None) -> bool:
    """Whether a process runs; one that is dead and not yet buried does not."""
    try:
        os.kill(pid or 0, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return state not in "ZX"
