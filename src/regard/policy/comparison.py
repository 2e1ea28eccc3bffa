"""Compare the predictions of two runs of a text."""

from __future__ import annotations

from typing import Any

# Rows of logits that are compared together.
ROWS = 512

Tensor = Any  # the types of torch are not followed


def compare_logits(plain: Tensor, logits: Tensor, ids: Tensor) -> dict[str, float]:
    """Compare two runs of a text.

    Args:
        plain: Logits without the policy, (n, vocabulary).
        logits: Logits with it, alike.
        ids: The tokens, (n,).

    Returns:
        `kl`, the mean over tokens of the KL divergence of the prediction, in nats, and `kl_max`, the largest;
        `agreement`, the share of tokens with the same most likely prediction; `loss` and `policy_loss`, the mean
        cross-entropy of the next token, in nats, NaN for a text of one token.
    """
    import torch

    divergences, agrees, losses = [], [], []
    targets = torch.cat([ids[1:], ids[:1]])
    for start in range(0, len(ids), ROWS):
        rows = slice(start, start + ROWS)
        expected, found = (logs[rows].detach().float().log_softmax(-1) for logs in (plain, logits))
        divergences.append((expected.exp() * (expected - found)).sum(-1).double().clamp(min=0))
        agrees.append(expected.argmax(-1) == found.argmax(-1))
        picked = targets[rows, None]
        losses.append(-torch.stack([logs.gather(1, picked)[:, 0] for logs in (expected, found)]).double())
    kl, agreement, loss = torch.cat(divergences), torch.cat(agrees), torch.cat(losses, 1)[:, : len(ids) - 1]
    return {
        "kl": float(kl.mean()),
        "kl_max": float(kl.max()),
        "agreement": float(agreement.double().mean()),
        "loss": float(loss[0].mean()) if len(ids) > 1 else float("nan"),
        "policy_loss": float(loss[1].mean()) if len(ids) > 1 else float("nan"),
    }
