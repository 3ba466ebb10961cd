"""Losses of documents: one file for all points, nothing lost by a kill, every damage named."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from basecap.errors import DataError
from basecap.records import documents
from basecap.records.documents import DocumentLosses, append_losses, forget_losses, read_losses


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where the losses of an evaluation of a run are."""
    (tmp_path / "run" / "documents").mkdir(parents=True)
    return tmp_path / "run" / "documents" / "domain-loss.losses"


def made_up(counts: dict[str, int], rng: np.random.Generator) -> dict[str, DocumentLosses]:
    return {
        name: DocumentLosses(rng.random(count), rng.integers(1, 9, count), rng.integers(1, 99, count))
        for name, count in counts.items()
    }


def test_documents_are_read_back_per_subset(path):
    written = made_up({"code": 3, "<b>": 0, "prose": 2}, np.random.default_rng(0))
    append_losses(path, 7, written)
    (found,) = read_losses(path, [7])
    assert list(found.documents.subsets) == list(written)
    for name, losses in written.items():
        place = found.documents.subsets[name]
        np.testing.assert_array_equal(found.nats[0, place], losses.nats)
        for column in ("tokens", "bytes", "clusters"):
            np.testing.assert_array_equal(getattr(found.documents, column)[place], getattr(losses, column))


def test_documents_of_all_steps_are_one_file_that_says_once_what_they_are(path):
    rng = np.random.default_rng(0)
    first = made_up({"code": 50, "prose": 50}, rng)
    later = {name: replace(losses, nats=rng.random(50)) for name, losses in first.items()}
    append_losses(path, 1, first)
    alone = path.stat().st_size
    for step in (3, 2, 1):  # the last losses of a step count
        append_losses(path, step, later)
    assert path.stat().st_size < alone + 3 * 900
    (found,) = read_losses(path, [1, 2, 3])
    assert sorted(found.steps) == [1, 2, 3]
    np.testing.assert_array_equal(found.nats, np.tile(np.concatenate([part.nats for part in later.values()]), (3, 1)))
    append_losses(path, 4, made_up({"code": 2}, rng))  # other documents
    assert [history.nats.shape for history in read_losses(path, [2, 4])] == [(1, 100), (1, 2)]


def test_a_point_costs_the_same_however_many_there_are(path, monkeypatch):
    losses = made_up({"code": 500}, np.random.default_rng(0))
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, place: (read.append(count), pread(file, count, place))[1])
    for step in range(10):
        append_losses(path, step, losses)
    assert read == []
    sizes = []
    for step in range(10, 20):
        documents._APPENDED.clear()  # as in a new process
        append_losses(path, step, losses)
        sizes.append(sum(count for count in read if count > documents.HEAD.size))
        read.clear()
    assert sizes == 10 * sizes[:1] and sizes[0] < path.stat().st_size / 4
    assert read_losses(path, range(20))[0].steps == [*range(20)]


def test_every_kill_while_documents_are_appended_leaves_all_before(path):
    rng = np.random.default_rng(0)
    losses = made_up({"code": 2}, rng)
    append_losses(path, 1, losses)
    before = path.read_bytes()
    append_losses(path, 2, made_up({"code": 3}, rng))
    after = path.read_bytes()
    for end in range(len(before), len(after)):
        path.write_bytes(after[:end])
        (found,) = read_losses(path, [1])
        np.testing.assert_array_equal(found.nats[0], losses["code"].nats)
        append_losses(path, 2, losses)
        (found,) = read_losses(path, [2])
        np.testing.assert_array_equal(found.nats[0], losses["code"].nats)


def test_losses_of_archived_records_are_read_from_a_file_per_step(path):
    arrays = {name: np.ones(3, int) for name in ("tokens", "bytes")}
    arrays |= {"subsets": np.array(["code"]), "counts": np.array([3]), "clusters": np.array([4, 0, 4])}
    for step in (1, 2):
        np.savez_compressed(path.with_name(f"domain-loss-{step}.npz"), **arrays, nats=np.full(3, float(step)))
    append_losses(path, 3, {"code": DocumentLosses(np.full(3, 3.0), np.ones(3, int), np.ones(3, int))})
    found = read_losses(path, [1, 2, 3])
    assert [history.steps for history in found] == [[1], [2], [3]]
    assert [history.nats.tolist() for history in found] == [[[float(step)] * 3] for step in (1, 2, 3)]
    assert [history.documents.clusters.tolist() for history in found] == [[4, 0, 4], [4, 0, 4], [0, 1, 2]]
    second = path.with_name("domain-loss-2.npz")
    second.write_bytes(second.read_bytes()[:60])
    with pytest.raises(DataError, match=r"loss-2\.npz is damaged"):
        read_losses(path, [1, 2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda b: b[:60], "lacks the losses at step 1"),
        (lambda b: b"", "lacks the losses at step 1"),
        (lambda b: b[:200] + bytes(40) + b[240:], "is damaged"),
        (lambda b: b[:-1] + bytes(1), "is damaged"),
        (lambda b: b[-500:], "is damaged"),
    ],
)
def test_damaged_documents_are_named(path, damage, words):
    losses = DocumentLosses(np.arange(100.0), np.arange(100), np.arange(100))
    append_losses(path, 1, {"code": losses})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{words}.*; remove .*run to train it again"):
        read_losses(path, [1])


@pytest.mark.parametrize(
    ("counts", "nats", "words"),
    [
        ("[4]", 3, "its counts are not those of its documents"),
        ("[-1, 4]", 3, "its counts are not those of its documents"),
        ("[1180591620717411303424]", 3, "too large"),
        ("[" * 100_000, 3, "maximum recursion"),
        ("[3]", 2, "it has losses of 2 documents, and describes 3"),
        ("[3]", 4, "it has losses of 4 documents, and describes 3"),
    ],
)
def test_what_has_right_checksums_and_cannot_be_is_named(path, counts: str, nats: int, words: str):
    head = f'{{"schema": 1, "subsets": ["code"], "counts": {counts}}}\n'.encode()
    described = documents._block(documents.DOCUMENTS, 0, head + bytes(3 * 3 * 8))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(described + documents._block(documents.NATS, 1, bytes(nats * 8)))
    with pytest.raises(DataError, match=f"is damaged .*{words}.*; remove"):
        read_losses(path, [1])


def test_later_steps_are_forgotten_and_a_file_without_steps_is_removed(path):
    rng = np.random.default_rng(0)
    first, other = made_up({"code": 3}, rng), made_up({"code": 2}, rng)
    for step, losses in ((1, first), (2, other), (3, first)):
        append_losses(path, step, losses)
    before = path.read_bytes()
    forget_losses(path, 4)
    assert path.read_bytes() == before
    forget_losses(path, 2)
    (found,) = read_losses(path, [1])
    np.testing.assert_array_equal(found.nats[0], first["code"].nats)
    with pytest.raises(DataError, match="lacks the losses at step 2; remove"):
        read_losses(path, [1, 2])
    append_losses(path, 2, first)
    assert [history.steps for history in read_losses(path, [1, 2])] == [[1], [2]]  # described twice, read as written
    forget_losses(path, 1)
    assert not path.exists()
    forget_losses(path, 1)
    assert not path.exists()


def test_a_file_of_another_program_is_left_alone(path):
    path.write_text("mine")
    forget_losses(path, 0)
    assert path.read_text() == "mine"


def test_without_clusters_each_document_is_its_own():
    alone = DocumentLosses(np.ones(3), np.ones(3, int), np.ones(3, int))
    assert alone.clusters.tolist() == [0, 1, 2]
    assert DocumentLosses(np.ones(2), np.ones(2, int), np.ones(2, int), np.array([7, 7])).clusters.tolist() == [7, 7]
