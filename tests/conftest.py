"""Guards around every test, and a forkserver that warms up while pytest collects."""

import pytest

from tests.harness import forkserver
from tests.harness.guards import (
    _environment_is_left_alone,
    _no_process_group_is_left,
    _repository_stays_clean,
    _working_directory_is_temporary,
)

pytest_plugins = ["pytester"]  # runs pytest inside a test, to test the guards

__all__ = [
    "_environment_is_left_alone",
    "_no_process_group_is_left",
    "_repository_stays_clean",
    "_working_directory_is_temporary",
]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets the forkserver import in the background when some test of this run needs ranks."""
    if any(hasattr(getattr(item, "function", None), "rank_body") for item in session.items):
        forkserver.start()
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:  # otherwise the first dot would seem to hang
            reporter.write_line("the first run on a machine compiles DeepSpeed's ops, which takes some minutes")


@pytest.fixture(scope="session")
def nvme_ops() -> None:
    """Compiles the ops of NVMe offload, so that no test's timeout pays for that."""
    forkserver.build("pin_memory", "async_io")
