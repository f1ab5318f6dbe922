"""Pure InfSA in pieces, against the formula of each document by itself."""

import pytest
import torch
from torch.testing import assert_close

from infvit.attention import Mask, PureInfSA
from infvit.attention.running import continue_pure

B, H, N, D = 2, 3, 9, 4
SIZES = [[9], [4, 1, 1, 3], [1] * 9]


def tokens():
    return torch.randn(3, B, H, N, D, dtype=torch.float64)


def reference(q, k, v, pairs, phi, bias=0.0) -> torch.Tensor:
    """Row i divided by the norm of rows 0 to i, of one document."""
    scores = phi((q @ k.mT / D**0.5 + bias) / D**0.5) * pairs
    out = []
    for i in range(q.shape[-2]):
        norm = scores[..., : i + 1, :].square().sum((-2, -1), keepdim=True).sqrt()
        out.append(0.7 * scores[..., i : i + 1, :] / (norm + 1e-6) @ v)
    return torch.cat(out, -2)


def pieces(core, q, k, v, sizes, pairs=None, bias=None, **mask):
    out, past, start = [], None, 0
    for size in sizes:
        new, seen = slice(start, start + size), slice(0, start + size)
        parts = {
            "pairs": None if pairs is None else pairs[..., new, seen],
            "bias": None if bias is None else bias[..., new, seen],
            "keys": mask["real"][:, seen] if mask else None,
            "queries": mask["real"][:, new] if mask else None,
        }
        piece = continue_pure(core, q[..., new, :], k[..., seen, :], v[..., seen, :], Mask(**parts), past)
        out.append(piece.out)
        past, start = piece.squares[..., -1], start + size
    return torch.cat(out, -2)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("activation", ["relu", "gelu", "abs"])
@pytest.mark.parametrize("path", [None, "plain"])
def test_pieces_of_one_document(sizes, activation, path):
    core = PureInfSA(H, D, activation=activation, dtype=torch.float64)
    core.path = path
    q, k, v = tokens()
    pairs = torch.ones(N, N).tril().double()
    assert_close(pieces(core, q, k, v, sizes), reference(q, k, v, pairs, core.phi))
    window = pairs.triu(-2)
    assert_close(pieces(core, q, k, v, sizes, window.bool()), reference(q, k, v, window, core.phi))


@pytest.mark.parametrize("sizes", SIZES)
def test_pieces_of_several_documents(sizes):
    core, (q, k, v) = PureInfSA(H, D, dtype=torch.float64), tokens()
    document = torch.tensor([[0] * 5 + [1] * 4, [0] * 2 + [1] + [2] * 6])
    pairs = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    result = pieces(core, q, k, v, sizes, pairs)
    for sample in range(B):
        for number in document[sample].unique():
            own = [x[sample : sample + 1, :, document[sample] == number] for x in (q, k, v)]
            triangle = torch.ones(own[0].shape[-2], own[0].shape[-2]).tril().double()
            expected = reference(*own, triangle, core.phi)[0]
            assert_close(result[sample][:, document[sample] == number], expected)


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_where_a_document_begins_under_a_window(gap):
    """Of 3 tokens: behind two of padding the next token could not see what is before them, whatever the documents."""
    core, (q, k, v) = PureInfSA(H, D, dtype=torch.float64), tokens()
    real = torch.ones(N, dtype=torch.bool)
    real[3 : 3 + gap] = False
    place = torch.arange(N)
    document = place >= 3 + gap
    pairs = real & real[:, None] & (document == document[:, None]) & (place[:, None] - place < 3)
    pairs = pairs.tril()
    result = continue_pure(core, q, k, v, Mask(pairs=pairs), window=3).out
    scores = core.phi(q @ k.mT / D) * pairs
    rows = scores.square().sum(-1)
    squares = torch.cat([rows[..., :3].cumsum(-1), rows[..., 3:].cumsum(-1)], -1) if gap < 2 else rows.cumsum(-1)
    assert_close(result, 0.7 * scores / (squares.sqrt()[..., None] + 1e-6) @ v)


def test_groups_of_which_one_is_seen_by_all():
    core, (q, k, v) = PureInfSA(H, D, dtype=torch.float64), tokens()
    group = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])  # the last is seen by all and sees itself alone
    pairs = (group[:, None] == group) | (group == 2)
    piece = continue_pure(core, q, k, v, Mask(pairs=pairs), need_matrix=True, groups=True)
    for number in range(3):
        seen = (group == number) | (group == 2)
        own = [x[:, :, seen] for x in (q, k, v)]
        scores = core.phi(own[0] @ own[1].mT / D) * pairs[seen][:, seen]
        expected = 0.7 * scores / (scores.square().sum((-2, -1), keepdim=True).sqrt() + 1e-6) @ own[2]
        assert_close(piece.out[:, :, group == number], expected[:, :, group[seen] == number])
    assert_close(piece.matrix @ v, piece.out)


def test_a_path_without_pairs_is_not_taken_for_them():
    core, (q, k, v) = PureInfSA(H, D, dtype=torch.float64), tokens()
    window = torch.ones(N, N).tril().triu(-2)
    core.path = "tiled"
    result = continue_pure(core, q, k, v, Mask(pairs=window.bool())).out
    assert_close(result, reference(q, k, v, window.double(), core.phi))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("over_pairs", [False, True])
def test_padding_and_bias(sizes, over_pairs):
    core, (q, k, v) = PureInfSA(H, D, dtype=torch.float64), tokens()
    real = torch.tensor([[True] * 9, [False] * 3 + [True, True, False] + [True] * 3])
    bias = torch.randn(1, H, N, N, dtype=torch.float64)
    triangle = torch.ones(N, N).tril().double()
    pairs = triangle.bool() if over_pairs else None
    result = pieces(core, q.clone(), k, v, sizes, pairs, bias, real=real)
    for sample in range(B):
        own = [x[sample : sample + 1][:, :, real[sample]] for x in (q, k, v)]
        few = triangle[real[sample]][:, real[sample]]
        expected = reference(*own, few, core.phi, bias[:, :, real[sample]][..., real[sample]])[0]
        assert_close(result[sample][:, real[sample]], expected)
        assert not result[sample][:, ~real[sample]].any()


def test_matrix_and_gradient():
    core, (q, k, v) = PureInfSA(H, D, dtype=torch.float64), tokens()
    piece = continue_pure(core, q, k, v, Mask(), need_matrix=True)
    assert_close(piece.matrix @ v, piece.out)
    core.path = "plain"
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def result(path):
        core.path = path
        return torch.autograd.grad(continue_pure(core, *leaves, Mask()).out.square().sum(), leaves)

    for tiled, plain in zip(result(None), result("plain"), strict=True):
        assert_close(tiled, plain)
    negative = continue_pure(core, -leaves[1].abs(), leaves[1].abs(), leaves[2], Mask())  # no score is positive
    assert not negative.out.any()
    assert not torch.autograd.grad(negative.out.sum(), leaves[1])[0].any()
    core = PureInfSA(H, D, activation="gelu", dtype=torch.float64)
    core.path = "plain"
    nothing = torch.zeros_like(q, requires_grad=True)  # no score either, and no derivative of phi that hides a NaN
    assert torch.autograd.grad(continue_pure(core, nothing, k, v, Mask()).out.sum(), nothing)[0].isfinite().all()
