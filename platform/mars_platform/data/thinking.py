"""Finds the tokens between which a model thinks before it answers.

Source: the chat templates and tokenizers of DeepSeek-R1, QwQ and Qwen3; vLLM's reasoning parsers.
"""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mars_platform.data.prompt_encoding import control_tokens
from mars_platform.data.template_messages import THINKING_BEGIN, THINKING_END


@dataclass(frozen=True)
class ThinkingTokens:
    """Ids of the tokens that begin and end a model's thinking."""

    begin: int
    end: int


def find_thinking_tokens(
    tokenizer: PreTrainedTokenizerBase, *, mentioned_only: bool
) -> ThinkingTokens | None:
    """Return the tokens of a model that marks its thinking; None if it has none.

    Begin and end must be single tokens: a marker spelled in text cannot be told from text about
    markers. With ``mentioned_only``, one of them has to be a control token, as it is if the chat
    template mentions it; some tokenizers have both for the sake of another model of the family.
    """
    ids = {token.content: key for key, token in tokenizer.added_tokens_decoder.items()}
    if THINKING_BEGIN not in ids or THINKING_END not in ids:
        return None
    found = ThinkingTokens(ids[THINKING_BEGIN], ids[THINKING_END])
    if mentioned_only and control_tokens(tokenizer).keys().isdisjoint({found.begin, found.end}):
        return None
    return found
