"""The most seeds that `basecap run --until-decided` may add, and which studies it refuses."""

from basecap.errors import ConfigError
from basecap.study.config import StudyConfig


def seed_limit(study: StudyConfig, until_decided: bool, most: int | None) -> int | None:
    """Return the largest number of seeds that the study may reach, None without `--until-decided`.

    Args:
        study: the study.
        until_decided: whether `--until-decided` was given.
        most: what was given with `--max-seeds`.

    Raises:
        ConfigError: a limit that is missing, too low or without `--until-decided`, or a study without verdicts.
    """
    if not until_decided:
        if most is not None:
            raise ConfigError("--max-seeds limits what --until-decided adds; give both, or set seeds instead.")
        return None
    if most is None:
        raise ConfigError("--until-decided needs a limit; add --max-seeds N.")
    count = len(study.seeds)
    if most < max(2, count):
        seeds = f"{count} seed{'s' if count > 1 else ''}"
        raise ConfigError(f"the study has {seeds} and --max-seeds is {most}; give at least {max(2, count)}.")
    if study.task is not None:
        raise ConfigError("a study of tasks has no verdicts to wait for; leave out --until-decided and set seeds.")
    if not study.text.ood:
        raise ConfigError("a study without unseen domains has no verdicts to wait for; leave out --until-decided.")
    import torch.distributed  # here, so that options are refused at once

    if torch.distributed.is_torchelastic_launched():
        raise ConfigError("--until-decided does not run under torchrun; without it runs go side by side on all GPUs.")
    return most
