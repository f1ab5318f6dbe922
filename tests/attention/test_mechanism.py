"""The registry and the shared interface of mechanisms."""

import pytest
import torch

from infvit.attention import (
    Capabilities,
    Mask,
    Mechanism,
    PureInfSA,
    get_mechanism,
    hyperparameters,
    list_mechanisms,
    register_mechanism,
)
from infvit.errors import ConfigError
from infvit.testing.cases import inputs


def test_ours_are_registered():
    assert {"infsa_linear", "infsa_pure", "softmax"} <= set(list_mechanisms())
    assert get_mechanism("infsa_pure") is PureInfSA


def test_unknown_name_offers_the_closest():
    with pytest.raises(ValueError, match=r"unknown attention mechanism 'infsa_pur'\. Did you mean 'infsa_pure'"):
        get_mechanism("infsa_pur")


def test_registration_refuses_what_would_fail_later(registry):
    class Nameless(Mechanism):
        capabilities = Capabilities(any_length=True)

    class Undeclared(Mechanism):
        name = "undeclared"

    class Taken(Mechanism):
        name, capabilities = "softmax", Capabilities(any_length=True)

    class MapWithoutKinds(Mechanism):
        name, capabilities = "map", Capabilities(token_map=True, any_length=True)

    class FixedLengthUnknown(Mechanism):
        name, capabilities = "fixed", Capabilities()

    cases = [
        (Nameless, "must set the class attributes"),
        (Undeclared, "must set the class attributes"),
        (Taken, "already registered by infvit.attention.softmax"),
        (MapWithoutKinds, "`token_maps` is empty"),
        (FixedLengthUnknown, "num_tokens"),
    ]
    before = dict(registry)
    for cls, message in cases:
        with pytest.raises(ValueError, match=message):
            register_mechanism(cls)
    assert registry == before


def test_registering_again_after_a_reload_replaces_the_class(registry):
    reloaded = type("PureInfSA", (PureInfSA,), {"__module__": PureInfSA.__module__})
    register_mechanism(reloaded)
    assert get_mechanism("infsa_pure") is reloaded


def test_hyperparameters_are_the_keyword_only_arguments():
    assert hyperparameters(PureInfSA) == {"gamma", "gamma_trainable", "gamma_per_head", "activation"}
    assert hyperparameters(get_mechanism("softmax")) == set()


def test_refusal_names_the_mechanism_and_what_it_can_do():
    core = get_mechanism("infsa_linear")(2, 4).double()
    with pytest.raises(ValueError, match=r"'infsa_linear' does not support: masks over query-key pairs.*'padding'"):
        core(*inputs(), Mask(pairs=torch.ones(7, 7, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"no token map 'in_degree'\. Known: weights"):
        core.token_map(*inputs()[:2], kind="in_degree")


def test_token_map_is_zero_at_padded_keys_whatever_the_mechanism_returns():
    class Ones(PureInfSA):
        def _token_map(self, q, k, mask, kind):
            return q.new_ones(q.shape[0], q.shape[1], k.shape[2])

    keys = torch.tensor([[True] * 7, [True, False] * 3 + [True]])
    relevance = Ones(2, 4).double().token_map(*inputs()[:2], Mask(keys=keys))
    assert torch.equal(relevance, keys[:, None].expand(-1, 2, -1).double())


def test_allowed_pairs_combine_all_parts():
    keys = torch.tensor([[True, True, False]])
    queries = torch.tensor([[False, True, True]])
    pairs = torch.ones(3, 3, dtype=torch.bool)
    pairs[1, 0] = False
    allowed = Mask(keys, queries, pairs, causal=True).allowed(3, 3, torch.device("cpu"))
    expected = [[False, False, False], [False, True, False], [True, True, False]]
    assert allowed[0, 0].tolist() == expected
    assert Mask().allowed(3, 3, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Mask(keys=torch.ones(2, 7)), r"Mask.keys must be boolean of shape \(2, 7\), not torch.float32"),
        (Mask(keys=torch.ones(2, 6, dtype=torch.bool)), r"Mask.keys .* of shape \(2, 6\)"),
        (Mask(queries=torch.ones(1, 7, dtype=torch.bool)), r"Mask.queries must be boolean of shape \(2, 7\)"),
        (Mask(pairs=torch.zeros(7, 7)), "Mask.pairs must be boolean"),
    ],
)
def test_masks_of_the_wrong_kind_are_refused(mask, message):
    with pytest.raises(ConfigError, match=message):
        get_mechanism("infsa_pure")(2, 4, dtype=torch.float64)(*inputs(7), mask)
