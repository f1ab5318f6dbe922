"""The contract of an attention mechanism, as checks that raise AssertionError. Our tests run them over the registry.

For a mechanism of your own: `python -m infvit.testing my_linear --imports my_pkg.attention`, or in your tests

    @pytest.mark.parametrize("check", infvit.testing.CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check("my_linear")

Each check takes the name of a registered mechanism and, optionally, its hyperparameters. What `capabilities` declares
is checked for values and gradients; what it does not declare must raise ConfigError when asked for.
"""

from collections.abc import Callable

from infvit.testing.layers import (
    check_compile,
    check_export,
    check_layer,
    check_meta_device,
)
from infvit.testing.promises import (
    check_bias,
    check_causal,
    check_cross,
    check_matrix,
    check_ordered,
    check_padding,
    check_pairwise,
    check_permutation_equivariant,
    check_token_map,
)
from infvit.testing.values import (
    check_any_length,
    check_autocast,
    check_degenerate,
    check_dropout,
    check_dtypes,
    check_gradients,
    check_half_precision,
    check_nan,
    check_strides,
    check_values,
)

Check = Callable[..., None]
CHECKS: tuple[Check, ...] = (
    check_values,
    check_any_length,
    check_dtypes,
    check_gradients,
    check_strides,
    check_degenerate,
    check_nan,
    check_half_precision,
    check_autocast,
    check_dropout,
    check_padding,
    check_causal,
    check_pairwise,
    check_bias,
    check_cross,
    check_ordered,
    check_permutation_equivariant,
    check_matrix,
    check_token_map,
    check_layer,
    check_meta_device,
    check_export,
    check_compile,
)
