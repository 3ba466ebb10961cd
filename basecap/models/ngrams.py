"""Embeddings of n-grams: a table of what has been met, read by the last tokens themselves."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Rows of the table, which n-grams share by a hash.
ROWS = 2**15
#: Factor and shift of the hash: products with a large odd number mix upwards, half a word shifted mixes downwards.
FACTOR, SHIFT = 6364136223846793005, 32


class NgramEmbedding(nn.Module):
    """An embedding of the last `order` tokens at each position, which is added to that of the token.

    It is one table of the hashed tables of Over-Encoding (arXiv 2501.16975, section 3.2). N-grams that share a row have
    the same embedding. At the start of a document the tokens before it count as one that does not occur.

    Args:
        order: tokens of an n-gram, at least 2.
        width: numbers of an embedding.
    """

    #: Learning-rate factor of the table: most of its rows are met a few times.
    LR = 10.0

    def __init__(self, order: int, width: int):
        super().__init__()
        self.order = order
        self.table = nn.Embedding.from_pretrained(torch.empty(ROWS, width), freeze=False)

    def forward(self, tokens_BT: Tensor, segments_BT: Tensor | None = None, last_BN: Tensor | None = None) -> Tensor:
        """Return the embeddings [B, T, D] of tokens, int64 [B, T].

        Args:
            tokens_BT: int64 [B, T].
            segments_BT: int [B, T] or None: no n-gram reaches across a border.
            last_BN: int64 [B, order - 1] in decoding, the tokens before each plus 1, else 0; updated in place.
        """
        codes, T = tokens_BT.long() + 1, tokens_BT.shape[1]  # narrower integers would have other products
        before = torch.zeros_like(codes[:, :1]).expand(-1, self.order - 1) if last_BN is None else last_BN
        hashed, codes = torch.zeros_like(codes), torch.cat((before, codes), dim=1)
        if last_BN is not None:
            last_BN.copy_(codes[:, T:])
        for back in reversed(range(self.order)):
            start = self.order - 1 - back
            code = codes[:, start : start + T]
            if segments_BT is not None and back:
                same = segments_BT[:, back:] == segments_BT[:, :-back] if back < T else segments_BT[:, :0] == 0
                code = code * F.pad(same, (min(back, T), 0))
            hashed = (hashed + code) * FACTOR
            hashed = hashed ^ (hashed >> SHIFT)
        return self.table(hashed % ROWS)

    def init_cache(self, batch: int) -> Tensor:
        """Return what decoding keeps of the tokens so far, none: int64 [batch, order - 1]."""
        return torch.zeros(batch, self.order - 1, dtype=torch.int64, device=self.table.weight.device)

    def state_bytes(self) -> int:
        """Bytes of `init_cache(1)`."""
        return 8 * (self.order - 1)
