"""Tokenizes prompts so that text from clients never becomes a control token.

A chat template puts its own control tokens and the clients' texts into one string. Before it runs,
the characters at which a control token could begin or end are replaced in the clients' texts, so
every control token in the result is the template's. Those get secret names, the replaced characters
come back, and a tokenizer that knows the control tokens by these names alone encodes the whole.
Ordinary text is divided and merged as by the model's own tokenizer.

Imports no Ray or HTTP library.
"""

import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from mars_platform.data.client_text import Shield, strings_in
from mars_platform.data.rendering import render_prompt
from mars_platform.errors import UserError

_BARRED = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
_TAG = re.compile(r"[<\[{(].*\S.*[>\])}]", re.DOTALL)
_NAME_BYTES = 12
_PIECE = 2**16
"""Characters of a long text whose tokens are counted at once."""
_MOST_FOR_CUT = 16
"""Tokens that cutting a text makes at most, with a wide margin."""
# Rare ideographs stand for replaced characters: they have no case, are no white space, and neither
# JSON nor Python's repr escapes them.
_STAND_INS = range(0x30000, 0x3134B)
_STAND_IN = re.compile(f"[{chr(_STAND_INS[0])}-{chr(_STAND_INS[-1])}]")


def control_tokens(
    tokenizer: PreTrainedTokenizerBase, ids: Collection[int] = (), *, with_tags: bool = True
) -> dict[int, AddedToken]:
    """Return the added tokens that structure a prompt, by id.

    These are the special tokens, others of the form ``<|...|>``, those with the given ``ids``, such
    as end tokens that only a configuration names, and, if ``with_tags``, the tags that the chat
    template mentions, such as ``<tool_call>``. Any other added token, such as a run of white space,
    is ordinary text.
    """
    known: dict[int, AddedToken] = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    named = {*tokenizer.all_special_ids, *ids}
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = "\n".join(template.values())

    def is_control(token_id: int, token: AddedToken) -> bool:
        if token.special or token_id in named or _BARRED.fullmatch(token.content):
            return True
        return with_tags and bool(_TAG.fullmatch(token.content)) and token.content in template

    return {token_id: token for token_id, token in known.items() if is_control(token_id, token)}


class TooManyTokens(UserError):
    """Raised for a text with more tokens than are wanted."""


@dataclass(frozen=True)
class Encoded:
    """A tokenized text."""

    ids: list[int]
    """Token ids, those that the tokenizer adds included."""
    encoding: Encoding
    num_before: int = 0
    """Number of ids before those in ``encoding``."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """For each token, the range ``[start, end)`` of its characters; empty for an added one."""
        inside: list[tuple[int, int]] = self.encoding.offsets
        num_behind = len(self.ids) - len(inside) - self.num_before
        return [(0, 0)] * self.num_before + inside + [(0, 0)] * num_behind


class PromptEncoder:
    """Encodes prompts for one model; any thread may use it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ids: Collection[int] = (),
        *,
        answers_have_tags: bool = False,
    ) -> None:
        """Find the control tokens; see `control_tokens` for the arguments.

        With ``answers_have_tags``, tags in the content of assistant turns act: a model is to write
        them, or wrote them.
        """
        backend: Tokenizer = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        self.control = control_tokens(tokenizer, ids)
        texts = [token.content for token in self.control.values()]
        self.tokenizer = tokenizer
        self._occurrence = _any_of(self.control.values())
        kept = control_tokens(tokenizer, ids, with_tags=not answers_have_tags)
        tags = [token for key, token in self.control.items() if key not in kept]
        self._tags = _any_of(tags) if tags else None
        self._names = {text: secrets.token_hex(_NAME_BYTES) for text in texts}
        self._guarded, self._ids = _renamed(backend, self._names)
        # a model may spell these from text, since they stand in its own vocabulary
        self._in_model = {token for token in self.control if backend.model.id_to_token(token)}
        # a normalizer can turn other characters into such a token
        self._is_strict = backend.normalizer is not None and any(
            token.normalized for token in self.control.values()
        )
        self._inner = frozenset(
            {
                text[start:end]
                for text in texts
                for start in range(1, len(text))
                for end in range(start + 1, len(text))
            }
        )
        self._edges = sorted({text[place] for text in texts for place in (0, -1)})
        self._edge = re.compile("[" + re.escape("".join(self._edges)) + "]" if texts else r"(?!)")
        self._characters = sorted(set("".join(texts)).difference(self._edges))
        self.prefix, self.suffix = _frame(backend)
        """Ids that the tokenizer adds before and behind a text."""

    def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Render a conversation by `render_prompt` and return its token ids.

        Unless ``add_special_tokens``, the tokenizer adds none, since a template usually writes them
        itself. A prompt of more than ``max_tokens`` is given up.

        Raises:
            UserError: see `render_prompt`; or the tokenizer takes a text for a control token.
            TooManyTokens: the prompt has more than ``max_tokens``.
        """
        shield = self.shield_for(messages, tools, template_kwargs)
        text = render_prompt(
            self.tokenizer,
            messages,
            tools,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            shield=shield,
        )
        if shield is None:
            self.check_length(text, max_tokens)
            return self.plain(text, add_special_tokens=add_special_tokens, with_spans=False).ids
        _check_length(self._guarded, text, max_tokens)
        return self._framed(self.sealed(text, with_spans=False), add_special_tokens).ids

    def check_length(self, text: str, max_tokens: int | None) -> None:
        """Give up a long text with too many tokens, without holding all of them at once."""
        _check_length(self.tokenizer.backend_tokenizer, text, max_tokens)

    def text(
        self, text: str, *, add_special_tokens: bool = True, with_spans: bool = True
    ) -> Encoded:
        """Return a text's token ids, none of which is a control token that the text spells.

        If ``with_spans``, the spans are known, too, which takes three times the memory.

        Raises:
            UserError: the tokenizer takes the text for a control token.
        """
        if not self._is_strict and self._occurrence.search(text) is None:
            return self.plain(text, add_special_tokens=add_special_tokens, with_spans=with_spans)
        return self._framed(self.sealed(text, with_spans=with_spans), add_special_tokens)

    def plain(
        self, text: str, *, add_special_tokens: bool = True, with_spans: bool = True
    ) -> Encoded:
        """Return a text's token ids, in which every control token acts that the text spells."""
        backend = self.tokenizer.backend_tokenizer
        found = _encoding(backend, text, add_special_tokens, with_spans)
        return Encoded(found.ids, found)

    def shield_for(self, messages: Iterable[Mapping[str, Any]], *others: Any) -> Shield | None:
        """Return a shield for the strings in messages and other values; None if they need none.

        Roles are the server's own words, of which some templates make control tokens.
        """
        told = [[each for key, each in turn.items() if key != "role"] for turn in messages]
        is_needed, has_inner = self._is_strict, False
        for text in strings_in([told, *others]):
            is_needed = is_needed or self._edge.search(text) is not None
            has_inner = has_inner or text.strip() in self._inner
        if not (is_needed or has_inner):
            return None
        taken = {
            stand_in
            for text in strings_in([told, *others])
            if not text.isascii()
            for stand_in in _STAND_IN.findall(text)
        }
        free = (chr(code) for code in _STAND_INS if chr(code) not in taken)
        edges = dict(zip(self._edges, free, strict=False))
        every = edges | dict(zip(self._characters, free, strict=False)) if has_inner else edges
        return Shield(edges, every, self._inner, self._occurrence, self._names, self._tags)

    def sealed(self, text: str, *, with_spans: bool = True) -> Encoded:
        """Return the token ids of a text that a shield has sealed.

        Raises:
            UserError: the tokenizer takes a client's text for a control token.
        """
        found = _encoding(self._guarded, text, False, with_spans)
        if not self._in_model.isdisjoint(found.ids):
            taken = next(token for token in found.ids if token in self._in_model)
            raise UserError(
                f"{self.control[taken].content!r} cannot be told from this model's control token; "
                "leave it out"
            )
        return Encoded([self._ids.get(token, token) for token in found.ids], found)

    def _framed(self, encoded: Encoded, is_wanted: bool) -> Encoded:
        if not is_wanted:
            return encoded
        ids = [*self.prefix, *encoded.ids, *self.suffix]
        return Encoded(ids, encoded.encoding, len(self.prefix))


def _check_length(backend: Tokenizer, text: str, max_tokens: int | None) -> None:
    """Count the tokens of a long text piece by piece; a piece may have some more for being cut."""
    if max_tokens is None or len(text) <= _PIECE:
        return
    num_tokens = 0
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        num_tokens += len(_encoding(backend, piece, False, False).ids) - _MOST_FOR_CUT
        if num_tokens > max_tokens:
            reason = f"{len(text)} characters are more than the limit of {max_tokens} tokens"
            raise TooManyTokens(f"{reason}; shorten the text")


def _encoding(
    backend: Tokenizer, text: str, add_special_tokens: bool, with_spans: bool
) -> Encoding:
    # for one text, too: these leave the interpreter to other threads meanwhile, and encode does not
    encode = backend.encode_batch if with_spans else backend.encode_batch_fast
    (found,) = encode([text], add_special_tokens=add_special_tokens)
    return found


def _any_of(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """Return a pattern of the longest of some tokens that begins at a place."""
    longest_first = sorted(tokens, key=lambda token: -len(token.content))
    parts = (
        rf"(?<!\w){re.escape(token.content)}(?!\w)"
        if token.single_word
        else re.escape(token.content)
        for token in longest_first
    )
    return re.compile("|".join(parts) or r"(?!)")


def _renamed(backend: Tokenizer, names: Mapping[str, str]) -> tuple[Tokenizer, dict[int, int]]:
    """Return a tokenizer that knows some added tokens by other names, and its ids' true values.

    It shares the model of the other one, and with it the memory of the vocabulary.
    """
    renamed, ids = Tokenizer(backend.model), dict[int, int]()
    if backend.normalizer is not None:
        renamed.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        renamed.pre_tokenizer = backend.pre_tokenizer
    known = sorted(backend.get_added_tokens_decoder().items())
    added = [
        AddedToken(
            names.get(token.content, token.content),
            single_word=False if token.content in names else token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )
        for _, token in known
    ]
    renamed.add_tokens(added)
    for (token_id, _), token in zip(known, added, strict=True):
        new_id = renamed.token_to_id(token.content)
        assert new_id is not None
        ids[new_id] = token_id
    return renamed, ids


def _frame(backend: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer adds before and behind a text."""
    inside = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a").ids
    starts = range(len(whole) - len(inside) + 1)
    start = next((at for at in starts if whole[at : at + len(inside)] == inside), len(whole))
    return whole[:start], whole[start + len(inside) :]
