from collections.abc import Iterator

import pytest
import torch

# The suite is made of small problems, for which threads only get in each other's way. Tests of threads ask for them.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
