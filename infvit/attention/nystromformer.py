"""Nystromformer: softmax attention through landmarks (Xiong et al., arXiv 2102.03902, eqs. 11, 13 and 14)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infvit.attention.factored import FactoredAttention
from infvit.attention.mechanism import Capabilities, Mask
from infvit.errors import ConfigError


def segment_means(x: Tensor, segments: int) -> Tensor:
    """Averages N tokens over `segments` segments in their order, (B, H, N, D) to (B, H, segments, D).

    All segments have N // segments tokens, the last N % segments of them one more (the authors' rule for images). Fewer
    tokens than segments: the first N segments have one each, the others are empty and 0.
    """
    tokens = x.shape[-2]
    filled = _least(tokens, segments)
    short, longer = tokens // filled, tokens % filled
    index = torch.arange(segments, device=x.device)[:, None]
    start = index * short + (index - (filled - longer)).clamp(min=0)
    length = short + (index >= filled - longer).to(index.dtype)
    position = torch.arange(tokens, device=x.device)
    inside = ((position >= start) & (position < start + length)).to(x.dtype)
    return (inside / length) @ x


def _least(tokens: Any, segments: int) -> Any:
    """Returns the smaller number; under tracing and export `tokens` is a symbol, and the graph must hold for all."""
    return tokens.clamp(max=segments) if isinstance(tokens, Tensor) else torch.sym_min(tokens, segments)


def iterative_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """Approximates the Moore-Penrose inverse by matrix products (eq. 11), started at A^T / (||A||_1 ||A||_inf).

    The start is of each matrix by itself; the authors' code has one for the whole batch, and says that this is better.
    """
    sums = matrix.abs()
    norms = sums.sum(-2, keepdim=True).amax(-1, keepdim=True) * sums.sum(-1, keepdim=True).amax(-2, keepdim=True)
    identity = torch.eye(matrix.shape[-1], device=matrix.device, dtype=matrix.dtype)
    inverse = matrix.transpose(-2, -1) / norms
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return inverse


class Nystromformer(FactoredAttention):
    """`softmax(Q K~^T) pinv(softmax(Q~ K~^T)) softmax(Q~ K^T) V + conv(V)`, scores divided by sqrt(D).

    Q~ and K~, the landmarks, are means over segments of neighbouring tokens, in a vision transformer the class token
    and then the patches row by row. With at most `num_landmarks` tokens each is a landmark; softmax costs less there.
    `conv` is the published skip connection, a convolution over the tokens with one kernel per head; it is linear in the
    values and so part of the mixing matrix. Segments and kernel count positions, and for that there is no padding.

    Args:
        num_heads: heads H.
        head_dim: channels per head D.
        attn_drop: must be 0.
        device: device of the convolution.
        dtype: dtype of the convolution.
        num_landmarks: most landmarks m.
        pinv_iterations: iterations of the inverse.
        conv_kernel: tokens that the convolution spans, an odd number; 0 leaves it out. 35 as in the authors' code.
    """

    name = "nystromformer"
    capabilities = Capabilities(matrix=True, token_map=True, any_length=True)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        attn_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_landmarks: int = 64,
        pinv_iterations: int = 6,
        conv_kernel: int = 35,
    ) -> None:
        super().__init__(num_heads, head_dim, attn_drop, device, dtype)
        if num_landmarks < 1 or pinv_iterations < 1:
            raise ConfigError(f"num_landmarks={num_landmarks}, pinv_iterations={pinv_iterations} must be at least 1.")
        if conv_kernel < 0 or (conv_kernel and conv_kernel % 2 == 0):
            raise ConfigError(f"conv_kernel={conv_kernel} of {self.name} must be odd, or 0 for no convolution.")
        self.num_landmarks = num_landmarks
        self.pinv_iterations = pinv_iterations
        self.conv_kernel = conv_kernel
        if conv_kernel:
            self.kernel = nn.Parameter(torch.empty(num_heads, conv_kernel, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws a new kernel, as torch draws that of a convolution (also after creation on the meta device)."""
        if self.conv_kernel:
            nn.init.uniform_(self.kernel, -(self.conv_kernel**-0.5), self.conv_kernel**-0.5)

    def macs(self, tokens: int) -> int:
        n, m, d = tokens, self.num_landmarks, self.head_dim
        means_and_scores, inverse = 4 * m * n * d + m * m * d, 4 * m**3 * self.pinv_iterations
        return self.num_heads * (means_and_scores + inverse + n * m * m + 2 * n * m * d + n * d * self.conv_kernel)

    def factors(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        q, tokens = q * self.scale, q.shape[-2]
        q_means, k_means = segment_means(q, self.num_landmarks), segment_means(k, self.num_landmarks).transpose(-2, -1)
        front, core = q @ k_means, q_means @ k_means
        if torch.compiler.is_exporting() or torch.jit.is_tracing() or tokens < self.num_landmarks:
            # Empty landmarks leave the softmaxes; rows and columns of 0 in a matrix are rows and columns of 0 in its
            # inverse. A graph that is kept must hold at every number of tokens.
            filled = torch.arange(self.num_landmarks, device=q.device) < tokens
            front, core = (torch.where(filled, x, float("-inf")).softmax(-1) for x in (front, core))
            core = torch.where(filled[:, None], core, 0.0)
        else:
            front, core = front.softmax(-1), core.softmax(-1)
        return front @ iterative_pinv(core, self.pinv_iterations), (q_means @ k.transpose(-2, -1)).softmax(-1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        out = super().mix(q, k, v, mask)
        if not self.conv_kernel:
            return out
        kernel = self.kernel.to(v.dtype)[:, None, :, None]
        return out + F.conv2d(v, kernel, padding=(self.conv_kernel // 2, 0), groups=self.num_heads)

    def _matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        matrix = super()._matrix(q, k, mask)
        return matrix + self._conv_matrix(q.shape[-2]).to(matrix.dtype) if self.conv_kernel else matrix

    def _token_map(self, q: Tensor, k: Tensor, mask: Mask, kind: str) -> Tensor:
        relevance = super()._token_map(q, k, mask, kind)
        if not self.conv_kernel:
            return relevance
        conv = self._conv_matrix(q.shape[-2]).to(relevance.dtype)
        return relevance + (conv[:, 0] if kind == "class_token" else conv.sum(-2))

    def _conv_matrix(self, tokens: int) -> Tensor:
        """Returns the convolution as a matrix of each head, (H, N, N)."""
        position = torch.arange(tokens, device=self.kernel.device)
        offset = position - position[:, None] + self.conv_kernel // 2
        inside = (offset >= 0) & (offset < self.conv_kernel)
        return torch.where(inside, self.kernel[:, offset.clamp(0, self.conv_kernel - 1)], 0.0)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        tokens, landmarks = q.shape[-2], min(self.num_landmarks, q.shape[-2])
        lengths = [tokens // landmarks + (s >= landmarks - tokens % landmarks) for s in range(landmarks)]
        q_means, k_means = (torch.stack([part.mean(-2) for part in x.split(lengths, -2)], -2) for x in (q, k))
        front, core, back = (
            (a @ b.mT / q.shape[-1] ** 0.5).exp() for a, b in ((q, k_means), (q_means, k_means), (q_means, k))
        )
        front, core, back = (x / x.sum(-1, keepdim=True) for x in (front, core, back))
        z = core.mT / (core.sum(-2).amax(-1) * core.sum(-1).amax(-1))[..., None, None]
        eye = torch.eye(landmarks, dtype=q.dtype)
        for _step in range(self.pinv_iterations):
            z = z @ (13 * eye - core @ z @ (15 * eye - core @ z @ (7 * eye - core @ z))) / 4
        out = front @ z @ back @ v
        half = self.conv_kernel // 2
        for offset in range(self.conv_kernel):
            shifted = F.pad(v, (0, 0, half, half))[..., offset : offset + tokens, :]
            out = out + self.kernel[:, offset, None, None] * shifted
        return out

    def extra_repr(self) -> str:
        return f"num_landmarks={self.num_landmarks}, conv_kernel={self.conv_kernel}"
