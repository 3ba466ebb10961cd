"""The text of a study file: found, joined with the study that it extends and with the overrides of a scale."""

import copy
import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

from basecap.errors import ConfigError, nearest
from basecap.names import PAPER
from basecap.system.files import read
from basecap.system.yaml_text import parse_yaml

LIBRARY = Path(__file__).parent / "library"

#: Names of scales: they become parts of directories.
SCALE = re.compile(r"\w[\w.+-]{0,29}")

#: Keys of a study file that are gone once it is read, with their descriptions.
READ_ONLY = {
    "extends": "another study, by name or as a file beside this one, whose keys this one takes and overrides: sections "
    "key by key, lists as a whole; its name and summary are not taken",
    "scales": "overrides by name of a scale, such as laptop: {train: {tokens: 1e6}}, for --scale; the file itself is "
    "the scale paper",
}

#: What a study does not take from the one that it extends, and what no scale changes.
OWN = ("name", "summary")


@functools.cache
def library() -> dict[str, Path]:
    """Return the built-in studies by name."""
    return {path.stem: path for path in sorted(LIBRARY.glob("*.yaml"))}


def read_study(study: str, scale: str | None = None) -> dict[str, Any]:
    """Return the keys of a study, those of the study that it extends and the overrides of a scale among them.

    Args:
        study: name in the library, or path of a file.
        scale: name of a scale; default: the key `scale` of the file, else the paper's, but none where the file is no
            built-in study and only inherits its scales.

    Raises:
        ConfigError: an unknown study or scale, studies that extend each other, a file that holds no study.
    """
    path = _find(study)
    content = _extended(path, ())
    own = study in library() or "scales" in _parse(path)
    return _at_scale(content, study, scale, default=PAPER if own else None)


def own_scales(study: str) -> list[str]:
    """Return the names of the scales that a study file, which is not built in, overrides itself."""
    return [] if study in library() else list(_parse(_find(study)).get("scales") or ())


def apply_setting(content: dict[str, Any], setting: str) -> None:
    """Set the key of a study's `content` that "a.b=value" names, the value in YAML; raises ConfigError."""
    key, equals, text = setting.partition("=")
    *parents, last = key.split(".")
    if not equals or not all([*parents, last]):
        raise ConfigError(f"--set {setting!r} is not of the form a.b=value; write for example train.lr=3e-4.")
    if key in ("scale", *READ_ONLY):
        raise ConfigError(f"--set cannot change {key}; choose a scale with --scale, or edit the study file.")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        quoted = shlex.quote(f"{key}={json.dumps(text)}")
        raise ConfigError(f"--set {setting!r}: the value {error}; as text it is written --set {quoted}.") from error
    place: Any = content
    for parent in parents:
        inner = place.get(parent, {})
        if not isinstance(inner, dict):
            what = "a list, which is set as a whole" if isinstance(inner, list) else "not a section"
            raise ConfigError(f"--set {key}: {parent!r} is {what}; `basecap list settings` shows the keys.")
        place[parent] = inner.copy()  # an alias of it elsewhere in the file stays what it was
        place = place[parent]
    place[last] = value


def refuse_untested_shifts(layer: dict[str, Any], whole: dict[str, Any], where: str) -> None:
    """Raise ConfigError when a layer of a study names a shift of a task that the study does not train on or test.

    A layer is a file, the overrides of a scale or what --set sets. Layers above it may choose among the tasks, and the
    shifts of the others are then ignored.

    Args:
        layer: its keys.
        whole: those of the study up to this layer.
        where: the layer, to be named in an error.
    """
    task, own = whole.get("task"), layer.get("task")
    if not (isinstance(task, dict) and isinstance(own, dict) and isinstance(own.get("shifts"), dict)):
        return
    known: dict[str, Any] = {"task.train": task.get("train"), "task.test": task.get("test") or task.get("train")}
    if not all(isinstance(names, list) for names in (*known.values(), *own["shifts"].values())):
        return  # validation says what is wrong
    for trained, shifts in own["shifts"].items():
        for key, name in (("task.train", trained), *(("task.test", shift) for shift in shifts)):
            if name not in known[key]:
                raise ConfigError(
                    f"{where}: task.shifts has {name!r}, which is not in {key}; add it there or remove it."
                )


def _find(study: str, extending: Path | None = None) -> Path:
    """Return the file of a study; raises ConfigError when there is none.

    Args:
        study: name in the library, or path of a file.
        extending: the file that extends it, from whose directory a relative path is meant.
    """
    path = library().get(study) or (extending.parent if extending else Path()) / study
    by = f"study file {extending}: extends: " if extending else ""
    if path.is_dir():
        held = (path / "study.yaml").is_file() and not extending
        file = f"write {path}/study.yaml --out {path} for its study." if held else "give the YAML file of a study."
        raise ConfigError(f"{by}{path} is a directory; {file}")
    if path.suffix not in (".yaml", ".yml"):
        if path.suffix == ".py" and not extending:
            raise ConfigError(f"{study} is Python, not a study; write for example quickstart --plugin {study}.")
        if path.is_file():
            raise ConfigError(f"{by}{study} is not called .yaml; give the YAML file of a study, or rename it.")
        # "figure-6a" may be bc-figure-6a; "figure-6", "bc-figure-6" and "bc-figure-6z" also bc-figure-6b.
        figure = re.escape(re.sub(r"(?<=\d)[a-z]$", "", study))
        papers = [name for name in library() if name.endswith(f"-{study}")]
        papers = papers or [name for name in library() if re.search(rf"(^|-){figure}[a-z]?$", name)]
        if papers:
            raise ConfigError(f"{by}unknown study {study!r}: did you mean {' or '.join(map(repr, papers))}?")
        # Another figure of the paper is not a misspelt name.
        known = [name for name in library() if _numbers(name) == _numbers(study)]
        hint = nearest(study, known, see="basecap list studies")
        mixer = "" if extending or "?" in hint else " To train a mixer, run quickstart --only NAME."
        raise ConfigError(f"{by}unknown study {study!r}: {hint}{mixer}")
    return path


def _numbers(name: str) -> list[str]:
    return re.findall(r"\d+[a-z]?", name.lower())


def _extended(path: Path, extending: tuple[Path, ...]) -> dict[str, Any]:
    """Return the keys of a study file over those of the study that it extends.

    Args:
        path: the file.
        extending: the files that led to this one through `extends`, in order.
    """
    if path.resolve() in [known.resolve() for known in extending]:
        circle = " extends ".join(str(known) for known in (*extending, path))
        raise ConfigError(f"studies extend each other in a circle: {circle}; remove one extends.")
    content = _parse(path)
    resolved, base = content.pop("schema", None) is not None, content.pop("extends", None)
    whole = content
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"study file {path}: extends should be the name or file of one study.")
        below = _extended(_find(base, path), (*extending, path))
        whole = _merged({key: value for key, value in below.items() if key not in OWN}, content)
    if not resolved:  # study.yaml of a directory has all shifts of a study whose tasks --set may have changed
        refuse_untested_shifts(content, whole, f"study file {path}")
    return whole


def _parse(path: Path) -> dict[str, Any]:
    text = read(path)
    if text is None:
        raise ConfigError(f"study file {path} does not exist; give a path, or a name of `basecap list studies`.")
    try:
        content = copy.deepcopy(_parsed(text))
    except ValueError as error:
        raise ConfigError(f"study file {path} {error}; fix it.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"study file {path} is not a study; it must have keys such as name, data, architectures.")
    # Keys such as x-sizes are no options: they hold what anchors elsewhere in the file refer to.
    return {key: value for key, value in content.items() if not str(key).startswith("x-")}


@functools.cache
def _parsed(text: bytes) -> Any:
    """Return the content of a study file; `basecap list studies` reads files that others extend many times."""
    return parse_yaml(text)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return sections joined key by key; any other value of `above`, lists among them, replaces that of `below`."""
    joined = dict(below)
    for key, value in above.items():
        held = joined.get(key)
        joined[key] = _merged(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return joined


def _at_scale(content: dict[str, Any], study: str, wanted: str | None, default: str | None) -> dict[str, Any]:
    """Return a study without its `scales`, the overrides of one of them applied and its name under `scale`."""
    scales = content.pop("scales", None)
    scale = content.get("scale") if wanted is None else wanted
    if scales is None:  # one size only, or study.yaml of a directory, which is of one scale
        if scale != content.get("scale"):
            only = f"is of scale {content['scale']!r}" if content.get("scale") else "has one size"
            raise ConfigError(f"study {study} {only} and no scale {scale!r}; leave out --scale.")
        return content
    _check_scales(scales, study)
    scale = default if scale is None else scale
    if scale not in (None, PAPER, *scales):
        raise ConfigError(f"study {study} has no scale {scale!r}: {nearest(str(scale), [*scales, PAPER])}")
    where = f"study {study}: scales.{scale}"
    overrides = {} if scale in (None, PAPER) else scales[scale]
    whole = _merged(content, overrides)
    refuse_untested_shifts(overrides, whole, where)
    return {**whole, "scale": scale}


def _check_scales(scales: Any, study: str) -> None:
    """Raise ConfigError unless `scales` holds sections by names of scales, without keys that no scale changes."""
    if not isinstance(scales, dict):
        raise ConfigError(f"study {study}: scales should be a section, with the overrides of each scale by its name.")
    for name, overrides in scales.items():
        if not isinstance(name, str) or not SCALE.fullmatch(name):
            wanted = "use only letters, digits and _ . + -"
            raise ConfigError(f"study {study}: {name!r} is not a valid name of a scale; {wanted}.")
        if name == PAPER:
            raise ConfigError(f"study {study}: scales.{PAPER} is the file itself; set its keys there.")
        if not isinstance(overrides, dict):
            raise ConfigError(f"study {study}: scales.{name} should be a section, with the keys that it overrides.")
        for key in overrides:
            if key in (*OWN, "scale", *READ_ONLY):
                raise ConfigError(f"study {study}: a scale cannot change {key}; remove scales.{name}.{key}.")
