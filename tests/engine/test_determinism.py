"""The same bits whatever the conditions: worker processes, a fresh process elsewhere, kills and a resume."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contract.test_contract import CutOffError, measured, prepared, same, table
from idiolect import Run, running

METHODS = ["fedrep", "scaffold", "fedamp"]
FAULTS = {"drop": 0.2, "slow": 0.3, "late": 0.2}
SCRIPT = """
import hashlib
import sys
from idiolect import Run
from idiolect.running import run

def digest(found):
    h = hashlib.sha256(repr([{k: v for k, v in row.items() if "seconds" not in k} for row in found.rounds]).encode())
    h.update(repr(found.clients).encode())
    for i in range(found.run.clients):
        for k, v in sorted(found.personal(i).items()):
            h.update(k.encode() + v.contiguous().numpy().tobytes())
    return h.hexdigest()

if __name__ == "__main__":
    print(digest(run(Run.from_toml(open(sys.argv[1]).read()))))
"""


def experiment(name, **fields):
    return prepared(name, **{"rounds": 3, "epochs": 1, **FAULTS} | fields)


def agrees(found, whole) -> bool:
    return same(table(whole.progress), table(found.progress)) and measured(whole) == measured(found)


@pytest.mark.parametrize("name", METHODS)
def test_any_number_of_workers_and_one_process_give_the_same_bits(name):
    whole = running.run(experiment(name))
    for count in (1, 2, 4):
        assert agrees(running.run(experiment(name, backend="workers", workers=count)), whole)


@pytest.mark.parametrize("name", METHODS)
def test_killed_workers_and_a_resume_elsewhere_change_no_bit(tmp_path, name):
    """A worker killed in every round, cut off after the second, gone on with by another number of workers."""
    fields = {"rounds": 4, "checkpoint_every": 1, "backend": "workers"}
    whole = running.run(experiment(name, rounds=4))
    watched = imported("soak").Watched(kill_every=1)

    def cut(report):
        watched(report)
        if report.round == 3:
            raise CutOffError

    with pytest.raises(CutOffError):
        running.run(experiment(name, workers=2, **fields), tmp_path / "run", cut)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    found = running.run(experiment(name, workers=1, **fields), tmp_path / "elsewhere", watched, resume=True)
    assert watched.killed >= 4
    assert agrees(found, whole)


def test_a_fresh_process_with_another_hash_seed_other_threads_and_another_folder_gives_the_same_bits(tmp_path):
    run_ = Run(
        method="fedrep", data="synthetic", clients=4, split="dirichlet:0.5", rounds=2, ratio=0.5, workers=2,
        network="mlp", network_options={"hidden": [8]}, drop=0.2,
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(run_.to_toml())
    script = tmp_path / "digest.py"
    script.write_text(SCRIPT)
    found = set()
    for number, changed in enumerate(
        ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "4", "TZ": "Asia/Tokyo"})
    ):
        place = tmp_path / f"from here {number}"
        place.mkdir()
        words = [sys.executable, str(script), str(tmp_path / "run.toml")]
        done = subprocess.run(
            words, cwd=place, env={**os.environ, **changed}, text=True, capture_output=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


# nothing is left


def open_files():
    gc.collect()  # buffers of what is over
    return sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _there(n))


def _there(number):
    return Path(f"/proc/self/fd/{number}").is_symlink()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux lists a process's open files")
def test_a_small_soak_leaves_open_files_and_processes_as_they_were(tmp_path):
    """Thirty rounds with lost replies in which a worker is killed in every fifth."""
    soak = imported("soak")
    running.run(
        soak.experiment(2, 12, 2), tmp_path / "first"
    )  # what stays for the life of a process: the forks' server
    before, below = len(open_files()), set(soak.children(os.getpid()))
    watched = soak.Watched(kill_every=5)
    running.run(soak.experiment(30, 12, 2), tmp_path / "run", watched)
    assert watched.killed == 6
    assert (
        len(open_files()) <= before + 2
    )  # a shared buffer that PyTorch lets go of late, not one for each round or kill
    assert set(soak.children(os.getpid())) == below
    assert soak.zombies(soak.children(os.getpid())) == 0
    assert max(row[5] for row in watched.rows) <= len(below) + 2  # two workers, also after kills


@pytest.mark.parametrize("end", ["ends by itself", "Ctrl-C", "SIGKILL"])
def test_however_a_run_ends_nothing_is_left(end):
    soak = imported("soak")
    found = soak.left_by(*soak.ENDS[end])
    assert found == {
        "exit": {"ends by itself": 0, "Ctrl-C": 130}.get(end, -signal.SIGKILL),
        "processes": 0,
        "shared": [],
        "temporary": [],
        "parts": [],
    }


def imported(name):
    """A file of benchmarks."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return __import__(name)
