import pytest

from tests.helpers.runs import LaunchedRun


@pytest.fixture
def start(tmp_path):
    """Starts `asyncrl launch`; what is left of the runs is ended with the test."""
    runs = []

    def make(*arguments, **options):
        run = LaunchedRun(tmp_path, *arguments, name=f"r{len(runs)}", **options)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.close()
