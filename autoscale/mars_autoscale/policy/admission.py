"""How long a request would wait at a replica: what refusing those that would come too late goes by.

Knows no clock, no queue and no service class.
"""

from __future__ import annotations


def estimated_wait_s(
    num_ahead: float,
    *,
    mean_output_tokens: float,
    mean_prompt_tokens: float,
    tokens_per_s: float,
    prefill_tokens_per_s: float,
) -> float:
    """Seconds until a replica has worked off what is served before a request.

    Args:
        num_ahead: requests that wait there and are served first, those of the same or a higher
            class; at least 0.
        mean_output_tokens: that such a request decodes, at least 0.
        mean_prompt_tokens: that it has computed before, at least 0.
        tokens_per_s: that the replica decodes with all slots taken, above 0.
        prefill_tokens_per_s: prompt tokens a second, above 0.
    """
    assert tokens_per_s > 0, "a replica decodes"
    assert prefill_tokens_per_s > 0, "a replica computes prompts"
    decode_s = mean_output_tokens / tokens_per_s
    return num_ahead * (decode_s + mean_prompt_tokens / prefill_tokens_per_s)
