"""Estimates how long a request would wait, for refusing those that would come too late."""

from __future__ import annotations


def estimated_wait_s(
    num_ahead: float,
    *,
    mean_output_tokens: float,
    mean_prompt_tokens: float,
    tokens_per_s: float,
    prefill_tokens_per_s: float,
) -> float:
    """Estimate the seconds until a replica has worked off the requests ahead of a new one.

    Args:
        num_ahead: waiting requests that are served first, those of the same or a higher tier; at
            least 0.
        mean_output_tokens: tokens that such a request decodes on average, at least 0.
        mean_prompt_tokens: prompt tokens that it computes on average, at least 0.
        tokens_per_s: the replica's decoding speed with a full batch, above 0.
        prefill_tokens_per_s: the replica's prompt tokens per second, above 0.
    """
    assert tokens_per_s > 0, "a replica decodes"
    assert prefill_tokens_per_s > 0, "a replica computes prompts"
    decode_s = mean_output_tokens / tokens_per_s
    return num_ahead * (decode_s + mean_prompt_tokens / prefill_tokens_per_s)
