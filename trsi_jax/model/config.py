"""Shapes and numerics of a model, and the presets by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

LayerKind = Literal["linear", "full"]


@dataclass(frozen=True, slots=True)
class InitConfig:
    """How parameters are drawn when a model starts from scratch; a checkpoint overwrites them.

    Attributes:
      embed_std: standard deviation of the token embedding.
      head_from_embedding: start the untied head as the transposed embedding, rescaled to
        standard deviation hidden_size^-1/2, so that copying a token is learnable at once.
      output_scale: factor on the fan-in draw of the projections into the residual stream.
      copy_scale: start the output projection of every mixer as this multiple of its transposed
        value projection, so that what a mixer reads it says; None draws it like the others.
      role_conv: start the short convolution so that a key is the previous token and a query or
        a value is the current one, plus noise of standard deviation `conv_std`.
      step_min, step_max: range of the log-uniform step size softplus(dt_bias).
      decay_min, decay_max: range of the uniform decay rate exp(A_log).
    """

    embed_std: float = 0.02
    head_from_embedding: bool = False
    output_scale: float = 1.0
    copy_scale: float | None = None
    role_conv: bool = False
    conv_std: float = 0.5
    step_min: float = 0.001
    step_max: float = 0.1
    decay_min: float = 1.0
    decay_max: float = 16.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the Qwen3.8 (`qwen3_5`) or the dense Qwen3 family; hashable, hence static.

    Attributes:
      layer_pattern: kinds of the layers of one group; the depth is a whole number of groups.
      num_heads, num_kv_heads, head_dim: of gated or plain full attention.
      rotary_dim: leading dimensions of a head that are rotated.
      gated_attention: whether the query projection also yields a sigmoid output gate.
      norm_offset: o in the norms' y = x / rms(x) * (o + w).
      gdn_key_heads, gdn_value_heads, gdn_key_dim, gdn_value_dim: of the gated delta net.
      conv_width: taps of its causal depthwise convolution.
      gdn_chunk: longest chunk of the chunked delta rule.
      gdn_solver: "solve" (substitution by blocks) or "ladder" (block inverse).
      compute_dtype: dtype of the projections and the residual stream.
      accum_dtype: dtype of norms, softmax, decay, the recurrent state and the logits.
      param_dtype: dtype that parameters are made and imported in; norm scales and the decay's
        parameters are held in float32 at least.
      remat: recompute each group of layers in the backward pass.
      init: the from-scratch initialiser.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    layer_pattern: tuple[LayerKind, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gated_attention: bool
    norm_offset: float
    tie_embeddings: bool
    max_position: int
    gdn_key_heads: int = 0
    gdn_value_heads: int = 0
    gdn_key_dim: int = 0
    gdn_value_dim: int = 0
    conv_width: int = 4
    norm_eps: float = 1e-6
    gdn_chunk: int = 64
    gdn_solver: Literal["solve", "ladder"] = "solve"
    compute_dtype: str = "float32"
    accum_dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False
    init: InitConfig = field(default_factory=InitConfig)

    def __post_init__(self) -> None:
        def need(ok: bool, message: str) -> None:
            if not ok:
                raise ValueError(f"model {self.name!r}: {message}")

        for kind in self.layer_pattern:
            need(kind in ("linear", "full"), f"layer kind {kind!r} is not 'linear' or 'full'")
        linear = self.layer_pattern.count("linear")
        need(
            self.layer_pattern == ("linear",) * linear + ("full",),
            f"layer_pattern {self.layer_pattern} is not some 'linear' and then one 'full'",
        )
        need(
            self.num_layers > 0 and self.num_layers % len(self.layer_pattern) == 0,
            f"num_layers {self.num_layers} is no multiple of the pattern's "
            f"{len(self.layer_pattern)} layers",
        )
        need(self.vocab_size > 1, f"vocab_size must be at least 2, got {self.vocab_size}")
        need(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}",
        )
        need(
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"rotary_dim {self.rotary_dim} is not even and in (0, head_dim={self.head_dim}]",
        )
        need(
            not self.uses_gdn
            or (
                self.gdn_key_heads > 0
                and self.gdn_value_heads % self.gdn_key_heads == 0
                and self.gdn_value_heads > 0
                and self.gdn_key_dim > 0
                and self.gdn_value_dim > 0
            ),
            f"gdn_value_heads {self.gdn_value_heads} is no positive multiple of gdn_key_heads "
            f"{self.gdn_key_heads}, or a GDN head dimension is not positive",
        )
        need(self.gdn_chunk > 0, f"gdn_chunk must be positive, got {self.gdn_chunk}")
        need(
            self.gdn_solver in ("solve", "ladder"),
            f"gdn_solver {self.gdn_solver!r} is not 'solve' or 'ladder'",
        )

    @classmethod
    def from_hf(cls, directory: Path) -> ModelConfig:
        """The model of a Hugging Face directory (`config.json` of `qwen3_5` or dense `qwen3`).

        Args:
          directory: as published or saved by `transformers`; weights are not looked at.

        Returns:
          The configuration, named after the directory, with rematerialisation on; parameters are
          float32 (of a float64 file float64) and the compute dtype is the file's;
          `dataclasses.replace` changes either.

        Raises:
          UserError: names the file, the key and its value where the model would not be ours.
        """
        from trsi_jax.model.hf.description import model_config

        return model_config(directory)

    @property
    def vector_dtype(self) -> str:
        """Dtype of norm scales, decay rates and step sizes: rounding these to 16 bits hurts."""
        return "float32" if self.param_dtype in ("bfloat16", "float16") else self.param_dtype

    @property
    def uses_gdn(self) -> bool:
        """Whether some layer is a gated delta net."""
        return "linear" in self.layer_pattern

    @property
    def linear_per_group(self) -> int:
        """Gated-delta-net layers of one group."""
        return self.layer_pattern.count("linear")

    @property
    def num_groups(self) -> int:
        """Repetitions of `layer_pattern`."""
        return self.num_layers // len(self.layer_pattern)

    @property
    def gdn_channels(self) -> int:
        """Channels of the short convolution: queries, keys, values."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim


def preset(name: str, *, vocab_size: int | None = None) -> ModelConfig:
    """The configuration of a named model.

    Args:
      name: one of `preset_names()`.
      vocab_size: replaces the preset's vocabulary; "tiny" has none of its own and needs it.

    Returns:
      The configuration.

    Raises:
      ValueError: for an unknown name (the message lists the known ones), or for "tiny" without
        `vocab_size`.
    """
    if name not in _PRESETS:
        raise ValueError(f"unknown model preset {name!r}; known: {', '.join(preset_names())}")
    if name == "tiny" and vocab_size is None:
        raise ValueError('preset "tiny" takes the size of its tokenizer: pass vocab_size')
    config = _PRESETS[name]()
    return config if vocab_size is None else replace(config, vocab_size=vocab_size)


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows, sorted."""
    return tuple(sorted(_PRESETS))


def _tiny() -> ModelConfig:
    return ModelConfig(
        name="tiny",
        vocab_size=256,
        hidden_size=128,
        num_layers=4,
        intermediate_size=256,
        layer_pattern=("linear", "linear", "linear", "full"),
        num_heads=4,
        num_kv_heads=1,
        head_dim=32,
        rotary_dim=8,
        rope_theta=1e4,
        gated_attention=True,
        norm_offset=1.0,
        tie_embeddings=False,
        max_position=4096,
        gdn_key_heads=2,
        gdn_value_heads=4,
        gdn_key_dim=32,
        gdn_value_dim=32,
        gdn_chunk=16,
        gdn_solver="ladder",
        init=InitConfig(
            embed_std=0.1,
            head_from_embedding=True,
            output_scale=0.3,
            copy_scale=0.5,
            role_conv=True,
            conv_std=0.1,
            step_min=0.001,
            step_max=0.03,
            decay_min=0.5,
            decay_max=8.0,
        ),
    )


def _qwen3_8_27b() -> ModelConfig:
    return ModelConfig(
        name="qwen3.8-27b",
        vocab_size=248_320,
        hidden_size=5120,
        num_layers=64,
        intermediate_size=17_408,
        layer_pattern=("linear", "linear", "linear", "full"),
        num_heads=24,
        num_kv_heads=4,
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        gated_attention=True,
        norm_offset=1.0,
        tie_embeddings=False,
        max_position=262_144,
        gdn_key_heads=16,
        gdn_value_heads=48,
        gdn_key_dim=128,
        gdn_value_dim=128,
        compute_dtype="bfloat16",
        remat=True,
    )


def _qwen3(
    size: str, hidden: int, layers: int, intermediate: int, heads: int, *, tied: bool
) -> Callable[[], ModelConfig]:
    def make() -> ModelConfig:
        return ModelConfig(
            name=f"qwen3-{size}",
            vocab_size=151_936,
            hidden_size=hidden,
            num_layers=layers,
            intermediate_size=intermediate,
            layer_pattern=("full",),
            num_heads=heads,
            num_kv_heads=8,
            head_dim=128,
            rotary_dim=128,
            rope_theta=1e6,
            gated_attention=False,
            norm_offset=0.0,
            tie_embeddings=tied,
            max_position=40_960,
            compute_dtype="bfloat16",
            remat=True,
        )

    return make


_PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "tiny": _tiny,
    "qwen3.8-27b": _qwen3_8_27b,
    "qwen3-0.6b": _qwen3("0.6b", 1024, 28, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3("1.7b", 2048, 28, 6144, 16, tied=True),
    "qwen3-4b": _qwen3("4b", 2560, 36, 9728, 32, tied=True),
    "qwen3-8b": _qwen3("8b", 4096, 36, 12_288, 32, tied=False),
    "qwen3-14b": _qwen3("14b", 5120, 40, 17_408, 40, tied=False),
    "qwen3-32b": _qwen3("32b", 5120, 64, 25_600, 64, tied=False),
}
