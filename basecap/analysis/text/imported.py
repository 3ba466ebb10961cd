"""What was measured of models that were trained elsewhere: numbers, no verdict."""

from basecap.analysis.results import EvaluationRow, ImportedRow, PointLosses
from basecap.analysis.rows import finite
from basecap.analysis.text.losses import EVALUATION
from basecap.records import RunRecords, StudyRecords


def imported_rows(records: StudyRecords) -> list[ImportedRow]:
    """Return a row for each imported model of a study; raises DataError for records that cannot be read."""
    return [row for found in records.imported() if (row := _row(found)) is not None]


def _row(records: RunRecords) -> ImportedRow | None:
    info = records.info()
    if info is None:
        return None
    measured = records.evals()
    losses = {(one.subset, one.metric): finite(one.value) for one in measured if one.eval == EVALUATION}
    others = [one for one in measured if one.eval != EVALUATION]
    return ImportedRow(
        name=info.name,
        use=info.use,
        origin=info.origin,
        parameters=info.parameters,
        state_bytes=info.state_bytes,
        domains={
            domain: PointLosses(loss=losses.get((domain, "loss")), bits_per_byte=losses.get((domain, "bits_per_byte")))
            for domain in dict.fromkeys(domain for domain, _ in losses)
        },
        evaluations=[
            EvaluationRow(
                name=info.name,
                seed=info.seed,
                **(vars(one) | {"value": finite(one.value), "stderr": finite(one.stderr)}),
            )
            for one in others
        ],
    )
