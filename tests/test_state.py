"""The train state's update by hand, and a digest that sees every bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trsi_jax import optim, state

ADAM = {"b1": 0.9, "b2": 0.98, "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0}


def adamw_by_hand(p, gradients, rates):
    """AdamW of arXiv 1711.05101 with decoupled decay, clipped to norm 1, in float64."""
    m = v = np.zeros_like(p)
    for n, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        g = g * min(1.0, 1.0 / np.sqrt(np.sum(g**2)))
        m = 0.9 * m + 0.1 * g
        v = 0.98 * v + 0.02 * g**2
        u = (m / (1 - 0.9**n)) / (np.sqrt(v / (1 - 0.98**n)) + 1e-8)
        p = p - rate * (u + 0.1 * p)
    return p


def test_updates_are_adamw_by_hand_with_the_rate_of_each_step() -> None:
    p = np.array([1.0, -2.0, 0.5])
    # The first gradient has norm 13 and is clipped, the second has norm 0.3 and is not.
    gradients = [np.array([3.0, 4.0, 12.0]), np.array([0.1, -0.2, 0.2])]
    rates = [0.1, 0.025]
    optimizer = optim.adamw(**ADAM)
    current = state.create({"w": jnp.asarray(p, jnp.float32)}, optimizer)
    assert int(current.step) == 0
    for gradient, rate in zip(gradients, rates, strict=True):
        current = state.apply_gradients(
            current,
            {"w": jnp.asarray(gradient, jnp.float32)},
            optimizer=optimizer,
            learning_rate=rate,
        )
    assert int(current.step) == 2
    np.testing.assert_allclose(
        current.params["w"], adamw_by_hand(p, gradients, rates), rtol=1e-5, atol=1e-6
    )


def test_an_update_leaves_the_state_before_as_it_was() -> None:
    optimizer = optax.identity()
    before = state.create({"w": jnp.ones(3)}, optimizer)
    after = state.apply_gradients(
        before, {"w": jnp.full(3, 2.0)}, optimizer=optimizer, learning_rate=0.25
    )
    # 1 - 0.25 * 2 = 0.5.
    np.testing.assert_array_equal(after.params["w"], np.full(3, 0.5))
    np.testing.assert_array_equal(before.params["w"], np.ones(3))
    assert int(before.step) == 0


def test_a_parameter_keeps_its_dtype() -> None:
    optimizer = optax.identity()
    before = state.create({"w": jnp.ones(3, jnp.bfloat16)}, optimizer)
    after = state.apply_gradients(
        before,
        {"w": jnp.ones(3, jnp.bfloat16)},
        optimizer=optimizer,
        learning_rate=jnp.float32(0.5),
    )
    assert after.params["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("bit", range(0, 32, 5))
@pytest.mark.parametrize("place", [0, 11])
def test_the_digest_sees_every_bit(bit: int, place: int) -> None:
    tree = {"a": np.linspace(-1, 1, 12, dtype=np.float32), "b": {"c": np.arange(3)}}
    changed = {"a": tree["a"].copy(), "b": tree["b"]}
    changed["a"].view(np.uint32)[place] ^= np.uint32(1 << bit)
    assert state.digest(changed) != state.digest(tree)


def test_the_digest_sees_names_shapes_and_dtypes_and_nothing_else() -> None:
    array = np.zeros((2, 3), np.float32)
    digest = state.digest({"a": array})
    assert digest == state.digest({"a": jnp.asarray(array)})
    assert digest == state.digest({"a": array.copy(order="F")})
    others = (
        {"b": array},
        {"a": array.reshape(3, 2)},
        {"a": array.view(np.int32)},
        {"a": array, "b": array},
        [array],
    )
    assert len({digest, *map(state.digest, others)}) == len(others) + 1


def test_a_state_is_a_pytree_of_its_arrays() -> None:
    made = state.create({"w": jnp.ones(3)}, optim.adamw(**ADAM))
    doubled = jax.tree.map(lambda x: 2 * x, made)
    assert isinstance(doubled, state.TrainState)
    np.testing.assert_array_equal(doubled.params["w"], np.full(3, 2.0))
