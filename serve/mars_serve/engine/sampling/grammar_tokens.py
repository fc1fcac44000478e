"""The model's tokenizer as grammars see it: no text and no name in a grammar is a control token.

llguidance takes a text that a grammar forces for the control token of that name, which its parser
then refuses. A client's grammar could also name control tokens outright.
"""

import json
import secrets
from collections.abc import Collection
from typing import Any

_NAME_BYTES = 12


def with_secret_names(serialized: str, control: Collection[int]) -> str:
    """Return a tokenizer with other, secret names for its control tokens, whose ids are given.

    The tokenizer is JSON in the form of the library tokenizers.
    """
    content = json.loads(serialized)
    names = {
        token["content"]: f"<{secrets.token_hex(_NAME_BYTES)}>"
        for token in content["added_tokens"]
        if token["id"] in control
    }
    for token in content["added_tokens"]:
        if token["content"] in names:
            # llguidance reads no text as a special token, and takes it back as one
            token.update(content=names[token["content"]], special=True)
    _rename(content["model"], names)
    return json.dumps(content, ensure_ascii=False)


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename tokens in a model's own vocabulary, except for those that its merges make."""
    merged = {
        "".join(merge.split(" ") if isinstance(merge, str) else merge)
        for merge in model.get("merges") or ()
    }
    known = {old: new for old, new in names.items() if old not in merged}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {known.get(name, name): token for name, token in vocabulary.items()}
    else:
        model["vocab"] = [[known.get(name, name), score] for name, score in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = known.get(model["unk_token"], model["unk_token"])
