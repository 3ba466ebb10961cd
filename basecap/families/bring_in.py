"""A published model as one of a study: its weights and tokenizer as records that evaluations and reports read."""

import shutil
from pathlib import Path

from basecap.data import check_vocabulary
from basecap.data.hashes import digest, file_digest
from basecap.data.tokenizer import Tokenizer
from basecap.errors import ConfigError
from basecap.families._folder import family_of, read_model, weight_files
from basecap.models.language_model import LanguageModel
from basecap.plan.workloads import recorded_data
from basecap.records import RunInfo, RunRecords, StudyRecords
from basecap.study.config import StudyConfig, validate
from basecap.study.recorded_plugins import refuse_absent_plugins
from basecap.system.files import fsync_files, process_name, real_path, writing
from basecap.train.checkpoint import save_weights


def import_model(folder: Path, out: Path, name: str | None = None) -> RunRecords:
    """Write the model of a folder into the study in `out`, whole or not at all, and return its records.

    Args:
        folder: with config.json, safetensors and tokenizer.json, as the hub has it.
        out: directory of a study of text.
        name: in tables; the folder's when None.

    Raises:
        ConfigError: no study of text, a folder of another architecture, without weights or without tokenizer, or a name
            that is empty or that the study has.
        DataError: files that are damaged or cannot be written, or text that is missing.
    """
    records = StudyRecords(out)
    study = _study(records)
    name = real_path(folder).name if name is None else name
    if not name.strip() or not name.isprintable():
        raise ConfigError(f"{name!r} is no name for tables; give one line of text with --name.")
    family_of(folder)  # refuses another architecture before its name
    (made,) = records.imported(name)
    if made.path.exists() or name in [entry.name for entry in study.architectures]:
        raise ConfigError(f"{out} has a model called {name!r} already; give another name with --name.")
    model, tokenizer = read_model(folder), Tokenizer.load(folder, "download it again")
    check_vocabulary(model.config.vocab, tokenizer)
    own = recorded_data(study, out).tokenizer.fingerprint != tokenizer.fingerprint
    info = _info(name, folder, model, study.length, "own" if own else "study")
    partial = RunRecords(made.path.with_name(f".{made.path.name}.{process_name()}.partial"))
    try:
        with writing(made.path):
            partial.path.mkdir()
            save_weights(partial.weights, model, 0)
            partial.write_info(info)
            partial.tokenizer.write_text(tokenizer.description, encoding="utf-8")
            fsync_files(partial.path)
            partial.path.rename(made.path)
    finally:
        shutil.rmtree(partial.path, ignore_errors=True)
    return made


def _study(records: StudyRecords) -> StudyConfig:
    try:
        study = validate(records.study(), str(records.path / "study.yaml"))
    except ConfigError:
        refuse_absent_plugins(records)
        raise
    if study.task is not None:
        raise ConfigError(
            f"{records.path} is a study of tasks, whose tokens no published model knows; import into a study of text."
        )
    return study


def _info(name: str, folder: Path, model: LanguageModel, length: int, tokenizer: str) -> RunInfo:
    weights = digest([file_digest(path) for path in weight_files(folder)])
    return RunInfo(
        name=name,
        seed=0,
        use=model.config.layers[0].use,
        status="imported",
        message="",
        parameters=model.parameters_count(),
        state_bytes=model.state_bytes(length),
        origin={"folder": real_path(folder).name, "weights": weights, "tokenizer": tokenizer},
    )
