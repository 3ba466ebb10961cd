"""The inverse of a choice: each chunk's list of pairs, by one kernel or by four."""

import pytest
import torch

pytest.importorskip("triton")

from basecap.ops._selection import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("at_once", [True, False], ids=["one kernel", "four kernels"])
@pytest.mark.parametrize(("H", "groups", "remote", "M"), [(2, 2, 1, 5), (4, 2, 2, 19), (1, 1, 1, 1)])
def test_every_list_has_its_pairs_in_order(
    at_once: bool, H: int, groups: int, remote: int, M: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "AT_ONCE", 2**30 if at_once else 0)
    N, size, width = 700, 64, H // groups * remote
    choice = torch.randint(-1, M, (N, H, remote), dtype=torch.int32)
    choice[:300] = 0  # a long list, with shares of its own
    index = launch.invert(choice.to(DEVICE), M, groups, size)
    offset, pairs, share, chunk = (part.view(groups, -1).cpu() for part in index.parts)
    for g in range(groups):
        numbers = torch.arange(N * H * remote, dtype=torch.int32).view(N, H, remote)
        of_group = slice(g * (H // groups), (g + 1) * (H // groups))
        flat, numbers = choice[:, of_group].reshape(-1), numbers[:, of_group].reshape(-1)
        lists = [numbers[flat == m] for m in range(M)]
        expected = torch.cat(lists)
        assert pairs[g].tolist() == [*expected.tolist(), *[0] * (N * width - len(expected))]
        assert offset[g].tolist() == [0, *torch.tensor([len(x) for x in lists]).cumsum(0).tolist()]
        extra = [max(0, -(-len(x) // size) - 1) for x in lists]
        assert share[g].tolist() == [0, *torch.tensor(extra).cumsum(0).tolist()]
        chunks = [m for m, count in enumerate(extra) for _ in range(count)]
        assert chunk[g].tolist() == [*chunks, *[0] * (index.extra - len(chunks))]
