"""The tokenizer of a checkpoint or an adapter, and its mask token.

Imports no Ray or HTTP library.
"""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_platform.checkpoint.metadata import CHAT_TEMPLATE_FILE, MASK_TOKEN
from mars_platform.config import read_json

REMEDY = "copy the checkpoint's file again"


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a checkpoint directory.

    Raises:
        ValueError: the tokenizer needs code of its own, which is never run.
    """
    # left unset, transformers asks on a terminal whether to run the checkpoint's code
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path, trust_remote_code=False
    )
    file = Path(path) / CHAT_TEMPLATE_FILE
    if tokenizer.chat_template is None and file.is_file():
        template = read_json(file, REMEDY).get("chat_template")
        tokenizer.chat_template = template
    return tokenizer


def read_end_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids at which an output of a checkpoint directory's model ends.

    These are the tokenizer's and those of ``generation_config.json``, for which ``config.json``
    stands in as in transformers.
    """
    files = [Path(path) / name for name in ("generation_config.json", "config.json")]
    file = next((file for file in files if file.is_file()), None)
    listed = None if file is None else read_json(file, REMEDY).get("eos_token_id")
    own = tokenizer.eos_token_id
    given = listed if isinstance(listed, list) else [listed]
    return frozenset(each for each in [*given, own] if each is not None)


def name_mask_token(tokenizer: PreTrainedTokenizerBase) -> tuple[int, bool]:
    """Add the ``<|mask|>`` token to a tokenizer alone, unless it has it.

    Returns:
        The token's id, and whether it is new.
    """
    present = mask_id(tokenizer)
    if present is not None:
        return present, False
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [MASK_TOKEN]}, replace_extra_special_tokens=False
    )
    added = mask_id(tokenizer)
    assert added is not None
    return added, True


def mask_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the ``<|mask|>`` token; None if the tokenizer has none."""
    found = tokenizer.get_vocab().get(MASK_TOKEN)
    return None if found is None else int(found)
