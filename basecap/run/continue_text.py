"""Text from a trained run of a study."""

import logging
from pathlib import Path

from basecap.errors import ConfigError, nearest
from basecap.records import RunInfo, RunRecords, StudyRecords
from basecap.study.config import validate

logger = logging.getLogger("basecap.study")


def continue_text(
    run: Path,
    prompt: str,
    tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    seed: int,
    device: str | None,
) -> str:
    """Return `prompt` and its continuation by the model in `run` (DIR/runs/NAME-sSEED).

    Logs a warning if its architecture failed checks before it trained: it may decode other than it trains.

    Raises:
        ConfigError: `run` is not the directory of a run, its text or its plugin is another or missing, or `prompt` is
            not text.
        CheckpointError: the run has no readable checkpoint.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("the prompt is not text in UTF-8; convert it.") from error
    info = refuse_other_directory(run)

    import torch  # here, as this takes seconds: a wrong directory is refused at once

    from basecap.analysis.runs import failed_checks
    from basecap.models.generate import generate
    from basecap.plan.workloads import recorded_data
    from basecap.run.provenance import refuse_other_plugins
    from basecap.study.recorded_plugins import refuse_absent_plugins
    from basecap.system import environment
    from basecap.train.checkpoint import load_model, stored_config

    refuse_other_plugins(RunRecords(run), stored_config(RunRecords(run).resume))
    out = RunRecords(run).study
    try:
        study = validate(StudyRecords(out).study(), str(out / "study.yaml"))
    except ConfigError:
        refuse_absent_plugins(StudyRecords(out))
        raise
    place = environment.choose_device(device)
    model = load_model(RunRecords(run).resume).to(place)
    tokenizer = recorded_data(study, out).tokenizer
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    start = torch.tensor([ids], dtype=torch.int64, device=place)
    if fault := failed_checks(StudyRecords(out)).get(info.series):
        logger.warning("%s %s.", info.series, fault)
    added = generate(model, start, tokens, temperature=temperature, top_k=top_k, seed=seed)
    return tokenizer.continued(prompt, added[0].tolist())


def refuse_other_directory(run: Path) -> RunInfo:
    """Return the info of a run; raises ConfigError when `run` is not the directory of one."""
    info = RunRecords(run).info()
    if info is None:
        places = (run, run.parent.parent, run.parent)  # a study, a name misspelt below runs, runs itself
        found = next((runs for runs in (StudyRecords(place).runs() for place in places) if runs), [])
        hint = nearest(str(run), [str(known.path) for known in found]) if found else "give DIR/runs/NAME-sSEED."
        raise ConfigError(f"{run} is not the directory of a run; {hint}")
    return info
