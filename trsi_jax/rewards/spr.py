"""Success-prioritised reward: any strict success beats any failure, in any family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.records import Verdict
from trsi_jax.rewards.fdr import Real, verdict_fdr


def spr(
    strict_success: bool | npt.NDArray[np.bool_],
    r_fdr: Real,
    *,
    success_reward: float = 1.0,
    beta: float,
    cap: float,
) -> Any:
    """r_spr = S R_success + (1 - S) min(beta r_fdr, cap).

    Args:
      strict_success: S, scalar or array of bool.
      r_fdr: family dense reward, >= 0.
      success_reward: R_success, >= 1.
      beta: share of the dense reward that a failure keeps, in [0, 1).
      cap: most that a failure can get, in [0, 1).

    Returns:
      A float, or a float64 array of the broadcast shape.

    Raises:
      ValueError: for a setting or a reward outside its range.

    Source: arXiv 2610.22192 describes it in words and in its audit; the formula is our reading.
    """
    if not (0.0 <= beta < 1.0 and 0.0 <= cap < 1.0 <= success_reward < np.inf):
        raise ValueError(
            "need 0 <= beta < 1 and 0 <= cap < 1 <= success_reward, got "
            f"beta={beta}, cap={cap}, success_reward={success_reward}"
        )
    success = np.asarray(strict_success)
    dense = np.asarray(r_fdr, np.float64)
    if success.dtype != np.bool_:
        raise ValueError(f"strict_success must be bool, got {success.dtype}")
    if not np.all((dense >= 0) & np.isfinite(dense)):
        raise ValueError(f"r_fdr must be finite and >= 0, got {np.min(dense)}")
    reward = np.where(success, success_reward, np.minimum(beta * dense, cap))
    return float(reward) if reward.ndim == 0 else reward


def verdict_spr(
    verdict: Verdict,
    family: str,
    medians: Mapping[str, float],
    *,
    success_reward: float = 1.0,
    beta: float,
    cap: float,
) -> float:
    """`spr` of one verdict. Raises ValueError like `spr` and `verdict_fdr`."""
    return float(
        spr(
            verdict.strict_success,
            verdict_fdr(verdict, family, medians),
            success_reward=success_reward,
            beta=beta,
            cap=cap,
        )
    )
