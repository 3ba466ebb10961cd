"""A trained run as a folder that `transformers` loads, on this machine or on the Hugging Face hub."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.utils import logging as progress

from basecap.analysis.runs import failed_checks
from basecap.data.tokenizer import Tokenizer
from basecap.errors import ConfigError, DataError, describe_error
from basecap.hf.card import Card
from basecap.hf.model import BasecapConfig, BasecapForCausalLM
from basecap.models import LanguageModel
from basecap.plugins import files_of
from basecap.records import RunRecords, StudyRecords
from basecap.run.provenance import plugin_files, sources
from basecap.run.trained import info_of, load_trained, stored_weights
from basecap.study.config import validate
from basecap.system.files import fsync_files, process_name, share_mode, writing
from basecap.system.hub import refuse_unreachable

#: Largest file of weights; more go to several files with an index.
LARGEST_FILE = "5GB"
#: How a repository on the hub is named as a target.
HUB = "hub:"


def export(run: Path, to: str, step: int | None = None) -> str:
    """Write the model of a run for `transformers`, whole or not at all; return where it is.

    Args:
        run: DIR/runs/NAME-sSEED.
        to: a directory that does not exist, or hub:OWNER/NAME.
        step: the training step of stored weights; None: the last.

    Raises:
        ConfigError: no run, a model that generates nothing, no weights of this step, other plugins, a directory that
            exists, no token.
        CheckpointError: no checkpoint, or a damaged one.
        DataError: a text or tokenizer that is missing, a folder that cannot be written, a hub out of reach.
    """
    if to.startswith(HUB):
        token = _token(to)
        with tempfile.TemporaryDirectory() as folder:
            write_folder(run, Path(folder), step)
            return _upload(Path(folder), to.removeprefix(HUB), token)
    target = Path(to)
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists; give a directory that does not, or remove it.")
    partial = target.with_name(f".{target.name}.{process_name()}.partial")
    try:
        with writing(target):
            partial.mkdir()
            write_folder(run, partial, step)
            share_mode(partial, "config.json")
            fsync_files(partial)
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return str(target)


def write_folder(run: Path, folder: Path, step: int | None = None) -> None:
    """Write weights, configurations, tokenizer, plugins and card into an empty folder; raises as `export` does."""
    info, records = info_of(run), RunRecords(run)
    if info.imported:
        raise ConfigError(f"{run} was trained elsewhere; give transformers the folder that it came from.")
    trained = load_trained(run, step=step, device="cpu")
    network, tokenizer, described = trained.network, trained.tokenizer, trained.network.config
    held = StudyRecords(records.study)
    study = validate(held.study(), str(held.path / "study.yaml"))
    _refuse_without_decoding(info.name, network)
    config = BasecapConfig.of(described, tokenizer.end_of_text, sources(described))
    with _without_bars():
        BasecapForCausalLM.around(network, config).save_pretrained(folder, max_shard_size=LARGEST_FILE)
    write_tokenizer(tokenizer, folder)
    plugins = plugin_files(described)
    _copy_plugins(plugins, folder)
    studies = (held.results() or {"studies": []})["studies"]
    card = Card(
        info=info,
        study=study,
        results=next((found for found in studies if found["name"] == study.name), None),
        fault=failed_checks(held).get(info.series),
        step=trained.step if trained.step < max(stored_weights(records)) else None,
        tokens=_tokens(records, trained.step),
        model=described.model_dump(mode="json"),
        end_of_text=tokenizer.decode([tokenizer.end_of_text]),
        plugins=[plugin.name for plugin in plugins],
    )
    (folder / "README.md").write_text(card.text(), encoding="utf-8")


@contextmanager
def _without_bars() -> Iterator[None]:
    """Have transformers draw no progress bar of its own, which would stay on the terminal."""
    drawn = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            progress.enable_progress_bar()


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that AutoTokenizer reads: its ids are those of `tokenizer`, special tokens in a text included."""
    content = json.loads(tokenizer.description)
    for token in content["added_tokens"]:
        token["special"] = token.get("special") or token["id"] == tokenizer.end_of_text
    # What it would cut, pad or add to a text is not part of what the model was trained on.
    content |= {"truncation": None, "padding": None, "post_processor": None}
    end = tokenizer.decode([tokenizer.end_of_text])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), end),
        "split_special_tokens": True,  # a text may contain their names
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    for name, written in (("tokenizer.json", content), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(written, ensure_ascii=False), encoding="utf-8")


def _tokens(records: RunRecords, step: int) -> int | None:
    """Return the tokens of `step` training steps, None where the log of the training is lost."""
    rows = records.last_metrics(1)
    return step * (rows[-1]["tokens"] // rows[-1]["step"]) if rows else None


def _copy_plugins(plugins: Sequence[Path], folder: Path) -> None:
    """Copy plugin files, and the files beside them that they import."""
    for plugin in plugins:
        for file in files_of(plugin):
            copy = folder / file.relative_to(plugin.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


@torch.no_grad()
def _refuse_without_decoding(name: str, model: LanguageModel) -> None:
    """Raise ConfigError for a model with a mixer that cannot decode."""
    token = torch.zeros(1, 1, dtype=torch.int64)
    try:
        caches = model.init_cache(1, 2)
        model.prefill(token, caches)
        model.step(token, caches)
    except Exception as error:  # of a plugin's mixer
        raise ConfigError(
            f"{name} cannot be exported, as its mixer does not decode ({describe_error(error)}); write its init_cache, "
            "prefill and step, or derive it from basecap.mixers.ForwardOnly."
        ) from error


def _token(to: str) -> str:
    """Return the token that an upload needs.

    Raises ConfigError for a name that no repository has, or without a token; DataError when the hub is out of reach.
    """
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(to.removeprefix(HUB))
    except HFValidationError as error:
        raise ConfigError(f"{to} is no name of a repository; give {HUB}OWNER/NAME.") from error
    token = get_token()
    if token is None:
        raise ConfigError(f"{to} needs a token of the Hugging Face hub; log in with `hf auth login`, or set HF_TOKEN.")
    refuse_unreachable(to, "export to a directory and upload it later")
    return token


def _upload(folder: Path, name: str, token: str) -> str:
    """Upload a folder as one commit and return its address; raises DataError when that fails."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        where = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model exported by basecap")
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot upload to {HUB}{name} ({describe_error(error)}); check the name and that your token may write."
        ) from error
    return str(where)
