"""A study that has been created."""

import pytest

from basecap.records import StudyRecords
from tests.records.made_up import STUDY


@pytest.fixture
def records(tmp_path) -> StudyRecords:
    found = StudyRecords(tmp_path)
    found.create(STUDY)
    return found
