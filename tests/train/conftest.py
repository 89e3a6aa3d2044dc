"""One thread for what is compared bit for bit with another process, as the order of a sum depends on how many share it;
and what a module's scenarios in several ranks came to."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_results import Found, played, results_in


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all scenarios of the set that is named as the test module have been played."""
    name = request.module.__name__.removeprefix("test_")
    return played(name, tmp_path_factory.mktemp(name))


@pytest.fixture
def found(directory: Path) -> Found:
    """What a scenario returned on each rank of a mesh."""
    return results_in(directory)
