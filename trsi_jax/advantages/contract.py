"""The contract of what enters an estimator, checked on the host where a batch is made."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def check_tokens(
    reward_t: npt.ArrayLike,
    acted_t: npt.ArrayLike,
    turn_t: npt.ArrayLike,
    *,
    where: str = "sequence",
) -> None:
    """Refuse what a recursion over action tokens would silently drop, truncate or spread.

    Args:
      reward_t: [T] float, finite, 0 off the mask.
      acted_t: [T] bool, true where the policy sampled the token.
      turn_t: [T] int, non-decreasing over the action tokens.
      where: name of the trajectory for the message.

    Raises:
      ValueError: that names `where`, the position and the value: a shape that does not fit, an
        integer reward array, a reward that is not finite, a reward off the mask, a turn that goes
        backwards.
    """
    reward, acted, turn = (np.asarray(x) for x in (reward_t, acted_t, turn_t))
    if not (reward.ndim == 1 and reward.shape == acted.shape == turn.shape):
        raise ValueError(
            f"{where}: need equal shapes [T], got reward {reward.shape}, acted {acted.shape}, "
            f"turn {turn.shape}"
        )
    if not np.issubdtype(reward.dtype, np.floating):
        raise ValueError(
            f"{where}: rewards must be floating point, got {reward.dtype}; "
            "an integer array truncates fractions"
        )
    if acted.dtype != np.bool_:
        raise ValueError(f"{where}: acted must be bool, got {acted.dtype}")
    if not np.issubdtype(turn.dtype, np.integer):
        raise ValueError(f"{where}: turns must be integers, got {turn.dtype}")
    _refuse(where, reward, ~np.isfinite(reward), "is not finite")
    _refuse(where, reward, ~acted & (reward != 0), "stands on a token the policy did not sample")
    index = np.flatnonzero(acted)
    back = np.flatnonzero(np.diff(turn[index]) < 0)
    if back.size:
        t, before = index[back[0] + 1], index[back[0]]
        raise ValueError(
            f"{where}: turns go backwards at token {t}: {turn[t]} after {turn[before]}"
        )


def _refuse(
    where: str, reward: npt.NDArray[np.floating], bad: npt.NDArray[np.bool_], what: str
) -> None:
    if bad.any():
        t = int(np.argmax(bad))
        raise ValueError(f"{where}: reward {reward[t]} at token {t} {what}")
