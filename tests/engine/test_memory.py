"""What is freed stays with the process: no page is mapped twice for the same gradients; the numbers are the same."""

import os
import subprocess
import sys
from pathlib import Path

import odd
import pytest

from harness import experiment, run
from idiolect.engine import memory

MANY = 1000  # of the 4,096 pages of a turn
ALONE = """
import odd
from harness import experiment, run
found = run(experiment(odd.Paging(), rounds=1))
print(odd.pages(), *(v.double().sum().item().hex() for v in found.progress.server["model"].values()))
"""
glibc = pytest.mark.skipif(memory._glibc() is None, reason="another C library")


def alone(**chosen):
    """Pages of a turn after a serial run in a process of its own, and what tells the run's weights."""
    here = Path(__file__)
    path = os.pathsep.join([str(here.parent), str(here.parent.parent), *sys.path])
    words = [sys.executable, "-c", ALONE]
    told = subprocess.run(words, env={**os.environ, "PYTHONPATH": path, **chosen}, capture_output=True, check=True)
    pages, *weights = told.stdout.decode().split()
    return float(pages), weights


@glibc
def test_a_worker_keeps_its_memory():
    found = run(experiment(odd.Paging(), rounds=1, backend="workers", workers=1))
    assert float(found.progress.server["pages"]) < MANY / 10


@glibc
def test_a_serial_run_keeps_its_memory_unless_the_user_chose_and_the_bits_are_the_same():
    kept, weights = alone()
    chosen, same = alone(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert kept < MANY / 10
    assert chosen > MANY
    assert weights == same


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    memory.keep()
    memory.release()
