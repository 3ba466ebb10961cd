"""A change that means to change no number changes no bit of a short training."""

import json

import pytest

from tests.train.loss_curve import SNAPSHOT, curves, machine


def test_a_short_training_gives_the_frozen_losses(tmp_path):
    frozen, found = json.loads(SNAPSHOT.read_text()), curves(tmp_path)
    assert set(found) == set(frozen["curves"]) == {"transformer++", "mamba-2"}
    for name, digits in found.items():
        expected = frozen["curves"][name]
        assert [float.fromhex(digit) for digit in digits] == pytest.approx(
            [float.fromhex(digit) for digit in expected], rel=1e-3
        )
        # elsewhere sums are added in another order, and only the line above says something
        assert frozen["machine"] != machine() or digits == expected
