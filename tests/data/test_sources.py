"""Sources: what they read, and one sentence for what they cannot."""

import ast
import gzip
import shutil
import sys
from pathlib import Path

import pytest
import zstandard

from basecap.data import DataConfig
from basecap.data.sources import SOURCES, Document, _reference, installed, split_of
from basecap.data.sources._lines import ENDINGS, SUFFIXES, read_records
from basecap.errors import BasecapError, ConfigError
from tests.data.conftest import slimpajama_records, words, write_lines


def documents(**options) -> list[Document]:
    """Return everything the source of these options yields."""
    config = DataConfig(**options)
    source = SOURCES.get(config.source)(config)
    return [document for part in source.parts() for document in source.read(part)]


def refused(**options) -> str:
    """Return the sentence with which the options are refused."""
    with pytest.raises(BasecapError) as caught:
        documents(**options)
    sentence = str(caught.value)
    assert sentence.endswith((".", "?", "'")) or "known:" in sentence
    return sentence


def test_slimpajama_is_read(slimpajama):
    found = documents(source="slimpajama", path=str(slimpajama), train=["c4"])
    assert len(found) == 3 * (4 * 20 + 2 * 8)
    assert Document("arxiv", "test", words("arxiv", 1100)) in found
    assert {(document.domain, document.split) for document in found} == {
        (domain, split) for domain in ("commoncrawl", "c4", "arxiv") for split in ("train", "validation", "test")
    }


def test_automathtext_stands_beside_slimpajama(slimpajama, tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / split).symlink_to(slimpajama / split)
    options = {"source": "slimpajama", "path": str(tmp_path), "train": ["c4"], "ood": ["automathtext"]}
    assert f"automathtext has no file that ends in {ENDINGS}; put AutoMathText there" in refused(**options)
    write_lines(tmp_path / "automathtext" / "data" / "web" / "1.jsonl", [{"text": f"proof {n}"} for n in range(20)])
    found = [document for document in documents(**options) if document.domain == "automathtext"]
    assert len(found) == 20 and {document.split for document in found} == {"validation", "test"}
    assert len(documents(**{**options, "ood": []})) == len(documents(**options)) - 20


def test_names_and_hashes_do_not_depend_on_the_place(slimpajama, tmp_path):
    (tmp_path / "link").symlink_to(slimpajama)
    found = []
    for path in (slimpajama, tmp_path / "link"):
        source = SOURCES.get("slimpajama")(DataConfig(source="slimpajama", path=str(path), train=["c4"]))
        found.append([source.fingerprints(part) for part in source.parts()])
    assert found[0] == found[1] and "train/chunk0/example_train_0.jsonl.zst" in found[0][0]


def test_jsonl_takes_files_and_folders_in_every_form(tmp_path):
    records = [{"text": words("c4", number), "meta": {"site": f"{number % 3}"}, "l": [1]} for number in range(40)]
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "._2.jsonl").write_bytes(b"\0\5\26\7")  # as macOS writes them
    for number, ending in enumerate(SUFFIXES):
        write_lines(tmp_path / f"notes{number}{ending}", records)
        write_lines(tmp_path / "web" / "a" / f"{number}{ending}", records[number : number + 1])
    for number in range(len(SUFFIXES)):
        options = {"source": "jsonl", "path": str(tmp_path), "train": [f"notes{number}"], "ood": ["web"]}
        found = documents(cluster="meta.site", **options)
        written = [(record["text"], record["meta"]["site"]) for record in records]
        assert [(document.text, document.cluster) for document in found[:40]] == written
        assert sorted(found[40:], key=lambda document: document.text) == sorted(
            (Document("web", split_of(text, False), text, site) for text, site in written[: len(SUFFIXES)]),
            key=lambda document: document.text,
        )
        assert all(document.split == split_of(document.text) for document in found[:40])
        source = SOURCES.get("jsonl")(DataConfig(**options))
        assert source.keys(source.parts()[0]) == ("meta.site",)


def test_a_file_beside_another_form_of_it_is_refused(tmp_path):
    records = [{"text": words("c4", number)} for number in range(4)]
    for domain, one, two in (("a", ".json.gz", ".jsonl"), ("b", ".jsonl", ".jsonl.zst"), ("c", ".jsonl", ".parquet")):
        for name in (domain, f"in-{domain}/part"):
            write_lines(tmp_path / f"{name}{one}", records)
            write_lines(tmp_path / f"{name}{two}", records)
            sentence = refused(source="jsonl", path=str(tmp_path), train=[name.partition("/")[0]])
            sentence_part = (
                f"{name}{one} is beside {Path(name).name}{two}, so its records would be read twice; remove one"
            )
            assert sentence_part in sentence


def test_text_takes_folders(tmp_path, monkeypatch):
    for name in ("one.txt.gz", "deep/er/two.md", "deep/three.txt.zst", ".hidden", ".git/HEAD"):
        path = tmp_path / "notes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
        path.write_bytes(compress(f"über {name}".encode("utf-8-sig")))
    found = documents(source="text", path=str(tmp_path), train=["notes"])
    texts = ["über deep/er/two.md", "über deep/three.txt.zst", "über one.txt.gz"]
    assert sorted(document.text for document in found) == texts
    wanted = {None: [None] * 3, "path": [None, "deep", "deep"], "path/2": [None, "deep", "deep/er"]}
    for cluster, labels in wanted.items():
        found = documents(source="text", path=str(tmp_path), train=["notes"], cluster=cluster)
        assert sorted([document.cluster for document in found], key=str) == sorted(labels, key=str)
    (tmp_path / "notes" / "one.txt").write_text("twice")
    sentence = refused(source="text", path=str(tmp_path), train=["notes"])
    assert "one.txt is beside one.txt.gz, so its records would be read twice" in sentence
    (tmp_path / "notes" / "one.txt").unlink()
    monkeypatch.setattr("basecap.data.sources.text.LONGEST", 8)
    (tmp_path / "notes" / "deep" / "er" / "two.md").unlink()
    assert "three.txt.zst has more than 0 MiB; split" in refused(source="text", path=str(tmp_path), train=["notes"])


def test_text_groups_small_files(tmp_path, monkeypatch):
    monkeypatch.setattr("basecap.data.sources.text.PART_BYTES", 25)
    for number in range(6):
        path = tmp_path / "notes" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{number}" * 10)
    parts = SOURCES.get("text")(DataConfig(source="text", path=str(tmp_path), train=["notes"])).parts()
    assert [len(part.paths) for part in parts] == [2, 2, 2]


FILLER = "\n".join(f"value_{number} = {number}  # a number" for number in range(100))
DOCSTRING = "A sentence about what this is for. " * 40
INSTALLED = {
    "standard/pydoc_data/topics.py": f"topics = {{'assert': 'The statement.', 'break': {'x' * 3000!r}}}",
    "standard/email/mime.py": f'"""{DOCSTRING}"""\nimport os\n\ndef f():\n    """Short."""\n{FILLER}\n',
    "standard/copy.py": f'"""{DOCSTRING}"""\n{FILLER}\n',
    "standard/test/no.py": f'"""In a test. {DOCSTRING}"""\n{FILLER}\n',
    "standard/tkinter/no.py": f'"""Not everywhere. {DOCSTRING}"""\n{FILLER}\n',
    "standard/broken.py": f'"""Broken. {DOCSTRING}"""\n{FILLER}\nif:\n',
    "torch/__config__.py": f'"""Of a build. {DOCSTRING}"""\n{FILLER}\n',
    "torch/include/c10/util/one.h": f"/* one */\n{FILLER}",
    "torch/include/c10/util/two.h": f"// @generated by a program\n{FILLER}",
    "torch/include/oneapi/three.h": f"/* not everywhere */\n{FILLER}",
    "torch/tiny.py": '"""Too short."""',
}


@pytest.fixture
def installation(tmp_path, monkeypatch) -> Path:
    """Make a small installation and its reference manifest, and return where it lies."""
    for name, content in INSTALLED.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(installed, "roots", lambda: {name: tmp_path / name for name in ("torch", "standard")})
    monkeypatch.setattr(installed, "REFERENCE", tmp_path / "installed.txt")
    _reference.write(_reference.choose(_reference.CHARACTERS), tmp_path / "installed.txt")
    installed.reference.cache_clear()
    yield tmp_path
    installed.reference.cache_clear()


def read_installation(**options) -> dict[str, list[Document]]:
    """Return what the source reads, by domain."""
    config = DataConfig(source="installed", train=["prose"], ood=["python", "c"], **options)
    source = SOURCES.get("installed")(config)
    return {part.name: list(source.read(part)) for part in source.parts()}


def test_installed_prose_is_docstrings_and_topics(installation):
    found = read_installation(cluster="path")["prose"]
    assert sorted(document.text[:14] for document in found) == ["A sentence abo", "The statement.", "x" * 14]
    clusters = {document.text[:1]: document.cluster for document in found}
    assert clusters == {"A": None, "T": "pydoc_data", "x": "pydoc_data"}


def test_docstrings_stand_in_the_order_of_the_syntax_tree():
    for name in ("contextlib", "statistics", "typing"):  # functions below if, try, with and other functions
        content = installed.text_of(installed.path_of(f"standard/{name}.py"))
        nodes = [node for node in ast.walk(ast.parse(content)) if isinstance(node, installed.DEFINITIONS)]
        found = [text for node in nodes if (text := ast.get_docstring(node)) and len(text) >= 100]
        assert len(found) > 10 and installed.docstrings(content) == list(dict.fromkeys(found))


def test_installed_python_has_no_docstrings(installation):
    found = read_installation(cluster="path")["python"]
    texts = [document.text for document in found]
    assert len(texts) == 2 and all("A sentence" not in text and "Short." not in text for text in texts)
    assert all("value_99 = 99  # a number" in text for text in texts)
    assert any(text.startswith("import os\n\ndef f():\n") for text in texts)
    assert {document.cluster for document in found} == {"email", None}


def test_docstrings_after_a_form_feed_are_removed(installation):
    (installation / "standard/copy.py").write_text('import os\n\x0c\ndef f():\n    """About."""\n    return 1\n')
    assert "import os\n\x0c\ndef f():\n    return 1\n" in [found.text for found in read_installation()["python"]]


def test_installed_headers_were_written_by_people(installation):
    (document,) = read_installation(cluster="path/3")["c"]
    assert (document.text[:9], document.cluster, document.split in ("test", "validation")) == (
        "/* one */",
        "torch/c10/util",
        True,
    )


def test_installed_text_that_differs_is_read_and_said(installation, monkeypatch):
    source = SOURCES.get("installed")(DataConfig(source="installed", train=["prose"], ood=["python", "c"]))
    assert source.remark() is None
    (installation / "standard/copy.py").write_bytes(INSTALLED["standard/copy.py"].replace("\n", "\r\n").encode())
    assert source.remark() is None
    (installation / "standard/copy.py").write_text(f'"""Else. {DOCSTRING}"""\n{FILLER}\n')
    (installation / "standard/email/mime.py").unlink()
    assert source.remark() == (
        "the text differs from the reference manifest: 2 of 5 files are missing or changed; compare only runs on this "
        "text, or install these packages again, then prepare the text again"
    )
    monkeypatch.setattr("platform.python_version", lambda: "3.12.1")
    monkeypatch.setattr(installed, "version", lambda package: "0.9+cpu")
    python, packages = " or create an environment with Python 3.", " (this is 3.12.1) and run pip install mpmath=="
    assert python in source.remark() and packages in source.remark()
    assert any(document.text.startswith("Else.") for part in source.parts()[:1] for document in source.read(part))


def test_this_installation_holds_every_domain():
    source = SOURCES.get("installed")(DataConfig(source="installed", train=["prose"], ood=["python", "c"]))
    assert installed.TOPICS in installed.reference()["prose"] and len(installed.reference()["c"]) > 200
    first = {part.name: next(source.read(part)) for part in source.parts()}
    assert set(first) == {"prose", "python", "c"} and all(document.text for document in first.values())
    assert source.parts() == source.parts()


def test_unknown_names_are_refused(slimpajama, tmp_path):
    (tmp_path / "notes").mkdir()
    assert "did you mean 'slimpajama'" in refused(source="slimpyjama", train=["c4"])
    assert "did you mean 'github'" in refused(source="slimpajama", train=["githb"])
    assert "did you mean 'notes'" in refused(source="text", path=str(tmp_path), train=["note"])
    write_lines(tmp_path / "notes" / "1.jsonl", [{"text": "a"}])
    assert "did you mean 'notes'" in refused(source="jsonl", path=str(tmp_path), train=["note"])
    assert "source 'installed' does not use data.path; remove it" in refused(
        source="installed", path="a", train=["prose"]
    )
    assert "source 'text' does not use data.hub; remove it" in refused(source="text", hub="a", train=["notes"])
    assert "named twice" in refused(source="slimpajama", train=["c4"], ood=["c4"])
    assert "'c5' is not in data.train: choose from c4" in refused(
        source="slimpajama", train=["c4"], weights={"c5": 1.0}
    )
    assert "set data.cluster to path, or to path/N" in refused(source="installed", train=["prose"], cluster="meta.repo")
    assert "for every domain" in refused(source="slimpajama", train=["c4", "book"], weights={"c4": 1.0})


def test_directories_that_hold_nothing_are_refused(tmp_path):
    (tmp_path / "notes").mkdir()
    assert "--set data.path=DIR" in refused(source="slimpajama", train=["c4"])
    assert "is not a directory" in refused(source="text", path=str(tmp_path / "no"), train=["c4"])
    assert f"train has no file that ends in {ENDINGS}" in refused(source="slimpajama", path=str(tmp_path), train=["c4"])
    assert "domain 'notes' is empty" in refused(source="text", path=str(tmp_path), train=["notes"])
    words = f"has no domain 'notes' (notes with the ending {ENDINGS}, or such files below notes/): there are none."
    assert words in refused(source="jsonl", path=str(tmp_path), train=["notes"])
    write_lines(tmp_path / "c4.parquet" / "part-0.jsonl", [{"text": "a"}])
    assert "choose from c4.parquet." in refused(source="jsonl", path=str(tmp_path), train=["c4"])
    assert len(documents(source="jsonl", path=str(tmp_path), train=["c4.parquet"])) == 1
    words = "has no domain 'web' (a folder web/ of text files): choose from c4.parquet, notes."
    assert words in refused(source="text", path=str(tmp_path), train=["web"])


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_links_behind_which_text_would_be_left_out_are_refused(tmp_path, source: str):
    write_lines(tmp_path / "elsewhere" / "1.jsonl", [{"text": "a"}])
    folder = tmp_path / "data" / "notes"
    write_lines(folder / "2.jsonl", [{"text": "b"}])
    (folder / "3.jsonl").symlink_to(tmp_path / "elsewhere" / "1.jsonl")  # as a hub's cache has them
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    options = {"source": source, "path": str(tmp_path / "data"), "train": ["notes", "linked"]}
    assert len(documents(**options)) == 3
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    assert "more is a link to a folder; replace it by files" in refused(**options)
    (folder / "more").unlink()
    (folder / "more").symlink_to(tmp_path / "gone")
    assert "more is a link without a target; replace it by files" in refused(**options)
    (folder / "more").unlink()
    (folder / "more").symlink_to("/dev/zero")
    assert "more is no regular file; replace it by files" in refused(**options)


def test_domains_are_names(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert "'a/b' is not the name of a file or folder" in refused(source="text", path=str(tmp_path), train=["a/b"])
    assert "'..' is not the name of a file or folder" in refused(source="text", path=str(tmp_path), train=[".."])
    assert "'' is not the name of a file or folder" in refused(source="text", path=str(tmp_path), train=[""])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "is not JSON"),
        ('{"text": "é"}'.encode("latin-1"), "is not text in UTF-8 "),
        (b"[" * 100_000, "is not JSON"),
        (b'["text"]', "has no text"),
        (b'{"txt": "a"}', "has no text"),
        (b'{"text": 3}', "has no text"),
        (b'{"text": null}', "has no text"),
    ],
)
@pytest.mark.parametrize("compress", [False, True])
def test_bad_records_are_named_by_line(tmp_path, line: bytes, reason: str, compress: bool):
    content = b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n'
    path = tmp_path / ("c4.jsonl.zst" if compress else "c4.jsonl")
    path.write_bytes(zstandard.compress(content) if compress else content)
    sentence = refused(source="jsonl", path=str(tmp_path), train=["c4"])
    assert f"{path}:3 {reason}" in sentence


def test_parquet_that_holds_no_text_is_refused(tmp_path, monkeypatch):
    path, options = tmp_path / "c4.parquet", {"source": "jsonl", "path": str(tmp_path), "train": ["c4"]}
    write_lines(path, [{"texts": "a", "id": 1}])
    assert "c4.parquet has no column \"text\"; rename the column that holds the text: did you mean 'texts'?" in refused(
        **options
    )
    write_lines(path, [{"text": 1}])
    assert "c4.parquet holds values of type int64; it should hold strings" in refused(**options)
    write_lines(path, [{"text": "a"}, {"text": None}])
    assert "c4.parquet:2 has no text; every row must have a string" in refused(**options)
    write_lines(path, [{"text": words("c4", number)} for number in range(50)])
    content = path.read_bytes()
    for damaged in (content[:40], content[:-1], content[:4] + bytes(300) + content[304:], b"text"):
        path.write_bytes(damaged)
        assert "c4.parquet is damaged, or no Parquet file (" in refused(**options)
    write_lines(path, [{"text": "a" * 5000}] * 5000)  # the file holds it once
    for name in ("EXPANDED", "EXPANSION"):
        monkeypatch.setattr(f"basecap.system.foreign.{name}", 1 << 8)
    assert "c4.parquet expands more than 256 times, as no text does" in refused(**options)
    monkeypatch.setattr("basecap.data.sources._lines.LONGEST", 1 << 8)
    assert "c4.parquet:1 has more than 0 MiB; split" in refused(**options)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs the pyarrow library; install basecap[parquet]" in refused(**options)


@pytest.mark.parametrize("meta", [{}, {"meta": None}, {"meta": {"redpajama_set_name": "RedPajamaC5"}}])
def test_records_without_a_set_are_named_by_line(slimpajama, tmp_path, meta: dict):
    for split in ("train", "validation", "test"):
        write_lines(tmp_path / split / "1.jsonl.zst", [*slimpajama_records(0, 1), {"text": "a", **meta}])
    sentence = refused(source="slimpajama", path=str(tmp_path), train=["c4"])
    assert "1.jsonl.zst:4: meta.redpajama_set_name" in sentence and "RedPajamaC4" in sentence


@pytest.mark.parametrize("ending", ["jsonl.zst", "json.gz"])
def test_a_file_that_is_truncated_damaged_or_not_compressed_is_refused(tmp_path, ending: str):
    options = {"source": "jsonl", "path": str(tmp_path), "train": ["c4"]}
    path = write_lines(tmp_path / f"c4.{ending}", [{"text": words("c4", number)} for number in range(50)])
    content = path.read_bytes()
    for keep in (3, 12, 40, -1):
        path.write_bytes(content[:keep])
        assert "is incomplete; download the file again" in refused(**options)
    path.write_bytes(b'{"text": "plain"}\n')
    assert "is not compressed with " in refused(**options)
    path.write_bytes(content[:40] + bytes(20) + content[60:])
    assert "is damaged (" in refused(**options)


def test_frames_may_follow_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("basecap.system.foreign.CHUNK", 7)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"text": "a"}\n{"te') + zstandard.compress(b'xt": "b"}'))
    assert [(place, record["text"]) for place, record in read_records(path)] == [(f"{path}:1", "a"), (f"{path}:2", "b")]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_blank_lines_are_counted_and_left_out(tmp_path, monkeypatch, size: int):
    monkeypatch.setattr("basecap.system.foreign.CHUNK", size)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n \n{"text": "a"}\n' + b" \n" * 20 + b'\n\t{"text": "b"} \n\n{"text": "c"}')
    assert [(place, record["text"]) for place, record in read_records(path)] == [
        (f"{path}:3", "a"),
        (f"{path}:25", "b"),
        (f"{path}:27", "c"),
    ]


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("basecap.data.sources._lines.LONGEST", 1 << 20)
    (tmp_path / "c4.jsonl").write_bytes(b'{"text": "a"}\n' + b'{"text": "' + b"a" * (3 << 20))
    assert "c4.jsonl:2 has more than 1 MiB; split the document or remove it" in refused(
        source="jsonl", path=str(tmp_path), train=["c4"]
    )


@pytest.mark.parametrize(
    ("record", "cluster"),
    [
        ({"meta": {"site": {"id": 3}}}, "3"),
        ({"meta.site.id": "a"}, "a"),
        ({"meta": {"site.id": "b"}}, "b"),
        ({"meta.site": {"id": "c"}}, "c"),
        ({"meta": {}, "meta.site": {"id": "d"}}, "d"),
        ({"meta": {"site": {"id": float("nan")}}}, None),
        ({"meta": {"site": {"id": None}}}, None),
        ({"meta": {"site": {"id": ["e"]}}}, None),
        ({"meta": {"site": 3}}, None),
    ],
)
def test_dots_of_a_cluster_key_separate_levels_or_are_part_of_a_key(tmp_path, record: dict, cluster: str | None):
    write_lines(tmp_path / "notes.jsonl", [{"text": "a", **record}])
    (found,) = documents(source="jsonl", path=str(tmp_path), train=["notes"], cluster="meta.site.id")
    assert found.cluster == cluster


def test_text_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.txt").write_bytes("über".encode("latin-1"))
    assert "one.txt is not text in UTF-8" in refused(source="text", path=str(tmp_path), train=["notes"])


class Unreachable(Exception):
    """What a library for HTTP raises: not an OSError."""


def sorted_texts(found: list[Document]) -> list[Document]:
    """Return documents in an order of their own."""
    return sorted(found, key=repr)


def test_a_hub_dataset_is_read_file_by_file(slimpajama, tmp_path):
    pytest.importorskip("datasets")
    options = {"source": "slimpajama", "train": ["c4"]}
    local = documents(path=str(slimpajama), **options)
    assert sorted_texts(documents(hub=str(slimpajama), **options)) == sorted_texts(local)
    source = SOURCES.get("slimpajama")(DataConfig(hub=str(slimpajama), max_files=3, **options))
    assert [part.split for part in source.parts()] == ["train"] * 3 + ["validation", "test"]
    assert "check " in refused(hub=str(tmp_path), **options)


def test_automathtext_stands_beside_a_hub_dataset(slimpajama, tmp_path):
    pytest.importorskip("datasets")
    shutil.copytree(slimpajama, tmp_path, dirs_exist_ok=True)
    for kind, other in (("web", {"url": "a"}), ("arxiv", {"id": 3})):  # their records have different keys
        records = [{"text": f"{kind} {n}", "meta": {"score": 0.5}, **other} for n in range(9)]
        write_lines(tmp_path / "automathtext" / "data" / kind / "1.jsonl", records)
    options = {"source": "slimpajama", "train": ["c4"], "ood": ["automathtext"]}
    for keys in (options, {**options, "cluster": "url"}):
        streamed, read = documents(hub=str(tmp_path), **keys), documents(path=str(tmp_path), **keys)
        assert sorted_texts(streamed) == sorted_texts(read)


@pytest.mark.parametrize(
    ("error", "reason"), [(Unreachable("no route\nmore"), "no route"), (Unreachable(), "Unreachable")]
)
def test_a_hub_out_of_reach_is_one_sentence(monkeypatch, error: Exception, reason: str):
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("basecap.system.hub.unreachable", lambda: None)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    sentence = refused(source="slimpajama", train=["c4"], hub="nobody/nothing")
    assert f"dataset 'nobody/nothing' cannot be read ({reason}); check its name and the network" in sentence


def test_a_hub_dataset_needs_its_library(monkeypatch, slimpajama):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"install basecap\[hub\]"):
        documents(source="slimpajama", train=["c4"], hub=str(slimpajama))
