"""Per-token estimators of the KL divergence from a reference, and the controller of its coefficient."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

KLFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From log-probs of policy and reference, and the response mask, to a KL of each token in nats, 0 where masked."""


def kl_k1(
    log_probs: Float[Tensor, "batch response"],
    ref_log_probs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Unbiased estimator of ``KL(policy || reference)`` from tokens that the policy drew.

    Computes::

        k1_t = log_probs_t - ref_log_probs_t

    Its value is right on average; its gradient is 0 on average, so never minimise it.

    Args:
        log_probs: Of the response tokens under the policy, in nats.
        ref_log_probs: Of the same tokens under the reference, in nats. Constant.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        ``k1_t`` in nats on response tokens, 0 elsewhere. Negative on some tokens.

    References:
        Schulman, *Approximating KL Divergence*, 2020. http://joschu.net/blog/kl-approx.html
    """
    return torch.where(response_mask, log_probs - ref_log_probs, 0.0)


def kl_abs(
    log_probs: Float[Tensor, "batch response"],
    ref_log_probs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Distance of the log-probabilities; never negative, biased in value and in gradient.

    Computes::

        abs(log_probs_t - ref_log_probs_t)

    Args:
        log_probs: Of the response tokens under the policy, in nats.
        ref_log_probs: Of the same tokens under the reference, in nats. Constant.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        In nats on response tokens, 0 elsewhere.
    """
    return kl_k1(log_probs, ref_log_probs, response_mask).abs()


def kl_k2(
    log_probs: Float[Tensor, "batch response"],
    ref_log_probs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Half the squared log-ratio: biased in value, but its gradient is the KL's own on tokens that the policy drew.

    Computes::

        k2_t = (log_probs_t - ref_log_probs_t)**2 / 2

    Args:
        log_probs: Of the response tokens under the policy, in nats.
        ref_log_probs: Of the same tokens under the reference, in nats. Constant.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        ``k2_t`` on response tokens, 0 elsewhere; never negative.

    References:
        Schulman, *Approximating KL Divergence*, 2020. http://joschu.net/blog/kl-approx.html
    """
    return kl_k1(log_probs, ref_log_probs, response_mask).square() / 2


def kl_k3(
    log_probs: Float[Tensor, "batch response"],
    ref_log_probs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Unbiased estimator of the KL with less variance than `kl_k1`; its gradient is that of the reverse direction.

    With ``x_t = ref_log_probs_t - log_probs_t``, clamped to 20 nats either way::

        k3_t = clamp(exp(x_t) - x_t - 1, max=10)

    Args:
        log_probs: Of the response tokens under the policy, in nats.
        ref_log_probs: Of the same tokens under the reference, in nats. Constant.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        ``k3_t`` in nats on response tokens, 0 elsewhere; from 0 to 10.

    References:
        Schulman, *Approximating KL Divergence*, 2020. http://joschu.net/blog/kl-approx.html
    """
    x = -kl_k1(log_probs, ref_log_probs, response_mask).clamp(-20, 20)
    return (x.exp() - x - 1).clamp(max=10)


def straight_through(estimator: KLFunction) -> KLFunction:
    """An estimator with its own value and the gradient of `kl_k2`, which is the KL's own on average; what to minimise.

    Args:
        estimator: Any of the above.

    References:
        Tang & Munos, *On a few pitfalls in KL divergence gradient estimation for RL*, 2025.
        https://arxiv.org/abs/2506.09477
    """

    def kl(
        log_probs: Float[Tensor, "batch response"],
        ref_log_probs: Float[Tensor, "batch response"],
        response_mask: Bool[Tensor, "batch response"],
    ) -> Float[Tensor, "batch response"]:
        inputs = (log_probs, ref_log_probs, response_mask)
        value, surrogate = estimator(*inputs).detach(), kl_k2(*inputs)
        # In this order the value is exact: the surrogate cancels to 0 before it meets the value.
        return value + (surrogate - surrogate.detach())

    return kl


KL_ESTIMATORS: Mapping[str, KLFunction] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "abs": kl_abs,
    "k1_straight_through": straight_through(kl_k1),
    "k3_straight_through": straight_through(kl_k3),
    "abs_straight_through": straight_through(kl_abs),
}
"""All of them, by the name that configurations give them."""


def adaptive_kl_coef(coef: float, kl: float, *, target: float, num_samples: int, horizon: int) -> float:
    """The next coefficient of a KL penalty that steers the KL towards a target.

    Computes::

        coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

    Args:
        coef: The present coefficient.
        kl: Mean KL that was just measured, in nats.
        target: Where the KL should be, in nats.
        num_samples: Responses since the last change of the coefficient.
        horizon: Responses over which the coefficient changes by at most 20 %.

    Returns:
        The next coefficient.

    References:
        Ziegler et al., *Fine-Tuning Language Models from Human Preferences*, 2019, sec. 2.2.
        https://arxiv.org/abs/1909.08593
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)
