"""How alike the tokens of a layer are: over-smoothing (arXiv 2505.08516, Fig. 3) and effective rank."""

import torch
from torch import Tensor


def high_frequency_share(tokens: Tensor) -> Tensor:
    """Returns the share of the energy of tokens (..., N, C) that is not in their mean, (...,).

    Under the discrete Fourier transform over the N tokens frequency 0 is the mean and the rest is high: the share is
    sum_{f > 0} |F_f|^2 / sum_f |F_f|^2, which by Parseval is ||X - mean||_F^2 / ||X||_F^2. It is 0 where all tokens are
    equal, NaN where all are 0.
    """
    x = tokens.double()
    high = (x - x.mean(-2, keepdim=True)).square().sum((-2, -1))
    return high / x.square().sum((-2, -1))


def token_cosine(tokens: Tensor) -> Tensor:
    """Returns the mean cosine between two different tokens of (..., N, C), (...,).

    Tokens that are 0 have no direction and are left out; NaN where fewer than two are left. The mean over all pairs
    follows from the sum of the unit vectors u: (||sum u||^2 - n) / (n (n - 1)).
    """
    x = tokens.double()
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    units = x / length.where(length > 0, 1)
    n = (length > 0).sum((-2, -1)).double()
    total = units.sum(-2).square().sum(-1)
    return ((total - n) / (n * (n - 1))).where(n > 1, torch.nan)


def effective_rank(tokens: Tensor) -> Tensor:
    """Returns exp(entropy) of the singular values of tokens (..., N, C), divided by their sum, (...,).

    Between 1 and min(N, C): k equal singular values give k (Roy and Vetterli, EUSIPCO 2007). NaN where all are 0.
    """
    values = torch.linalg.svdvals(tokens.double())
    share = values / values.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()
