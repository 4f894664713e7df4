"""One thread: the networks here are too small for more, and threads that wait for each other are slow. Nothing is kept
in the user's own cache."""

import os

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    before = os.environ.get("IDIOLECT_CACHE")
    os.environ["IDIOLECT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["IDIOLECT_CACHE"]
    else:
        os.environ["IDIOLECT_CACHE"] = before
