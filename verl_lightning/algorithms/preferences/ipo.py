"""Identity preference optimization (IPO): a squared distance to a margin, which does not overfit sure preferences."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_positive
from verl_lightning.algorithms.preferences.base import ExampleValues, PreferenceLoss, Responses, chosen, rejected


def ipo_loss(
    chosen_log_ratios: Float[Tensor, " pairs"], rejected_log_ratios: Float[Tensor, " pairs"], *, beta: float
) -> Float[Tensor, " pairs"]:
    """Squared distance of the difference of log-ratios to a margin, per pair.

    Computes::

        loss = (chosen_log_ratio - rejected_log_ratio - 1 / (2 * beta))**2

    Args:
        chosen_log_ratios: Log-probs of the chosen responses under the policy less those under the reference, in nats a
            token: means over tokens, else the margin would mean less to long responses.
        rejected_log_ratios: The same of the rejected responses.
        beta: The regularisation, the paper's tau, in 1/nats: half the reciprocal of the margin.

    Returns:
        The loss of each pair.

    References:
        Azar et al., *A General Theoretical Paradigm to Understand Learning from Human Preferences*, 2023, eq. 17.
        https://arxiv.org/abs/2310.12036
    """
    return (chosen_log_ratios - rejected_log_ratios - 1 / (2 * beta)).square()


class IPO(PreferenceLoss):
    """Identity preference optimization: draws the difference of mean log-ratios to a margin, and not beyond it.

    Azar et al., 2023, https://arxiv.org/abs/2310.12036. Log-ratios are means over a response's tokens, as in the
    authors' experiments.

    Args:
        beta: The regularisation, the paper's tau, in 1/nats: the margin is ``1 / (2 * beta)`` nats a token.
    """

    def __init__(self, beta: float = 0.1) -> None:
        check_positive("beta", beta)
        self.beta = beta

    def __call__(self, responses: Responses) -> tuple[ExampleValues, dict[str, ExampleValues]]:
        """The loss of each pair."""
        ratios = responses.log_ratios / responses.lengths
        return ipo_loss(chosen(ratios), rejected(ratios), beta=self.beta), {}
