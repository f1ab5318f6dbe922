"""Centralities against networkx, chains against simulated walks and known answers, divergence refused."""

import networkx as nx
import numpy as np
import pytest
import torch

from infvit.attention import LinearInfSA, PureInfSA
from infvit.metrics.markov import (
    KERNEL,
    VISITS,
    DivergenceError,
    absorption,
    absorption_probabilities,
    eigenvector_centrality,
    is_chain,
    katz,
    kernel_name,
    neumann_kernel,
    pagerank,
    require_convergent,
)

SHAPE = (2, 3)


def graph(weights: np.ndarray) -> nx.DiGraph:
    return nx.from_numpy_array(weights, create_using=nx.DiGraph)


def ranked(values: dict[int, float]) -> list[float]:
    return [values[i] for i in range(len(values))]


@pytest.fixture(params=["pure", "sparse"])
def weights(request: pytest.FixtureRequest) -> torch.Tensor:
    """gamma A of Pure InfSA with no entry of 0; or a directed graph with many edges missing."""
    if request.param == "pure":
        return (
            PureInfSA(3, 4, activation="abs").double().matrix(*torch.randn(2, 2, 3, 9, 4, dtype=torch.float64)).detach()
        )
    m = torch.rand(2, 3, 9, 9, dtype=torch.float64) * (torch.rand(2, 3, 9, 9) < 0.5)
    m[..., torch.arange(9), (torch.arange(9) + 1) % 9] += 0.1  # a ring: strongly connected
    m[..., 0, 0] += 0.1  # and not periodic
    return m / m.sum((-2, -1), keepdim=True)


def test_against_networkx(weights: torch.Tensor) -> None:
    found = {f.__name__: f(weights) for f in (katz, pagerank, eigenvector_centrality)}
    for at in np.ndindex(*SHAPE):
        g = graph(weights[at].numpy())
        theirs = ranked(nx.katz_centrality_numpy(g, alpha=1.0, beta=1.0, normalized=False, weight="weight"))
        assert found["katz"][at].numpy() == pytest.approx(np.array(theirs) - 1, abs=1e-9)  # without paths of length 0
        theirs = ranked(nx.pagerank(g, alpha=0.85, tol=1e-12, max_iter=1000))
        assert found["pagerank"][at].numpy() == pytest.approx(theirs, abs=1e-8)
        theirs = ranked(nx.eigenvector_centrality_numpy(g, weight="weight"))
        assert found["eigenvector_centrality"][at].numpy() == pytest.approx(theirs, abs=1e-7)


def test_damping_and_dangling_tokens_against_networkx() -> None:
    m = torch.tensor([[0, 1, 2], [0, 0, 0], [3, 0, 0]], dtype=torch.float64)
    for damping in (0.5, 0.85):
        theirs = ranked(nx.pagerank(graph(m.numpy()), alpha=damping, tol=1e-12))
        assert pagerank(m, damping).numpy() == pytest.approx(theirs, abs=1e-9)
    assert float(pagerank(m).sum()) == pytest.approx(1)
    assert pagerank(torch.zeros(4, 4)).numpy() == pytest.approx(np.full(4, 0.25))


def test_scale_has_no_influence_on_pagerank() -> None:
    m = torch.rand(6, 6, dtype=torch.float64)
    assert pagerank(m * 0.01).numpy() == pytest.approx(pagerank(m).numpy(), abs=1e-12)


def test_expected_visits_are_those_of_simulated_walks() -> None:
    m = torch.tensor([[0.1, 0.5, 0.1], [0.2, 0.0, 0.6], [0.3, 0.3, 0.0]], dtype=torch.float64)
    assert bool(is_chain(m))
    visits, ends = np.zeros(3), np.zeros(3)
    draw, walks = np.random.default_rng(0), 20_000
    steps = np.concatenate([m.numpy(), absorption(m).numpy()[:, None]], axis=1)
    place = np.zeros(walks, dtype=int)
    while len(place):
        visits += np.bincount(place, minlength=3)
        following = (draw.random(len(place))[:, None] > steps.cumsum(1)[place]).sum(1)
        ends += np.bincount(place[following == 3], minlength=3)
        place = following[following < 3]
    assert neumann_kernel(m)[0].numpy() == pytest.approx(visits / walks, rel=0.03)
    assert absorption_probabilities(m)[0].numpy() == pytest.approx(ends / walks, rel=0.03)


def test_the_kernel_is_the_sum_of_powers(weights: torch.Tensor) -> None:
    total = sum(np.linalg.matrix_power(weights.numpy(), n) for n in range(400))
    assert neumann_kernel(weights).numpy() == pytest.approx(total, abs=1e-9)
    assert katz(weights).numpy() == pytest.approx(total.sum(-2) - 1, abs=1e-9)
    assert absorption_probabilities(weights).sum(-1).numpy() == pytest.approx(np.ones((2, 3, 9)), abs=1e-9)


def test_linear_infsa_has_the_absorption_and_centralities_of_the_paper() -> None:
    """R = 1 - gamma; Katz and the eigenvector are proportional to a (section 6 of the specification)."""
    q = torch.randn(1, 2, 12, 4, dtype=torch.float64) + 0.5
    mechanism = LinearInfSA(2, 4, gamma=0.7).double()
    m, a = mechanism.matrix(q, q).detach(), mechanism.token_map(q, q)
    assert absorption(m).numpy() == pytest.approx(np.full((1, 2, 12), 0.3), abs=1e-5)  # eps in the sum of a
    assert require_convergent(m).numpy() == pytest.approx(0.7, abs=1e-5)
    unit = a / a.norm(dim=-1, keepdim=True)
    for centrality in (katz(m), eigenvector_centrality(m)):
        assert (centrality / centrality.norm(dim=-1, keepdim=True)).detach().numpy() == pytest.approx(
            unit.detach().numpy(), abs=1e-6
        )
    assert kernel_name(m) == VISITS


def test_signed_absorption_is_never_clipped() -> None:
    """One row holds all of the norm: it sums to gamma sqrt(N), the other rows to 0."""
    n = 9
    m = torch.zeros(n, n, dtype=torch.float64)
    m[1] = 0.7 / n**0.5
    rest = absorption(m)
    assert float(rest.min()) == pytest.approx(1 - 0.7 * n**0.5)
    assert float(rest.min()) < -1
    assert int((rest < 0).sum()) == 1
    assert not bool(is_chain(m))
    assert kernel_name(m) == KERNEL
    assert neumann_kernel(m).numpy() == pytest.approx(np.linalg.inv(np.eye(n) - m.numpy()), abs=1e-12)


@pytest.mark.parametrize(
    ("matrix", "chain"),
    [
        ([[0.5, 0.5], [0, 0]], True), ([[0.5, 0.5 + 1e-8], [0, 0]], True), ([[0.5, 0.51], [0, 0]], False),
        ([[0.5, -0.1], [0, 0]], False), ([[0.0]], True),
    ],
)  # fmt: skip
def test_a_chain_has_no_negative_probability(matrix: list[list[float]], chain: bool) -> None:
    m = torch.tensor(matrix, dtype=torch.float64)
    assert bool(is_chain(m)) is chain
    both = torch.stack([m, torch.zeros_like(m)])
    assert is_chain(both).tolist() == [chain, True]
    assert kernel_name(both) == (VISITS if chain else KERNEL), "a single one that is none decides"


@pytest.mark.parametrize("gamma", [1.0, 1.5])
@pytest.mark.parametrize("function", [neumann_kernel, katz, absorption_probabilities])
def test_divergence_is_refused_with_the_value(gamma: float, function: object) -> None:
    """ones / 4 has radius 1: at gamma 1.5 the inverse exists, with entries of -0.75, and means nothing."""
    m = gamma * torch.full((4, 4), 0.25, dtype=torch.float64)
    with pytest.raises(DivergenceError, match=rf"is {gamma:g}, not below 1"):
        function(m)  # type: ignore[operator]
    good = torch.full((4, 4), 0.1, dtype=torch.float64)
    with pytest.raises(DivergenceError):
        function(torch.stack([good, m]))  # type: ignore[operator]
    function(good)  # type: ignore[operator]


def test_a_radius_that_is_nan_is_refused() -> None:
    with pytest.raises(DivergenceError, match="nan"):
        neumann_kernel(torch.full((2, 2), torch.nan))


def test_centralities_that_are_not_defined() -> None:
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).double() / 4
    signed = torch.tensor([[0.1, -0.2], [0.3, 0.1]], dtype=torch.float64)  # complex eigenvalues
    nilpotent = torch.tensor([[0, 1], [0, 0]], dtype=torch.float64)
    for m in (blocks, signed, nilpotent, torch.zeros(3, 3, dtype=torch.float64)):
        assert eigenvector_centrality(m).isnan().all()
    assert pagerank(signed).isnan().all()
    mixed = pagerank(torch.stack([signed, signed.abs()]))
    assert mixed.isnan().all(-1).tolist() == [True, False]


def test_one_token() -> None:
    m = torch.tensor([[0.6]], dtype=torch.float64)
    assert neumann_kernel(m).item() == pytest.approx(2.5)
    assert katz(m).item() == pytest.approx(1.5)
    assert pagerank(m).item() == eigenvector_centrality(m).item() == 1
