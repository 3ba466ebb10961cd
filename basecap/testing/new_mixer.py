"""`basecap check --new FILE`: a file with a mixer to start from."""

from pathlib import Path

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES

TEMPLATE = """\
# FILE
import torch
from torch import nn

from basecap.mixers import ForwardOnly, mixer


@mixer("NAME", backbone="transformer++", paper="mine", summary="the mean of all values so far")
class CLASS(ForwardOnly):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.value = nn.Linear(layer.hidden, layer.hidden, bias=False)
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=False)

    def forward(self, x, segments=None):
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device, dtype=x.dtype).tril()
        if segments is not None:
            mask = mask * (segments[:, :, None] == segments[:, None, :])
        return self.out((mask / mask.sum(-1, keepdim=True)) @ self.value(x))

    def flops(self, length):
        return 4.0 * length * self.layer.hidden**2 + length * (length + 1) * self.layer.hidden
"""


def write_mixer(path: Path) -> str:
    """Write a file with a mixer named as the file, which passes `basecap check`; return that name.

    Raises:
        ConfigError: a file that exists or cannot be written, or a name that makes no mixer.
    """
    words = path.stem.split("_")
    if path.suffix != ".py" or not path.stem.isidentifier() or not path.stem.islower() or not all(words):
        needed = "be lower case with underscores and end in .py"
        raise ConfigError(f"--new {path}: the name must {needed}, such as my_mixer.py.")
    name = "-".join(words)
    if name in ARCHITECTURES.names():
        raise ConfigError(f"--new {path}: there is a mixer {name!r} already; choose another name.")
    text = TEMPLATE.replace("FILE", path.name).replace("NAME", name)
    if path.exists() or path.is_symlink():
        raise ConfigError(f"--new {path} exists; choose another name.")
    try:
        path.write_text(text.replace("CLASS", "".join(map(str.title, words))), encoding="utf-8")
    except OSError as error:
        path.unlink(missing_ok=True)  # on a full disk it is empty
        raise ConfigError(f"--new {path} cannot be written ({error.strerror}); choose another place.") from error
    return name
