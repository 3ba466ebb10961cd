"""What sets the families and variants apart: where tokens stand, what the authors' code does, the published cells."""

import numpy as np
import pytest
from scipy.stats import chisquare

from basecap.tasks import NOTHING, TASKS, Instances, Role, asked, build_task
from basecap.tasks.knvm import MASK, SEPARATOR, SEPARATOR_KV

LEAST = 1e-4


def places(found: Instances, role: Role, row: int = 0) -> list[int]:
    """Return the positions of a role."""
    return np.nonzero(found.roles[row] == role)[0].tolist()


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("mqar", 26), ("mqar-last", 26), ("mqar-shuffle", 26), ("mqar-position-robustness", 18), ("mqar-k1v1", 18),
        ("mqar-k1v2", 18), ("mqar-k2v2", 18), ("mqar-k2v2-shuffle", 18), ("mqar-k4v8", 14), ("mqar-k4v8-shuffle", 14),
        ("mqar-k2v2-robustness", 11), ("zoology-mqar-zeros", 4), ("mad-in-context-recall", 7), ("mad-noisy-recall", 10),
    ],
)  # fmt: skip
def test_grids_have_the_published_number_of_cells(name, cells):
    grid = build_task(name).grid()
    assert len(grid) == len({tuple(cell.items()) for cell in grid}) == cells
    assert all(build_task(name).at(cell).cell == cell for cell in grid)


def test_n_gram_robustness_has_the_cells_of_the_code():
    cells = [(cell["length"], cell["pairs"]) for cell in build_task("mqar-k2v2-robustness").grid()]
    assert cells == [(64, 1), (64, 4), *((256, p) for p in (1, 4, 8, 16)), *((512, p) for p in (1, 4, 8, 16, 32))]


def test_pairs_stand_where_the_variant_says():
    options = {"length": 64, "pairs": 8}
    standard, last, shuffle = (
        build_task(name, options).instances(0, range(500)) for name in ("mqar", "mqar-last", "mqar-shuffle")
    )
    assert all(places(standard, Role.KEY, row) == list(range(0, 16, 2)) for row in range(500))
    assert all(places(last, Role.KEY, row) == list(range(16, 32, 2)) for row in range(500))
    keys = np.array([places(shuffle, Role.KEY, row) for row in range(500)])
    assert chisquare(np.bincount(keys.ravel() // 2, minlength=16)).pvalue > LEAST and (keys % 2 == 0).all()
    for found, context in ((standard, 16), (last, 32), (shuffle, 32)):
        rows, at = np.nonzero(found.roles == Role.QUERY)
        assert len(rows) == 4000 and at.min() == context and (at % 2 == 0).all()
        assert np.array_equal(found.targets[rows, at] != NOTHING, np.ones(4000))
        first = np.sort(found.pairs[rows, at].reshape(500, 8), axis=1)
        assert (first == np.arange(8)).all()


def test_query_gaps_follow_the_power_law():
    task = build_task("mqar", {"length": 66, "pairs": 1})
    _, at = np.nonzero(task.instances(0, range(20_000)).roles == Role.QUERY)
    law = np.arange(1, 33) ** -0.99
    assert chisquare(np.bincount((at - 2) // 2, minlength=32), law / law.sum() * 20_000).pvalue > LEAST
    even = build_task("mqar", {"length": 66, "pairs": 1, "power": 1.0})
    _, at = np.nonzero(even.instances(0, range(20_000)).roles == Role.QUERY)
    assert chisquare(np.bincount((at - 2) // 2, minlength=32)).pvalue > LEAST


def test_tokens_have_the_published_ranges():
    found = build_task("mqar", {"vocab": 60, "mode": "paper"}).instances(0, range(3000))
    for role, low, high in ((Role.KEY, 1, 30), (Role.VALUE, 30, 60), (Role.FILLER, 20, 80)):
        tokens = found.inputs[found.roles == role]
        assert tokens.min() == low and chisquare(np.bincount(tokens - low, minlength=high - low)).pvalue > LEAST
    found = build_task("mqar-k2v2", {"vocab": 60, "mode": "paper"}).instances(0, range(3000))
    for role, low, high in ((Role.KEY, 20, 50), (Role.VALUE, 50, 80), (Role.FILLER, 20, 80)):
        tokens = found.inputs[found.roles == role]
        assert tokens.min() == low and chisquare(np.bincount(tokens - low, minlength=high - low)).pvalue > LEAST


def test_the_authors_shuffle_repeats_keys():
    options = {"length": 512, "pairs": 128}
    shares = {}
    for mode in ("paper", "clean"):
        found = build_task("mqar-shuffle", {**options, "mode": mode}).instances(0, range(1000))
        keys = np.sort(found.inputs[found.roles == Role.KEY].reshape(1000, 128), axis=1)
        shares[mode] = (np.diff(keys, axis=1) == 0).any(axis=1).mean()
    assert shares["clean"] == 0 and shares["paper"] == pytest.approx(0.557, abs=0.06)


def test_the_authors_filler_may_be_a_key():
    options = {"vocab": 60, "pairs": 4}
    task = build_task("mqar-last", {**options, "mode": "paper"})
    found = task.instances(0, range(50))
    sets = [answer for row in range(50) for answer in task.solve(found.inputs[row], asked(found, row)).values()]
    assert max(map(len, sets)) > 1


def test_n_gram_pairs_stand_between_separators():
    task = build_task("mqar-k4v8", {"pairs": 2, "closing": True})
    found = task.instances(0, range(50))
    for row in range(50):
        inputs, targets = found.inputs[row].tolist(), found.targets[row].tolist()
        assert inputs[0] == inputs[14] == inputs[15] == SEPARATOR and inputs[5] == inputs[20] == SEPARATOR_KV
        for number in range(2):
            pair = np.nonzero(found.pairs[row] == number)[0]
            start = int(pair[pair >= 30][0])
            context = inputs[15 * number : 15 * number + 15]
            assert inputs[start : start + 15] == [*context[:6], *[MASK] * 8, SEPARATOR]
            assert targets[start + 5 : start + 14] == context[6:]
            assert found.groups[row, start + 5 : start + 14].tolist() == [number] * 8 + [NOTHING]
    plain = build_task("mqar-k4v8", {"pairs": 2}).instances(0, range(50))
    assert ((plain.targets != NOTHING) == (plain.groups != NOTHING)).all()


def test_noisy_keys_share_all_but_their_first_token():
    for name, tokens in (("mqar-k2v2-robustness", 2), ("mqar-k3v2-robustness", 3)):
        found = build_task(name, {"length": 256, "pairs": 8}).instances(0, range(100))
        keys = found.inputs[found.roles == Role.KEY].reshape(100, 8, tokens)
        assert (keys[:, :, 1:] == keys[:, :1, 1:]).all()
        assert all(len(set(row)) == 8 for row in keys[:, :, 0].tolist())


def test_the_answer_tells_the_region():
    task = build_task("mqar-position-robustness", {"mode": "paper"})
    found = task.instances(0, range(30))
    assert found.choices.shape == (30, 4, 4)
    assert (found.choices - found.choices[:, :, :1] == np.arange(4)).all()
    for region in range(4):
        values = np.take_along_axis(found.choices[:, :, region], np.maximum(found.groups, 0), axis=1)
        said = found.region(values)
        assert (said[found.groups != NOTHING] == region).all() and (said[found.groups == NOTHING] == NOTHING).all()
        rows, at = np.nonzero((found.roles == Role.VALUE) & (np.arange(64) // 8 == region))
        expected = found.choices[rows, found.pairs[rows, at], region]
        assert len(rows) == 120 and np.array_equal(found.inputs[rows, at], expected)
    assert set(found.inputs[found.roles == Role.FILLER].tolist()) == {0}


def test_clean_regions_have_different_values():
    found = build_task("mqar-position-robustness", {"vocab": 40}).instances(0, range(200))
    assert all(len(set(row)) == 16 for row in found.choices.reshape(200, 16).tolist())


def test_empty_positions_are_random_or_zero():
    for name, zeros in (("zoology-mqar", False), ("zoology-mqar-zeros", True)):
        found = build_task(name).instances(0, range(100))
        assert (found.inputs[found.roles == Role.FILLER] == 0).all() == zeros


def test_passes_repeat_the_pairs():
    found = build_task("zoology-mqar", {"passes": 3}).instances(0, range(20))
    assert np.array_equal(found.inputs[:, :8], found.inputs[:, 8:16])
    assert np.array_equal(found.inputs[:, :8], found.inputs[:, 16:24])


def test_an_update_is_a_new_value_but_not_always_in_the_authors_code():
    unchanged = {}
    for mode in ("clean", "paper"):
        task = build_task("zoology-forgetting", {"vocab": 18, "updates": 2, "mode": mode})
        found = task.instances(0, range(4000))
        table = {}
        same = 0
        for row in range(4000):
            values = found.inputs[row, 1:12:2]
            pairs = found.pairs[row, 1:12:2]
            table = dict(zip(pairs[:4].tolist(), values[:4].tolist(), strict=True))
            same += sum(table[int(pair)] == value for pair, value in zip(pairs[4:], values[4:], strict=True))
        unchanged[mode] = same / 8000
    assert unchanged["clean"] == 0 and unchanged["paper"] == pytest.approx(0.75 / 8, abs=0.02)


def test_no_part_of_a_composed_key_tells_the_value():
    found = build_task("zoology-compositional", {"pairs": 9}).instances(0, range(50))
    parts = found.inputs[:, :27].reshape(50, 9, 3)
    for row in range(50):
        for part in (0, 1):
            _, counts = np.unique(parts[row, :, part], return_counts=True)
            assert counts.tolist() == [3, 3, 3]
        assert len(np.unique(parts[row, :, 2])) == 9


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_noise_takes_its_share_of_slots_and_never_all(share):
    found = build_task("mad-noisy-recall", {"noise": share, "length": 16}).instances(0, range(4000))
    noisy = found.roles[:, :-1:2] == Role.NOISE
    assert noisy.mean() == pytest.approx(share * 6 / 7, abs=0.02) and not noisy.all(axis=1).any()
    assert (found.inputs[found.roles == Role.NOISE] >= 16).all()


def test_training_targets_are_every_next_token():
    for name in ("mad-in-context-recall", "mad-fuzzy-recall"):
        found = build_task(name, {"every": True}).instances(0, range(20))
        assert np.array_equal(found.targets[:, :-1], found.inputs[:, 1:])
        assert (found.groups == NOTHING).any()


def test_fuzzy_keys_have_the_asked_lengths():
    for keys, lengths in (("longest", {3}), ("any", {1, 2, 3})):
        found = build_task("mad-fuzzy-recall", {"keys": keys}).instances(0, range(50))
        is_key = (found.roles == Role.KEY) | (found.roles == Role.QUERY)
        text = "".join("k" if one else " " for row in is_key for one in [*row.tolist(), False])
        assert {len(run) for run in text.split()} == lengths


def test_the_authors_fuzzy_probe_may_never_be_shown():
    options = {"length": 24}
    missing = {}
    for mode in ("clean", "paper"):
        task = build_task("mad-fuzzy-recall", {**options, "mode": mode})
        found = task.instances(0, range(300))
        solved = [task.solve(found.inputs[row], asked(found, row)) for row in range(300)]
        missing[mode] = sum(not all(answers.values()) for answers in solved) / 300
    assert missing["clean"] == 0 and 0.05 < missing["paper"] < 0.9


def test_the_table_to_memorise_is_fixed_and_has_no_value_twice():
    task = build_task("mad-memorisation")
    assert len(set(task.table.tolist())) == 127 and task.table.min() >= 127 and task.table.max() < 255
    assert np.array_equal(task.table, build_task("mad-memorisation", {"length": 64}).table)
    assert not np.array_equal(task.table, build_task("mad-memorisation", {"table": 1}).table)


def test_tokens_to_copy_are_spread_as_the_variant_says():
    found = {
        name: build_task(name, {"length": 64, "tokens": 4}).instances(0, range(3000))
        for name in ("copying", "selective-copying", "mad-selective-copying")
    }
    at = {name: np.nonzero(one.roles == Role.VALUE)[1].reshape(3000, 4) for name, one in found.items()}
    assert (at["copying"] == np.arange(4)).all()
    assert chisquare(np.bincount(at["selective-copying"].ravel(), minlength=59)).pvalue > LEAST
    assert (at["mad-selective-copying"][:, -1] == 58).all()  # as coded no blank follows the last token
    assert at["mad-selective-copying"][:, 0].mean() == pytest.approx(55 / 4, rel=0.02)


def test_the_compressed_sequence_is_read_at_the_last_position():
    assert {name for name in TASKS.names() if build_task(name).readout == "last"} == {"mad-compression"}
    for mode, targets in (("clean", 31), ("paper", 32)):  # as coded the marker is one of them
        found = build_task("mad-compression", {"mode": mode}).instances(0, range(5))
        assert np.array_equal(found.targets[:, :targets], found.inputs[:, :targets])
        assert ((found.targets != NOTHING).sum(axis=1) == targets).all() and (found.inputs[:, -1] == 15).all()


def test_the_needle_stands_anywhere():
    found = build_task("passkey", {"length": 40}).instances(0, range(6000))
    _, at = np.nonzero((found.inputs == 0) & (found.roles == Role.SEPARATOR))
    assert chisquare(np.bincount(at, minlength=23)).pvalue > LEAST


def test_state_tracking_follows_known_products():
    parity = build_task("parity", {"length": 200}).instances(0, range(20))
    assert (parity.groups == np.arange(-1, 199)).all()
    assert np.array_equal(parity.targets, parity.inputs.cumsum(axis=1) % 2)
    a5, s5 = build_task("state-tracking-a5"), build_task("state-tracking-s5")
    assert (a5.vocabulary, s5.vocabulary) == (60, 120)
    # In lexicographic order 1 swaps the last two things; squared it is the identity, 0.
    assert s5.solve(np.array([1, 1, 24]), np.arange(3)) == {0: {1}, 1: {0}, 2: {24}}
    # Not commutative: (0 1), number 24, before and after (3 4) give one element, before and after (1 2 ...) do not.
    swap, turn = 24, 9
    (first,), (second,) = (s5.solve(np.array(order), np.array([1]))[1] for order in ([swap, turn], [turn, swap]))
    assert first != second
    found = s5.instances(0, range(500))
    assert chisquare(np.bincount(found.targets[:, -1], minlength=120)).pvalue > LEAST


def test_expressions_of_modular_arithmetic_have_every_shape():
    task = build_task("modular-arithmetic", {"length": 8, "operations": 3})
    found = task.instances(0, range(2000)).inputs[:, :7] >= 23
    shapes, counts = np.unique(found, axis=0, return_counts=True)
    assert len(shapes) == 5 and chisquare(counts).pvalue > LEAST  # the fourth Catalan number
    assert task.solve(np.array([24, 25, 2, 3, 23, 4, 22, 26]), np.array([7])) == {7: {(6 - 26) % 23}}


def test_hops_walk_along_one_cycle():
    task = build_task("hops", {"length": 12, "nodes": 4, "hops": 3})
    inputs = np.array([5, 9, 9, 2, 7, 5, 2, 7, 63, 9, 63, 5])
    assert task.solve(inputs, np.array([9, 11])) == {9: {5}, 11: {7}}
    found = task.instances(0, range(50))
    whole = build_task("hops", {"length": 12, "nodes": 4, "hops": 4}).instances(0, range(50))
    assert (whole.targets[whole.groups >= 0] == whole.inputs[whole.groups >= 0]).all()
    assert (found.targets[found.groups >= 0] != found.inputs[found.groups >= 0]).all()


def test_people_have_one_name_and_the_same_facts_in_every_cell():
    small, large = (build_task("capo", {"people": people}) for people in (10_000, 20_000))
    assert small.vocabulary == 400 + 400 + 1000 + 1105 + 2 and round(small.facts.fact_bits, 1) == 47.6
    found = small.instances(0, range(200)).inputs[:, 4:].reshape(-1, 12)
    known = {tuple(person[1:4]): tuple(person[4:]) for person in found.tolist()}
    again = [tuple(person[4:]) for person in found.tolist()]
    assert again == [known[tuple(person[1:4])] for person in found.tolist()] and len(known) > 900
    row = large.instances(0, [0]).inputs[0]
    row[16:28] = found[0]
    assert large.solve(row, np.array([19])) == {19: {known[tuple(found[0, 1:4].tolist())][0]}}
    firsts = np.bincount(small._person(np.arange(10_000))[:, 4] - small._starts[4], minlength=12)
    assert chisquare(firsts).pvalue > LEAST
