"""The three train steps on a mesh: jitted, donated, accumulated over micro-batches.

They compute what `sft_step`, `critic_step` and `actor_step` compute on one device, up to the order
of sums. Every sum over tokens has the denominator of the whole batch, so micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.layouts import ROWS
from sharding.rules import shardings
from trsi_jax import losses, model
from trsi_jax.batch import PackedBatch, to_predictor, to_token
from trsi_jax.state import TrainState, apply_gradients, create
from trsi_jax.steps.sharded_forward import ShardedModel, cross_entropy, logprobs, values

Metrics = dict[str, jax.Array]
Network = Literal["actor", "critic"]
Step = Literal["sft", "critic", "actor", "ppo"]

NETWORKS: Mapping[Step, tuple[Network, ...]] = {
    "sft": ("actor",),
    "critic": ("critic",),
    "actor": ("actor",),
    "ppo": ("actor", "critic"),
}
"""The networks that a step trains, in the order of its arguments."""

PPO_COLUMNS = ("advantage_t", "return_t", "value_t")
"""Columns of a batch that the PPO step reads."""


@dataclass(frozen=True)
class ShardedSteps:
    """The steps of one model, optimizer and mesh.

    Attributes:
      sharded: the model on its mesh.
      optimizer: makes the states.
      micro_batches: parts that a batch's rows are taken in, one after the other.
      clip: half-width of the ratio's trust region.
      temperature: at which batches of PPO were sampled, > 0.
      value_clip: half-width of the critic's trust region, or None.
      offload: keep the optimizer state in host memory between the updates of its network.
    """

    sharded: ShardedModel
    optimizer: optax.GradientTransformation
    micro_batches: int = 1
    clip: float = 0.2
    temperature: float = 1.0
    value_clip: float | None = None
    offload: bool = False

    def abstract_state(self, network: Network) -> TrainState:
        """Shapes and dtypes of a train state; computes nothing."""

        def make() -> TrainState:
            params = model.init_params(self.sharded.config, jax.random.key(0))
            if network == "critic":
                params = model.init_value_params(self.sharded.config, params)
            return create(params, self.optimizer)

        state: TrainState = jax.eval_shape(make)
        return state

    def abstract_batch(self, rows: int, length: int) -> PackedBatch:
        """Shapes and dtypes of a batch of PPO."""

        def of(dtype: Any) -> Any:
            struct: Any = jax.ShapeDtypeStruct
            return struct((rows, length), dtype)

        ints = {n: of(jnp.int32) for n in ("token_ids", "segment_ids", "position_ids", "turn_ids")}
        return PackedBatch(
            **ints,
            acted=of(jnp.bool_),
            loss_weight=of(jnp.float32),
            logprob=of(jnp.float32),
            columns={name: of(jnp.float32) for name in PPO_COLUMNS},
        )

    def state_shardings(self, state: TrainState) -> TrainState:
        """Where the leaves of a state lie; with `offload` the optimizer's in host memory.

        Raises:
          ValueError: as `sharding.rules.specs`.
        """
        found = self.sharded.specs(state)
        kind = "pinned_host" if self.offload else None
        mesh = self.sharded.mesh
        return TrainState(
            step=shardings(mesh, found.step),
            params=shardings(mesh, found.params),
            opt_state=jax.tree.map(
                lambda spec, leaf: NamedSharding(
                    mesh, spec, memory_kind=kind if leaf.ndim else None
                ),
                found.opt_state,
                state.opt_state,
                is_leaf=lambda x: isinstance(x, P),
            ),
        )

    def batch_shardings(self, batch: PackedBatch) -> PackedBatch:
        """Where a batch lies: rows over data and fsdp, tokens over sequence."""
        where = NamedSharding(self.sharded.mesh, ROWS)
        found: PackedBatch = jax.tree.map(lambda _: where, batch)
        return found

    def jitted(
        self,
        step: Step,
        states: tuple[TrainState, ...],
        batch: PackedBatch,
    ) -> Any:
        """A step as a jitted function that donates its states.

        sft, actor: (actor, batch, rate) -> (actor, metrics); critic: (critic, batch, rate) ->
        (critic, metrics); ppo: (actor, critic, batch, actor rate, critic rate) ->
        (actor, critic, metrics), its metrics named "actor/..." and "critic/...".

        Args:
          step: which one.
          states: of the networks that it trains, or their shapes.
          batch: a batch, or its shapes.

        Returns:
          The jitted function.

        Raises:
          ValueError: for rows, tokens, heads or parameters that the mesh does not divide, and
            rows that do not divide into the micro-batches.
        """
        rows, length = batch.token_ids.shape
        if rows % self.micro_batches:
            raise ValueError(f"{rows} rows do not divide into {self.micro_batches} micro-batches")
        self.sharded.check(rows // self.micro_batches, length)
        functions: dict[str, Callable[..., Any]] = {
            "sft": self._sft,
            "critic": self._critic,
            "actor": self._actor,
            "ppo": self._ppo,
        }
        placed = tuple(self.state_shardings(state) for state in states)
        number = NamedSharding(self.sharded.mesh, P())
        return jax.jit(
            functions[step],
            in_shardings=(*placed, self.batch_shardings(batch), *([number] * len(states))),
            out_shardings=(*placed, None),
            donate_argnums=tuple(range(len(states))),
        )

    # --- the steps ----------------------------------------------------------------------------

    def _sft(
        self, state: TrainState, batch: PackedBatch, rate: jax.Array
    ) -> tuple[TrainState, Metrics]:
        weight = batch.loss_weight / jnp.maximum(jnp.sum(batch.loss_weight), 1)

        def loss_fn(params: Any, part: tuple[PackedBatch, jax.Array]) -> tuple[jax.Array, Metrics]:
            rows, weight = part
            loss = cross_entropy(
                self.sharded,
                params,
                *_inputs(rows),
                to_predictor(rows.token_ids, rows.segment_ids),
                to_predictor(weight, rows.segment_ids),
            )
            return loss, {}

        loss, _, gradients = self._accumulate(loss_fn, state.params, (batch, weight))
        return self._update(state, gradients, rate, {"loss": loss})

    def _actor(
        self, state: TrainState, batch: PackedBatch, rate: jax.Array
    ) -> tuple[TrainState, Metrics]:
        n_tokens = jnp.sum(batch.acted)

        def loss_fn(params: Any, rows: PackedBatch) -> tuple[jax.Array, Metrics]:
            target = to_predictor(rows.token_ids, rows.segment_ids)
            logprob, entropy = logprobs(
                self.sharded, params, *_inputs(rows), target, temperature=self.temperature
            )
            loss, metrics = losses.ppo_clip(
                to_token(logprob, rows.segment_ids),
                rows.logprob,
                rows.columns["advantage_t"],
                rows.acted,
                n_tokens=n_tokens,
                clip_low=self.clip,
                clip_high=self.clip,
            )
            entropy_t = to_token(entropy, rows.segment_ids)
            metrics["entropy"] = losses.masked_sum(entropy_t, rows.acted, n_tokens=n_tokens)
            return loss, metrics

        loss, metrics, gradients = self._accumulate(loss_fn, state.params, batch)
        summed = jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics)
        return self._update(state, gradients, rate, {**summed, "loss": loss})

    def _critic(
        self, state: TrainState, batch: PackedBatch, rate: jax.Array
    ) -> tuple[TrainState, Metrics]:
        n_tokens = jnp.sum(batch.acted)

        def loss_fn(params: Any, rows: PackedBatch) -> tuple[jax.Array, Metrics]:
            value_t = to_token(values(self.sharded, params, *_inputs(rows)), rows.segment_ids)
            return_t = rows.columns["return_t"]
            loss = losses.value_mse(
                value_t,
                return_t,
                rows.acted,
                n_tokens=n_tokens,
                old_value_t=rows.columns["value_t"],
                clip=self.value_clip,
            )
            return loss, {"value": value_t, "return": return_t, "acted": rows.acted}

        loss, seen, gradients = self._accumulate(loss_fn, state.params, batch)
        explained = losses.explained_variance(seen["value"], seen["return"], seen["acted"])
        metrics = {"loss": loss, "explained_variance": explained}
        return self._update(state, gradients, rate, metrics)

    def _ppo(
        self,
        actor: TrainState,
        critic: TrainState,
        batch: PackedBatch,
        actor_rate: jax.Array,
        critic_rate: jax.Array,
    ) -> tuple[TrainState, TrainState, Metrics]:
        actor, of_actor = self._actor(actor, batch, actor_rate)
        # One network after the other: their activations and gradients need not coexist.
        critic, batch, _ = lax.optimization_barrier((critic, batch, of_actor["grad_norm"]))
        critic, of_critic = self._critic(critic, batch, critic_rate)
        metrics = {f"actor/{name}": value for name, value in of_actor.items()}
        metrics |= {f"critic/{name}": value for name, value in of_critic.items()}
        return actor, critic, metrics

    # --- their parts --------------------------------------------------------------------------

    def _accumulate(
        self, loss_fn: Callable[[Any, Any], tuple[jax.Array, Metrics]], params: Any, batch: Any
    ) -> tuple[jax.Array, Metrics, Any]:
        """Loss and gradients summed over micro-batches; auxiliary outputs stacked."""
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        if self.micro_batches == 1:
            (loss, aux), gradients = grad(params, batch)
            return loss, jax.tree.map(lambda x: x[None], aux), gradients
        parts = jax.tree.map(self._split, batch)

        def body(carry: tuple[jax.Array, Any], part: Any) -> tuple[tuple[jax.Array, Any], Metrics]:
            (loss, aux), gradients = grad(params, part)
            # Else the compiler sums the head's gradient whole, and cuts it after the loop.
            gradients = lax.optimization_barrier(gradients)
            return (carry[0] + loss, jax.tree.map(jnp.add, carry[1], gradients)), aux

        zeros = jax.tree.map(jnp.zeros_like, params)
        (loss, gradients), aux = lax.scan(body, (jnp.zeros(()), zeros), parts)
        return loss, aux, gradients

    def _split(self, x: jax.Array) -> jax.Array:
        """[R, L] -> [M, R / M, L]; each device cuts the rows it has, so nothing moves."""
        mesh = self.sharded.mesh
        ways = mesh.shape["data"] * mesh.shape["fsdp"]
        rows, length = x.shape
        x = x.reshape(ways, self.micro_batches, rows // ways // self.micro_batches, length)
        x = jnp.moveaxis(x, 1, 0).reshape(self.micro_batches, rows // self.micro_batches, length)
        parts: jax.Array = lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, *ROWS)))
        return parts

    def _update(
        self, state: TrainState, gradients: Any, rate: jax.Array, metrics: Metrics
    ) -> tuple[TrainState, Metrics]:
        if self.offload:
            on_device = shardings(self.sharded.mesh, self.sharded.specs(state.opt_state))
            fetched = jax.device_put(state.opt_state, on_device)
            state = TrainState(state.step, state.params, fetched)
        new = apply_gradients(state, gradients, optimizer=self.optimizer, learning_rate=rate)
        return new, {**metrics, "grad_norm": optax.global_norm(gradients)}


def _inputs(rows: PackedBatch) -> tuple[Any, Any, Any]:
    return rows.token_ids, rows.segment_ids, rows.position_ids
