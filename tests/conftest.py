"""One thread: the networks here are too small for more, and threads that wait for each other are slow."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
