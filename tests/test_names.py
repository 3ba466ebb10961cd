"""Names of backbones, scales and devices."""

import pytest

from basecap.errors import ConfigError
from basecap.names import at_scale, check_device_name, split_backbone


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("transformer++", ("transformer++", None)),
        ("transformer++ in rwkv-7", ("transformer++", "rwkv-7")),
        ("a in b in c", ("a", "b in c")),
        ("mix in", ("mix in", None)),
        ("inward", ("inward", None)),
    ],
)
def test_a_backbone_follows_the_first_in(name: str, parts: tuple[str, str | None]):
    assert split_backbone(name) == parts


def test_a_title_names_the_scale_of_a_study_that_has_several():
    assert at_scale("zoo", "test") == "zoo at scale test" and at_scale("zoo", None) == "zoo"


@pytest.mark.parametrize("name", [None, "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices_are_taken(name: str | None):
    assert check_device_name(name) == name


@pytest.mark.parametrize("name", ["", "gpu", "CPU", "cuda:", "cuda:x", "cuda:0,1", "cpu\n", "tpu"])
def test_other_devices_are_refused(name: str):
    with pytest.raises(ConfigError, match=r"^unknown device .*; use cpu, cuda or cuda:0\.$"):
        check_device_name(name)
