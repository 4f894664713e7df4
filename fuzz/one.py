"""One harness in a process of its own, guided by what the code covers; `fuzz/run.py` starts it.

    python fuzz/one.py NAME FOLDER SECONDS

An exception that is no `UsageError` is written to FOLDER/findings, once for each place it comes from, and the search
goes on.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import atheris

GUIDED = ["idiolect", "numpy.lib", "numpy.lib.format", "tomllib", "zipfile", "gzip", "pickletools", "json", "csv"]
LARGEST = 20_000  # bytes of an input
MEGABYTES, HANGS = 3000, 20  # more memory, or more seconds for one input, are findings, too


def noted(error: BaseException, data: bytes, findings: Path) -> None:
    """The input and the trace, unless there is one from the same place."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "idiolect" in f.filename]
    name = hashlib.sha256(f"{type(error).__name__} {own[-3:]}".encode()).hexdigest()[:12]
    if not (findings / f"{name}.txt").exists():
        (findings / f"{name}.input").write_bytes(data)
        (findings / f"{name}.txt").write_text("".join(traceback.format_exception(error)), errors="backslashreplace")


def main() -> None:
    name, folder, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore")
    with atheris.instrument_imports(include=GUIDED, enable_loader_override=False):
        import families
        from idiolect.errors import UsageError
    harness = families.found()[name]
    corpus, findings, place = folder / "corpus", folder / "findings", Path(tempfile.mkdtemp())
    for made in (corpus, findings):
        made.mkdir(parents=True, exist_ok=True)
    for seed in harness.seeds(place):
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)

    def once(data: bytes) -> None:
        try:
            harness.attempt(place, data)
        except UsageError:
            pass
        except Exception as error:
            noted(error, data, findings)

    limits = [f"-max_total_time={seconds}", f"-max_len={LARGEST}", f"-rss_limit_mb={MEGABYTES}", f"-timeout={HANGS}"]
    atheris.Setup([sys.argv[0], *limits, "-print_final_stats=1", f"-artifact_prefix={findings}/", str(corpus)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
