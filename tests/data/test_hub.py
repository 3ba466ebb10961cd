"""Sets of the Hugging Face hub: local copies of their layouts, and streaming without a network."""

from pathlib import Path

import pytest

from basecap.data import DataConfig, missing_inputs, prepare, remote_inputs
from basecap.data.sources import SOURCES, SPLITS, Document, _hub
from basecap.data.sources.presets import Preset
from basecap.errors import BasecapError, ConfigError, DataError
from tests.data.conftest import slimpajama_records, words, write_lines

SETS = [name for name, entry in SOURCES.items() if issubclass(entry, Preset)]

#: Files of the sets as on the hub, by the domain that they hold ("all": with labels).
LAYOUTS = {
    "slimpajama-6b": {
        "all": [
            "data/train-00000-of-00048-ab2b35705f029d94.parquet",
            "data/validation-00000-of-00001.parquet",
            "data/test-00000-of-00001-9f769cf7ce219017.parquet",
        ]
    },
    "slimpajama-dc": {
        domain: [f"{split}/RedPajama{name}/chunk_{number}.jsonl.zst" for split in SPLITS for number in (1, 17)]
        for domain, name in (("commoncrawl", "CommonCrawl"), ("c4", "C4"), ("arxiv", "ArXiv"))
    },
    "redpajama-sample": {
        "commoncrawl": ["cc_2019-30_sample.jsonl", "cc_2023-06_sample.jsonl"],
        "c4": ["c4_sample.jsonl"],
        "arxiv": ["arxiv_sample.jsonl"],
    },
    "common-pile": {
        "commoncrawl": ["cccc_filtered/cccc-0000.json.gz", "cccc_filtered/cccc-0001.json.gz"],
        "arxiv": ["arxiv_papers_filtered/arxiv-papers-0000.json.gz"],
    },
    "fineweb": {
        "commoncrawl": ["fineweb/sample/10BT/000_00000.parquet", "fineweb/sample/10BT/001_00000.parquet"],
        "arxiv": ["arxiv_papers_filtered/arxiv-papers-0000.json.gz"],
    },
    "fineweb-edu": {
        "commoncrawl": ["fineweb-edu/sample/10BT/000_00000.parquet"],
        "arxiv": ["arxiv_papers_filtered/arxiv-papers-0000.json.gz"],
    },
}


def copy_of(name: str, directory: Path) -> int:
    """Write made-up text in the layout of a set, and files that it does not read; return the documents of arXiv."""
    count, first = 0, 0
    for domain, files in LAYOUTS[name].items():
        for file in files:
            numbers = range(first, first + 20)
            if domain == "all":
                records = [{**record, "id": first} for record in slimpajama_records(first, 20)]
            else:
                records = [{"text": words(domain, number), "id": number} for number in numbers]
            write_lines(directory / file, records)
            count, first = count + 20 * (domain in ("arxiv", "all")), first + 100
    write_lines(directory / "fineweb" / "sample" / "100BT" / "000_00000.parquet", [{"text": "not read"}])
    (directory / "README.md").write_text("A card.")
    return count


def test_every_set_has_a_layout_here_and_says_what_it_is():
    assert sorted(LAYOUTS) == SETS
    for name in SETS:
        entry = SOURCES.get(name)
        for domain in entry.known_domains:
            about = entry.about(domain)
            assert about["hub"].count("/") == 1 and about["size"] and about["licence"]
            assert about["read"].startswith("https://huggingface.co/datasets/")


@pytest.mark.parametrize("name", SETS)
def test_a_local_copy_of_a_set_is_read(name: str, tmp_path):
    pytest.importorskip("pyarrow")
    held = copy_of(name, tmp_path)
    config = DataConfig(source=name, path=str(tmp_path), train=["commoncrawl"], ood=["arxiv"], cluster="id")
    source = SOURCES.get(name)(config)
    found = [document for part in source.parts() for document in source.read(part)]
    splits = {"train", "validation", "test"}
    assert {document.split for document in found if document.domain == "commoncrawl"} == splits
    own = SOURCES.get(name).content.get("splits")
    unseen = [document for document in found if document.domain == "arxiv"]
    expected = held * 2 // 3 if own and "key" not in SOURCES.get(name).content else held  # no training files are read
    assert len(unseen) == expected and (own or not any(document.split == "train" for document in unseen))
    assert all(len(set(source.fingerprints(part).values())) == 1 for part in source.parts())
    assert source.download() is None and remote_inputs(config, tmp_path / "cache") == []
    few = SOURCES.get(name)(config.model_copy(update={"max_files": 1}))
    assert len(few.parts()) <= len(source.parts()) and {*few.parts()} <= {*source.parts()}
    assert len({part.name.partition("/")[0] for part in few.parts()}) == (1 if "all" in LAYOUTS[name] else 2)


def test_a_set_is_prepared_from_a_copy(tmp_path):
    copy_of("common-pile", tmp_path / "pile")
    config = DataConfig(
        source="common-pile", path=str(tmp_path / "pile"), tokenizer="bytes", seq_len=16, train=["commoncrawl"],
        ood=["arxiv"], workers=1,
    )  # fmt: skip
    prepared = prepare(config, tmp_path / "cache")
    assert set(prepared.manifest["files"]) >= {"arxiv/arxiv-papers-0000.json.gz", "commoncrawl/cccc-0001.json.gz"}


def test_copies_that_lack_something_are_refused(tmp_path):
    def refused(name: str, **options: object) -> str:
        with pytest.raises(BasecapError) as caught:
            SOURCES.get(name)(DataConfig(source=name, train=["commoncrawl"], **options)).parts()
        return str(caught.value)

    sentence = refused("common-pile", path=str(tmp_path))
    assert sentence.endswith("cccc_filtered is not a directory; put a copy of common-pile/cccc_filtered there.")
    write_lines(tmp_path / "cccc_filtered" / "1.csv", [{"text": "a"}])
    assert "has no files *; check the copy of the dataset" in refused("common-pile", path=str(tmp_path))
    write_lines(tmp_path / "data" / "train-1.jsonl", [{"text": "a"}])
    assert "of the split validation and test" in refused("slimpajama-6b", path=str(tmp_path))
    assert "did you mean 'arxiv'" in refused("common-pile", ood=["arxif"])
    assert "does not use data.hub" in refused("common-pile", hub="a/b")
    assert "does not use data.max_files" in refused("text", path=str(tmp_path), max_files=2)
    assert "source 'hub' needs a dataset; give it with --set data.hub=OWNER/NAME" in refused("hub")
    for split in SPLITS[1:]:
        write_lines(tmp_path / "data" / f"{split}-1.jsonl", [{"text": "a", "meta": {"redpajama_set_name": "Else"}}])
    source = SOURCES.get("slimpajama-6b")(DataConfig(source="slimpajama-6b", path=str(tmp_path), train=["c4"]))
    with pytest.raises(DataError, match=r"validation-1\.jsonl:1: meta\.redpajama_set_name is 'Else'; it should be one"):
        [*source.read(source.parts()[1])]


def test_an_option_that_is_not_set_leaves_the_keys_of_earlier_caches():
    config = DataConfig(source="installed", train=["prose"])
    assert config.options_hash != config.model_copy(update={"max_files": 2}).options_hash
    assert config.options_hash == "86fbd8f269d348fd"


def test_plan_says_the_download(tmp_path):
    config = DataConfig(source="fineweb", train=["commoncrawl"], ood=["arxiv"], max_files=2, tokenizer="bytes")
    assert remote_inputs(config, tmp_path) == [
        "the text is streamed from the Hugging Face hub, 2 files of each domain and split: HuggingFaceFW/fineweb "
        "(27.6 GB), common-pile/arxiv_papers_filtered (19.5 GB of text)."
    ]
    config = DataConfig(source="hub", hub="some/{domain}-text", train=["a"], ood=["b"], tokenizer="bytes")
    assert remote_inputs(config, tmp_path) == [
        "the text is streamed from the Hugging Face hub, all files (data.max_files limits them) of each domain and "
        "split: some/a-text, some/b-text."
    ]
    (tmp_path / "a").mkdir()
    config = config.model_copy(update={"hub": str(tmp_path / "{domain}")})  # a copy: nothing is downloaded
    assert remote_inputs(config, tmp_path) == [] and len(missing_inputs(config, tmp_path)) == 1
    extra = DataConfig(source="slimpajama", hub=str(tmp_path / "none"), train=["arxiv"], ood=["automathtext"])
    assert [line for line in remote_inputs(extra, tmp_path) if str(tmp_path) in line] == []
    (sentence,) = missing_inputs(extra.model_copy(update={"ood": ()}), tmp_path)
    assert "there is no such directory" in sentence
    with pytest.raises(ConfigError, match=r"data.hub = 'a/\{domian\}': only \{domain\} may stand in braces"):
        DataConfig(source="hub", hub="a/{domian}", train=["a"])


@pytest.mark.parametrize("form", ["configurations", "datasets"])
def test_any_set_with_a_configuration_or_a_dataset_per_domain(tmp_path, form: str):
    pytest.importorskip("datasets")
    for domain in ("a", "b"):
        for number in range(3):
            records = [{"text": f"{domain} {number} {row}"} for row in range(9)]
            write_lines(tmp_path / domain / f"{number}.{'parquet' if domain == 'a' else 'json.gz'}", records)
    card = "---\nconfigs:\n- {config_name: a, data_files: a/*}\n- {config_name: b, data_files: b/*}\n---\n"
    hub = tmp_path if form == "configurations" else tmp_path / "{domain}"
    if form == "configurations":
        (tmp_path / "README.md").write_text(card)
    source = SOURCES.get("hub")(DataConfig(source="hub", hub=str(hub), train=["a"], ood=["b"]))
    found = [document for part in source.parts() for document in source.read(part)]
    assert len(found) == 54 and {document.split for document in found if document.domain == "b"} == {
        "validation",
        "test",
    }
    lacking = SOURCES.get("hub")(DataConfig(source="hub", hub=str(hub), train=["c"]))
    with pytest.raises(DataError, match=r"cannot be read \(.*\); check (the directory|its name)"):
        lacking.parts()
    if form == "configurations":
        (tmp_path / "README.md").write_text(card.replace("a/*}", "../*/a/*}"))
        with pytest.raises(DataError, match=r"which is not in it|cannot be read"):
            source.parts()


class Remote:
    """Stands for the hub: a directory per dataset."""

    root: Path

    def list_repo_files(self, name: str, repo_type: str, revision: str) -> list[str]:
        assert (repo_type, revision) == ("dataset", name.upper().replace("/", "-"))
        return [path.relative_to(self.root / name).as_posix() for path in (self.root / name).rglob("*.*")]

    def open(self, place: str, mode: str, block_size: int):
        kind, owner, name, file = place.split("/", 3)
        name, _, revision = name.partition("@")
        assert (kind, mode, revision) == ("datasets", "rb", f"{owner}-{name}".upper()) and block_size > 0
        return (self.root / owner / name / file).open("rb")


def test_files_of_the_hub_are_streamed(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    remote = Remote()
    remote.root = tmp_path
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: remote)
    monkeypatch.setattr("huggingface_hub.HfFileSystem", lambda: remote)
    monkeypatch.setattr(_hub, "_revision", lambda name: name.upper().replace("/", "-"))
    _hub._remote_files.cache_clear()
    for file in LAYOUTS["fineweb"]["commoncrawl"]:
        write_lines(tmp_path / "HuggingFaceFW" / file, [{"text": file}])
    write_lines(tmp_path / "common-pile/arxiv_papers_filtered/1.json.gz", [{"text": "proof"}, {"txt": "none"}])
    source = SOURCES.get("fineweb")(DataConfig(source="fineweb", train=["commoncrawl"], ood=["arxiv"]))
    parts = source.parts()
    assert [part.name for part in parts] == [
        "commoncrawl/sample/10BT/000_00000.parquet",
        "commoncrawl/sample/10BT/001_00000.parquet",
        "arxiv/1.json.gz",
    ]
    assert [document.text for document in source.read(parts[0])] == [LAYOUTS["fineweb"]["commoncrawl"][0]]
    assert source.fingerprints(parts[2]) == {parts[2].name: "COMMON-PILE-ARXIV_PAPERS_FILTERED"}
    reading = source.read(parts[2])
    assert next(reading) == Document("arxiv", source.split_of("arxiv", "proof"), "proof")
    with pytest.raises(DataError, match=r"common-pile/arxiv_papers_filtered/1\.json\.gz:2 has no text"):
        next(reading)
    (tmp_path / "common-pile/arxiv_papers_filtered/1.json.gz").unlink()
    with pytest.raises(DataError, match=r"dataset 'common-pile/arxiv_papers_filtered' cannot be read \(.*network\."):
        next(source.read(parts[2]))
    _hub._remote_files.cache_clear()


def test_a_set_needs_the_library_of_its_files(tmp_path, monkeypatch):
    copy_of("fineweb", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    source = SOURCES.get("fineweb")(DataConfig(source="fineweb", path=str(tmp_path), train=["commoncrawl"]))
    with pytest.raises(ConfigError, match=r"install basecap\[parquet\]"):
        next(source.read(source.parts()[0]))
