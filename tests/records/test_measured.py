"""A record is a row of evals.jsonl and back; its key says which number it is."""

from dataclasses import replace

import pytest
from pydantic import TypeAdapter, ValidationError

from basecap.records.measured import Record

RECORDS = TypeAdapter(Record)
PLAIN = Record(step=2, tokens=20, eval="domain-loss", subset="code", metric="loss", value=2.5, n=5)


def test_a_row_has_the_place_first_and_keeps_quiet_about_what_few_records_have():
    assert [*PLAIN.row()] == ["step", "tokens", "eval", "subset", "metric", "value", "n", "stderr", "axis"]
    assert PLAIN.row()["stderr"] is None and PLAIN.row()["axis"] == {}
    full = replace(PLAIN, unit="share", better="higher", data="a set, 1f3a", axis={"length": 8.0}, stderr=0.25)
    assert {name: full.row()[name] for name in ("unit", "better", "data")} == {
        "unit": "share",
        "better": "higher",
        "data": "a set, 1f3a",
    }
    for record in (PLAIN, full):
        assert RECORDS.validate_python(record.row()) == record


@pytest.mark.parametrize(
    "change", [{"step": 3}, {"eval": "other"}, {"subset": "b"}, {"metric": "b"}, {"axis": {"a": 1.0}}]
)
def test_numbers_of_another_place_have_another_key(change: dict):
    assert replace(PLAIN, **change).key != PLAIN.key


def test_the_same_number_measured_again_has_the_same_key():
    first = replace(PLAIN, axis={"length": 8.0, "pairs": 2.0})
    again = replace(PLAIN, axis={"pairs": 2.0, "length": 8.0}, value=3.0, n=7, stderr=0.1, tokens=21, unit="share")
    assert again.key == first.key and len({PLAIN.key: PLAIN, first.key: first, again.key: again}) == 2


def test_a_row_with_another_key_or_direction_is_refused():
    for row in (PLAIN.row() | {"domain": "code"}, PLAIN.row() | {"better": "up"}):
        with pytest.raises(ValidationError):
            RECORDS.validate_python(row)
