"""The study file: completed, checked, refused with a sentence."""

import datetime
import math
import re
import shlex
import textwrap
import time
from pathlib import Path

import pytest
import yaml

from basecap.data.shards import MIN_DOCUMENTS
from basecap.data.sources._reference import LONGEST, SHORTEST
from basecap.errors import BasecapError, ConfigError
from basecap.plan.prospects import sparse
from basecap.plan.runs import costs, plan_evaluations, plan_runs
from basecap.study.config import COST, StudyConfig, load_study, select
from basecap.study.study_file import library, read_study
from basecap.system.yaml_text import parse_yaml

STUDY = {
    "name": "small",
    "data": {"source": "installed", "seq_len": 32, "train": ["prose"], "ood": ["python"]},
    "model": {"hidden": 32, "layers": 2},
    "train": {"tokens": "2e3", "batch": 4},
    "seeds": [0, 1],
    "architectures": [
        "transformer++",
        {"name": "window 8", "use": "transformer++", "mixer": {"window": 8}, "train": {"lr": 1e-3}},
        {"name": "hybrid", "use": "transformer++", "layers": ["transformer++", {"use": "transformer++ alibi"}]},
    ],
}


def write(tmp_path: Path, content: object = STUDY) -> str:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def changed(place: str, value: object) -> dict:
    """Return STUDY with the key at a dotted place set."""
    content = yaml.safe_load(yaml.safe_dump(STUDY))
    *parents, last = place.split(".")
    section = content
    for parent in parents:
        section = section[int(parent)] if isinstance(section, list) else section.setdefault(parent, {})
    section[last] = value
    return content


def test_a_study_becomes_runs(tmp_path):
    study = load_study(write(tmp_path))
    runs = plan_runs(study, 64)
    assert [(run.name, run.seed) for run in runs] == [
        (name, seed) for seed in (0, 1) for name in ("transformer++", "window 8", "hybrid")
    ]
    window = runs[1]
    assert window.model.build_mixers()[0].config.window == 8 and window.train.lr == 1e-3
    assert [mixer.config.position for mixer in runs[2].model.build_mixers()] == ["rope", "alibi"]
    assert len({run.hash for run in runs}) == 6


def test_heads_of_a_study_are_those_of_every_mixer_that_leaves_them_open(tmp_path):
    content = changed("architectures.1.mixer.heads", 4)
    content["architectures"].append("mamba-1")  # without such an option
    study = load_study(write(tmp_path, content), ["model.heads=2"])
    layers = {run.name: run.model.build_mixers() for run in plan_runs(study, 64)}
    found = {name: [getattr(layer.config, "heads", None) for layer in own] for name, own in layers.items()}
    assert {name: set(heads) for name, heads in found.items()} == {
        "transformer++": {2}, "window 8": {4}, "hybrid": {2}, "mamba-1": {None},
    }  # fmt: skip


def test_an_architecture_can_stand_in_another_body(tmp_path):
    inside = "transformer++ in rwkv-7"
    entries = [inside, {"name": "own name", "use": inside}, {"name": "plain in rwkv-7", "use": "transformer++"}]
    study = load_study(write(tmp_path, STUDY | {"architectures": ["transformer++", *entries]}))
    assert [(entry.name, entry.use, entry.backbone) for entry in study.architectures[1:]] == [
        (inside, "transformer++", "rwkv-7"),
        ("own name", "transformer++", "rwkv-7"),
        ("plain in rwkv-7", "transformer++", None),
    ]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"use": "mamba-2 in rwkv-7", "backbone": "gpt"}, "names a backbone, and so does the key backbone"),
        ({"use": "mamba-2", "layers": ["mamba-2 in rwkv-7"]}, "no backbone of its own"),
        ({"layers": ["mamba-2", "transformer++"]}, "'other' has layers and no use"),
    ],
)
def test_a_backbone_is_named_once_and_for_whole_models(entry, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        load_study(write(tmp_path, STUDY | {"architectures": ["transformer++", {"name": "other", **entry}]}))


def test_settings_override_and_only_selects(tmp_path):
    study = load_study(write(tmp_path), ["train.lr=3e-4", "data.vocab=512", "seeds=[7]"])
    assert (study.train.lr, study.data.vocab, study.seeds) == (3e-4, 512, (7,))
    assert select(study, ["hybrid"]) == {"hybrid", "transformer++"}
    assert select(study, []) == {"transformer++", "window 8", "hybrid"}


def test_a_resolved_study_reads_back_as_itself(tmp_path):
    study = load_study(write(tmp_path))
    assert StudyConfig.model_validate(study.model_dump(mode="json")) == study
    assert study.model_dump(mode="json")["gap"] == {"cost": COST, "from": 0.5}


@pytest.mark.parametrize("name", [name for name in library() if not name.startswith(("bc-", "lp-", "recall-"))])
def test_shipped_studies_are_planned(name: str):
    study = load_study(name, [])
    assert study.summary
    for found in costs(plan_runs(study, study.model.vocab or study.data.vocab)):
        assert found.parameters > 0 and found.flops > 6 * 0.5 * found.tokens
        assert found.evaluations == 20 or study.train.eval_every
    assert plan_evaluations(study) and (not sparse(study) or name == "zoo")


def test_a_curve_of_too_few_points_is_warned_of(tmp_path):
    content = changed("train", {"tokens": 40 * 4 * 32, "batch": 4, "eval_every": 3 * 4 * 32})
    content["architectures"][2]["train"] = {"eval_every": 9 * 4 * 32}
    said = sparse(load_study(write(tmp_path, content)))
    warning = "Warning: too few evaluation points after gap.from = {} of the tokens, {} where a curve needs {}: {}; "
    expected = [warning.format(0.5, 8, 10, "transformer++"), warning.format(0.5, 3, 4, "hybrid")]
    assert [line.partition("lower")[0] for line in said] == expected
    said = sparse(load_study(write(tmp_path, content | {"gap": {"from": 0.1}})))
    assert not said


def test_summaries_count_nothing():
    summaries = {name: read_study(name)["summary"] for name in library()}
    sizes = r"\d+ ?[kMBG]\b|parameters|million|\b(three|four|five|six|seven|eight|nine|ten|twelve)\b"
    assert not [text for text in summaries.values() if re.search(sizes, text)]


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("trian", {}, "train"),
        ("train.tokns", 3, "tokens"),
        ("model.hiden", 3, "hidden"),
        ("data.sorce", "x", "source"),
        ("architectures.1.mixr", {}, "mixer"),
        ("architectures.1.name", "transformer++", "two entries"),
        ("train.lr", -1, r"train\.lr"),
        ("train.clip", float("inf"), r"train\.clip = inf: should be a finite number"),
        ("gap", {"cost": float("inf")}, r"gap\.cost = inf: should be a finite number"),
        ("data.weights", {"prose": float("nan")}, r"data\.weights\.prose = nan: should be a finite number"),
        ("architectures.1.layers", [], r"architectures\.1\.layers"),
        ("reference", "transformer+", r"transformer\+\+"),
        ("name", "../evil", r"name = '\.\./evil': a name begins with a letter or digit"),
        ("name", "", "a name begins with"),
        (
            "architectures",
            [{"nam": "x"}],
            r"unknown key 'architectures\.0\.nam': did you mean 'architectures\.0\.name'",
        ),
        ("architectures", [{"mixer": {}}], r"'architectures\.0\.name' is missing"),
        ("train.micro_batch", 3, r"train\.micro_batch = 3 is not a div"),
        ("train.betas", [0.9, 1.0], r"train\.betas\.1"),
        ("train.betas", [-0.1, 0.9], r"train\.betas\.0"),
        ("train.lr", math.inf, r"train\.lr"),
        ("train.lr", math.nan, r"train\.lr"),
        ("train.weight_decay", math.inf, r"train\.weight_decay"),
        ("train.clip", math.inf, r"train\.clip"),
        ("seeds", 3, r"seeds = 3: should be a list, such as \[3\]\.$"),
        ("seeds", "abc", r"= 'abc': should be a list; each entry should be a whole number\.$"),
        ("seeds", None, r"= null: should be a list; each entry should be a whole number\.$"),
        ("seeds", "1,2", r"= '1,2': should be a list, such as \[1,2\]\.$"),
        ("seeds", "1,1", r"= '1,1': should be a list, but not \[1,1\]: a seed is named twice; remove one\.$"),
        ("seeds", "[1", r"= '\[1': should be a list\.$"),
        ("train.betas", 0.9, r"train\.betas = 0\.9: should be a list with 2 entries\.$"),
        ("train.betas", 2, r"train\.betas = 2: should be a list; each entry should be less than 1\.$"),
        ("train.betas", [0.9] * 3, r"should be a list with 2 entries at most\.$"),
        ("data.train", "prose", r"data\.train = 'prose': should be a list, such as \[prose\]\.$"),
        ("data.train", "prse", r"= 'prse': should be a list; source 'installed' has no domain .* mean 'prose'\?$"),
        ("data.train", 3, r"data\.train = 3: should be a list; each entry should be text; "),
        ("architectures.1.layers", {"us": "gpt"}, r"should be a list, but not \[{'us': 'gpt'}\]: use is missing\.$"),
        ("architectures", [5], r"architectures = \[5\]: 5 is not one architecture; write its name, or its keys"),
        ("architectures.2.use", ["mamba-2"], r"architectures\.2\.use = \['mamba-2'\]: should be text; "),
        ("architectures.1.name", "a\0b", r"name = 'a\\x00b': should be one line, without control characters\.$"),
        ("evals", 5, r"evals = 5: should be a list, but not \[5\]: 5 is not an evaluation; write NAME"),
        ("evals", [{1: {}}], r"{1: {}} is not an evaluation; write NAME or NAME: {option: value}\.$"),
        ("seeds", [True], r"seeds\.0 = true: should be a number, not true or false\.$"),
        ("train.tokens", True, r"train\.tokens = true: should be a number, not true or false\.$"),
        ("train.tokens", "10k", r"train\.tokens = '10k': should be a whole number\.$"),
        ("train.lr", True, r"train\.lr = true: should be a number, not true or false\.$"),
        ("train.lr", datetime.date(2020, 1, 1), r"train\.lr = 2020-01-01: should be a number\.$"),
        ("gap", {"cost": True}, r"gap\.cost = true: should be a number, not true or false\.$"),
        ("gap", {"from": 1.5}, r"gap\.from = 1\.5: should be less than 1\.$"),
        ("gap", {"from": 0}, r"gap\.from = 0: should be greater than 0\.$"),
        ("gap", {"form": 0.5}, r"unknown key 'gap\.form': did you mean 'gap\.from'\?$"),
        ("train.lr", [], r"train\.lr = \[\]: is an empty list; give one learning rate or several\.$"),
        ("train.lr", [1e-3, 1e-3], r"train\.lr = \[0\.001, 0\.001\]: a rate is named twice; remove one\.$"),
        ("train.lr", [1e-3, -1], r"train\.lr\.1 = -1: should be greater than 0\.$"),
        ("train.lr", "1e-3, 1e-2", r"train\.lr = '1e-3, 1e-2': should be a number\.$"),
        ("train.eps", 0, r"train\.eps = 0: should be greater than 0\.$"),
        ("gap", 5, r"gap = 5: should be a section, with a value for each key\.$"),
        ("data.weights", {"prose": True}, r"data\.weights\.prose = true: should be a number, not true or false\.$"),
        ("data.weights", {1: 1}, r"data\.weights\.1 = 1: should be text; a number or a date is text in quotes\.$"),
        ("data.cache", "", r"data\.cache = '': should not be empty\.$"),
        ("model.hidden", 10**18, r"model\.hidden = 10+: should be less than or equal to 1048576\.$"),
        ("model.layers", 10**6, r"model\.layers = 10+: should be less than or equal to 1024\.$"),
        ("data.seq_len", 10**12, r"data\.seq_len = 10+: should be less than or equal to 16777216\.$"),
        ("data.vocab", 10**9, r"data\.vocab = 10+: should be less than or equal to 1048576\.$"),
        ("name", "x" * 5000, r"name = 'x{40,50}\.\.\.x{40,50}': a name begins with"),
        ("lr", 3e-4, r"unknown key 'lr': did you mean 'train\.lr'\?$"),
        ("train.hidden", 3, r"unknown key 'train\.hidden': did you mean 'model\.hidden'\?$"),
        ("train.token", 3, r"unknown key 'train\.token': did you mean 'train\.tokens'\?$"),
        ("train.LR", 3, r"unknown key 'train\.LR': did you mean 'train\.lr'\?$"),
        ("train", {7: 8, "tokens": 9}, r"unknown key 'train\.7': choose from average, "),
        ("seeds", [], r"seeds = \[\]: should be a list with 1 or more entries\.$"),
        ("architectures", [], r"architectures = \[\]: should be a list with 1 or more entries\.$"),
        ("architectures", "mamba-2", r"architectures = 'mamba-2': should be a list, such as \[mamba-2\]\.$"),
        (
            "architectures",
            ["mamba-2"],
            r"reference 'transformer\+\+' is not among the .* --set reference=mamba-2\.$",
        ),
        ("reference", "window", r"the reference 'window' is not among the .*--set 'reference=window 8'\.$"),
        ("seeds", [1, 1], r"seeds.*twice"),
        ("reference_seeds", [1, 1], r"reference_seeds = \[1, 1\]: a seed is named twice; remove one\.$"),
        ("reference_seeds", [], r"reference_seeds = \[\]: should be a list with 1 or more entries\.$"),
        ("reference_seed", [1], r"unknown key 'reference_seed': did you mean 'reference_seeds'\?$"),
        ("seeds", [2**63], r"seeds\.0"),
        ("seeds", [-1], r"seeds\.0 = -1: should be greater than or equal to 0\.$"),
        ("model.vocab", 100, r"model\.vocab = 100 is less than the tokenizer's 4096"),
    ],
)
def test_wrong_keys_and_values_are_named(tmp_path, place, value, words):
    with pytest.raises(ConfigError, match=words):
        load_study(write(tmp_path, changed(place, value)))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("architectures.1.use", "transfomer", "transformer"),
        ("architectures.1.mixer", {"windw": 3}, "window"),
        ("architectures.1.mixer", {"heads": 5}, "divide"),
        ("architectures.1.backbone", "gtp", "gpt"),
        ("architectures.1.mixer", {"window": 0}, "option 'window' of mixer Attention cannot be 0"),
        ("architectures.1.layers", ["transformer++"] * 9, "a pattern of 9 layers does not fit"),
        ("architectures.1.train", {"lrr": 3}, "lr"),
        ("architectures.1.train", {"lr": "fast"}, "lr"),
        (
            "architectures.1.train",
            {"eps": 1e-6},
            r"^architecture 'window 8': train\.eps is the same for all architectures; set it for the study\.$",
        ),
        ("architectures.1.train", {"betas": 0.9}, r"train\.betas: should be a list with 2 entries\.$"),
        (
            "architectures.1.train",
            {"betas": "0.9, 0.95"},
            r"train\.betas: should be a list, such as \[0\.9, 0\.95\]\.$",
        ),
        ("architectures.1.train", {"tokens": True}, r"train\.tokens: should be a number, not true or false\.$"),
        (
            "architectures.1.train",
            {"micro_batch": 3},
            "architecture 'window 8': train.micro_batch = 3 is not a divisor",
        ),
        ("architectures.1.mixer", {"window": -5}, "architecture 'window 8': option 'window'"),
        ("evals", ["domain-los"], "domain-loss"),
        ("evals", [{"domain-loss": {"splt": "test"}}], "split"),
        ("evals", [{"domain-loss": {"split": "tst"}}], r"cannot be 'tst': it should be 'validation' or 'test'\.$"),
        ("evals", [{"domain-loss": {"tokens_per_batch": True}}], "it should be a number, not true or false"),
        ("evals", ["domain-loss", {"domain-loss": {"split": "validation"}}], "is named twice"),
        ("evals", [{"copying": {"name": "domain-loss"}}], "cannot be named .domain-loss. like another one; choose"),
        ("evals", [{}], "is not an evaluation"),
        ("evals", [{"domain-loss": 5}], "{'domain-loss': 5} is not an evaluation"),
        ("evals", [{"domain-loss": {}, "other": {}}], "is not an evaluation"),
    ],
)
def test_names_and_sizes_are_refused_before_anything_runs(tmp_path, place, value, words):
    study = load_study(write(tmp_path, changed(place, value)))
    with pytest.raises(ConfigError, match=words):
        plan_evaluations(study)
        costs(plan_runs(study, 64))


def test_missing_key_is_named(tmp_path):
    content = changed("name", "small")
    del content["train"]["tokens"]
    with pytest.raises(ConfigError, match=r"train\.tokens.*missing"):
        load_study(write(tmp_path, content))


@pytest.mark.parametrize("text", ["a: [", "- 1", "", "\t", "name: 2001-99-99", "name: !!int x", "name: " + "[" * 3000])
def test_files_that_are_no_study_are_refused(tmp_path, text):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="study file"):
        load_study(str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"name: a\nname: b\n", r"is not valid YAML at line 2 \(duplicate key 'name'\); fix it\.$"),
        (b"name: a\ntrain: {lr: 1, lr: 2}\n", r"at line 2 \(duplicate key 'lr'\)"),
        (b"name: caf\xe9\n", r"is not text in UTF-8; fix it\.$"),
    ],
)
def test_describe_value_error_with_a_file_is_said_with_its_line(tmp_path, text, words):
    path = tmp_path / "study.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=words):
        load_study(str(path))


def test_keys_that_replace_merged_ones_are_no_keys_that_stand_twice():
    text = "a: {b: &b {x: 1}, c: {d: &d {<<: *b, x: 2}}}\ne: {<<: *d}\n'1': 0\n1: 0\n"
    assert parse_yaml(text) == {"a": {"b": {"x": 1}, "c": {"d": {"x": 2}}}, "e": {"x": 2}, "1": 0, 1: 0}


#: Three lines that stand for 9**9 values, as lists, as merged sections, and without end.
BOMBS = (
    "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]),
    "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 10))]),
    "a: &a {b: [*a]}",
)


@pytest.mark.parametrize("bomb", BOMBS)
def test_aliases_that_stand_for_millions_of_values_are_refused_at_once(tmp_path, bomb):
    path, began = tmp_path / "study.yaml", time.process_time()
    path.write_text("x-rest:\n" + textwrap.indent(bomb, "  "))
    with pytest.raises(ConfigError, match=r"is not valid YAML at line \d+ \(it has more than 100,000 values, aliases"):
        load_study(str(path))
    with pytest.raises(ConfigError, match="it has more than 100,000 values"):
        load_study("quickstart", [f"data={{{bomb}}}".replace("\n", ", ")])
    assert time.process_time() - began < 5


def test_anchors_may_stand_under_a_key_of_their_own(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("x-small: &small {hidden: 16, layers: 1}\n" + yaml.safe_dump(STUDY | {"model": "HERE"}))
    path.write_text(path.read_text().replace("HERE", "*small"))
    assert load_study(str(path)).model.hidden == 16
    with pytest.raises(ConfigError, match="unknown key 'x-large'"):
        load_study(str(path), ["x-large=1"])


def test_the_reference_is_any_architecture_where_the_study_takes_any():
    study = load_study("limited-zoo", ["reference=transformer++ gated"])
    assert [entry.name for entry in study.architectures][-1] == "transformer++ gated"
    with pytest.raises(ConfigError, match=r"no architecture 'transformer\+': did you mean 'transformer\+\+'"):
        load_study("limited-zoo", ["reference=transformer+"])


def test_an_unknown_architecture_is_named_before_the_reference():
    with pytest.raises(ConfigError, match=r"architecture 'nope': unknown mixer 'nope': see `basecap list mixers`"):
        load_study("quickstart", ["architectures=[nope]"])
    with pytest.raises(ConfigError, match=r"did you mean 'transformer\+\+'\?"):
        load_study("quickstart", ["architectures=[transformr++, mamba-2]"])


def test_a_control_is_compared_and_of_a_study_of_text():
    entry = "architectures=[transformer++, {use: mamba-1, control: true}]"
    assert [found.control for found in load_study("quickstart", [entry]).architectures] == [False, True]
    with pytest.raises(ConfigError, match="architecture 'mamba-1': control needs a study of text; remove it"):
        load_study("recall-card", [entry], scale="test")
    with pytest.raises(ConfigError, match=r"'transformer\+\+' is the reference, which is compared with nothing"):
        load_study("quickstart", ["architectures=[{use: transformer++, control: true}]"])


def test_a_setting_changes_no_alias_of_its_section(tmp_path):
    wide = {"hidden": 16}  # one section in two places, which YAML writes as an alias
    content = changed("architectures.1.model", wide) | {"model": wide}
    study = load_study(write(tmp_path, content), ["model.hidden=64"])
    assert (study.model.hidden, study.architectures[1].model.hidden) == (64, 16)


def test_seeds_may_be_any_number_of_63_bits(tmp_path):
    seeds = [0, 2**63 - 1]
    assert load_study(write(tmp_path, changed("seeds", seeds))).seeds == tuple(seeds)


def test_the_reference_can_have_seeds_of_its_own(tmp_path):
    study = load_study(write(tmp_path, changed("reference_seeds", [1, 2, 0])))
    assert (study.seeds_of("transformer++"), study.seeds_of("hybrid")) == ((1, 2, 0), (0, 1))
    runs = [(run.name, run.seed) for run in plan_runs(study, 64)]
    assert runs[-1] == ("transformer++", 2) and len(runs) == len(set(runs)) == 2 * 3 + 1
    assert [seed for name, seed in runs if name == "transformer++"] == [0, 1, 2]
    zoo = load_study("limited-zoo")
    assert len(plan_runs(zoo, zoo.data.vocab)) == 13 * 3 + 8


def test_files_of_another_kind_are_said_to_be_what_they_are(tmp_path, monkeypatch):
    (tmp_path / "study.txt").write_text("name: x")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"study\.txt is not called \.yaml"):
        load_study(str(tmp_path / "study.txt"))
    with pytest.raises(ConfigError, match=r"folder\.yaml is a directory; give the YAML file of a study\.$"):
        load_study(str(tmp_path / "folder.yaml"))
    (tmp_path / "folder.yaml" / "study.yaml").write_text("name: x")
    with pytest.raises(ConfigError, match=r"write (.*)/study\.yaml --out \1 for its study\.$"):
        load_study(str(tmp_path / "folder.yaml"))

    def forbidden(path: Path, most: int) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("basecap.system.files.read_file", forbidden)
    with pytest.raises(BasecapError, match=r"study\.yaml cannot be read .Permission denied"):
        load_study(write(tmp_path))


@pytest.mark.parametrize("name", [name for name in library() if "data" in read_study(name)])
def test_studies_of_installed_text_keep_half_of_the_code_on_any_machine(name: str):
    data = load_study(name).data
    longest = (data.max_test_tokens or math.inf) / MIN_DOCUMENTS * 1.5  # bytes per token of code, or more
    assert data.source != "installed" or longest > (SHORTEST + LONGEST["python"]) / 2


def test_unknown_study_and_setting(tmp_path):
    for name in ("quikstart", "QUICKSTART"):
        with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
            load_study(name)
    with pytest.raises(ConfigError, match=r"did you mean 'bc-figure-3a'\?"):
        load_study("bc-figure3a")
    with pytest.raises(ConfigError, match=r"study 'figure-3a': did you mean 'bc-figure-3a'\?$"):
        load_study("figure-3a")
    with pytest.raises(ConfigError, match=r"did you mean 'bc-table-3' or 'lp-table-3'\?"):
        load_study("table-3")
    for name in ("bc-figure-2", "figure-2", "bc-figure-2z"):
        with pytest.raises(ConfigError, match="did you mean 'bc-figure-2a' or 'bc-figure-2b' or 'bc-figure-2c'"):
            load_study(name)
    for name in ("bc-figure-5", "bc-figure-17", "limited-11m"):  # none of another number
        with pytest.raises(ConfigError, match=f"unknown study '{name}': see `basecap list studies`"):
            load_study(name)
    with pytest.raises(ConfigError, match="does not exist"):
        load_study(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"a\.b=value"):
        load_study(write(tmp_path), ["train.lr"])
    with pytest.raises(ConfigError, match="not a section; `basecap list settings` shows the keys"):
        load_study(write(tmp_path), ["name.x=1"])
    with pytest.raises(ConfigError, match="'architectures' is a list, which is set as a whole"):
        load_study(write(tmp_path), ["architectures.0.use=gpt"])
    with pytest.raises(ConfigError, match=r"'train\.\.lr=1' is not of the form"):
        load_study(write(tmp_path), ["train..lr=1"])


@pytest.mark.parametrize("text", ["@mine", "it's: a: b", "["])
def test_a_value_that_is_no_yaml_is_suggested_as_text(tmp_path, text):
    with pytest.raises(ConfigError, match="the value is not valid YAML") as refused:
        load_study(write(tmp_path), [f"summary={text}"])
    suggested = str(refused.value).removesuffix(".").rpartition("as text it is written --set ")[2]
    assert load_study(write(tmp_path), shlex.split(suggested)).summary == text
