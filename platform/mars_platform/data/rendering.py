"""Renders conversations with the model's own chat template.

Imports no Ray or HTTP library.
"""

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, Self

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,
    _render_with_assistant_indices,
)

from mars_platform.data.client_text import Shield
from mars_platform.data.conversations import Conversation
from mars_platform.data.template_messages import (
    THINKING_BEGIN,
    THINKING_END,
    adapted,
    reads_thinking,
    split_thinking,
)
from mars_platform.errors import UserError, one_line

_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands behind a text that is to be continued while the template runs."""
_CONTINUES_NOT = (
    "messages: the chat template does not render this assistant turn as a continuation of its "
    "generation prompt; set the row's chat_template_kwargs as the turn was written, such as "
    "enable_thinking, or use a template that does"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Spans = list[tuple[int, int]]
"""Ranges ``[start, end)`` of characters of a rendered text, in order."""


@dataclass(frozen=True)
class Turn:
    """A supervised assistant turn in a rendered text."""

    start: int
    """Number of characters of the prompt before it, which ends with the generation prompt."""
    end: int
    """Place behind the token that ends it; without one, behind its last character."""
    spans: Spans
    """Supervised characters; none if the template's ``{% generation %}`` marks none of the turn."""
    problem: str | None
    """Reason why the turn is not learned as it is in the data; None if it is."""


@dataclass(frozen=True)
class RenderedTurns:
    """A text with supervised assistant turns."""

    text: str
    turns: list[Turn]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    shield: Shield | None = None,
) -> str:
    """Render the prompt that asks the model for the next assistant turn.

    Args:
        tokenizer: tokenizer with a chat template, which transformers runs in jinja's sandbox.
        messages: turns in OpenAI's form, of which arguments of calls may be objects.
        tools: functions that the model may call: objects with ``type`` and ``function``.
        template_kwargs: further variables of the template, set by the sender of a request.
        add_generation_prompt: whether the text ends with the header of an assistant turn.
        continue_final_message: whether the text ends where that of the last turn does.
        shield: keeps what the other arguments say apart from control tokens, and seals the text.

    Raises:
        UserError: the tokenizer has no chat template, the template refuses the messages or does not
            support tools, or a variable has a reserved name; the message starts with the name of
            the argument at fault.
    """
    renderer = _Renderer.of(tokenizer, tools, template_kwargs, shield)
    if continue_final_message:
        text = _up_to_mark(
            renderer.text(messages, end_mark=_END_MARK), renderer.written(messages[-1]["content"])
        )
    else:
        text = renderer.text(messages, add_generation_prompt=add_generation_prompt)
    return text if shield is None else shield.seal(text)


def render_turns(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    loss_on: Literal["last", "all"],
    ends: Collection[str],
    *,
    shield: Shield | None = None,
) -> list[RenderedTurns]:
    """Render a conversation as its model is served it, and find the supervised assistant turns.

    One text holds them all if each turn stands in the prompt of the next one as the model wrote it.
    Templates that drop what earlier turns thought need several. A turn is supervised behind its
    generation prompt, or where the template's ``{% generation %}`` marks it, and up to the token
    that ends it.

    Args:
        tokenizer: tokenizer with a chat template.
        conversation: the conversation.
        loss_on: whether the last assistant turn is supervised or all of them, except for one that
            opens the conversation and those of weight 0.
        ends: texts of the tokens at which serving ends an output.
        shield: keeps the turns' texts apart from control tokens, and seals the text.

    Returns:
        Each text with its turns, at least one.

    Raises:
        UserError: the template cannot render the data, or writes a turn otherwise than the model
            would behind its generation prompt.
    """
    renderer = _Renderer.of(
        tokenizer, conversation.tools, conversation.chat_template_kwargs, shield
    )
    messages = [turn.as_message() for turn in conversation.messages]
    turns = [
        index
        for index, turn in enumerate(conversation.messages)
        if turn.role == "assistant" and index > 0 and turn.weight != 0
    ]
    if not turns:
        raise UserError("messages: no assistant turn is to be learned; leave the row out")
    found = list[RenderedTurns]()
    for index in turns if loss_on == "all" else turns[-1:]:
        prompt = renderer.text(messages[:index], add_generation_prompt=True)
        text, generated = _answered(renderer, prompt, messages[: index + 1])
        text, end, end_token = _ended(renderer, text, messages[: index + 1], ends)
        spans = _supervised(len(prompt), end, len(end_token), generated)
        answer = text[len(prompt) : end - len(end_token)]
        problem = _problem(renderer, index, messages[index], answer, has_end=bool(end_token))
        turn = Turn(len(prompt), end, spans, problem)
        if found and prompt.startswith(found[-1].text):
            found[-1] = RenderedTurns(text, [*found[-1].turns, turn])
        else:
            found.append(RenderedTurns(text, [turn]))
    return found if shield is None else [_sealed(each, shield) for each in found]


@dataclass(frozen=True)
class _Renderer:
    """Renders messages of one conversation; the text is not sealed."""

    template: str
    special_tokens: Mapping[str, str]
    tools: list[dict[str, Any]] | None
    kwargs: Mapping[str, Any]
    shield: Shield | None

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any] | None,
        shield: Shield | None,
    ) -> Self:
        template = _template_of(tokenizer, tools)
        if tools and "tools" not in template:
            raise UserError(
                "tools: this model's chat template does not know tools; leave them out, or use a "
                "model that was trained with tools"
            )
        if kwargs and (taken := sorted(_reserved_names(tokenizer) & kwargs.keys())):
            raise UserError(
                f"chat_template_kwargs: {taken[0]!r} is set by the server; leave it out, and use "
                "names of the template's own variables"
            )
        return cls(template, tokenizer.special_tokens_map, tools or None, kwargs or {}, shield)

    def text(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        end_mark: str = "",
    ) -> str:
        return self.marked(messages, add_generation_prompt, end_mark)[0]

    def marked(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = False,
        end_mark: str = "",
    ) -> tuple[str, Spans]:
        try:
            try:
                return self._run(adapted(messages, self.template), add_generation_prompt, end_mark)
            except TypeError:  # DeepSeek's templates join arguments to texts
                turns = adapted(messages, self.template, as_text=True)
                return self._run(turns, add_generation_prompt, end_mark)
        except Exception as error:  # a template can raise any exception
            raise UserError(
                f"messages: the chat template cannot render them ({one_line(error)})"
            ) from error

    def _run(
        self, turns: list[dict[str, Any]], add_generation_prompt: bool, end_mark: str
    ) -> tuple[str, Spans]:
        """Render as ``apply_chat_template`` does, which makes plain strings of client texts."""
        shown = [self._shown(turn) for turn in turns]
        if end_mark:
            shown[-1] = {**shown[-1], "content": shown[-1]["content"] + end_mark}
        text, generated = _render_with_assistant_indices(
            _compile_jinja_template(self.template),
            shown,
            self.shielded(self.tools),
            None,
            add_generation_prompt,
            **{**self.special_tokens, **self.shielded(self.kwargs)},
        )
        return text, generated

    def _shown(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Return a turn as the template gets it; thinking that it would drop is in the content."""
        shown = {key: each if key == "role" else self.shielded(each) for key, each in turn.items()}
        if turn["role"] == "assistant":
            shown["content"] = self._answer(turn)
        return shown

    def _answer(self, turn: dict[str, Any]) -> str:
        """Return the content of an assistant turn, in which the tags around its thinking act."""
        thinking, content = split_thinking(turn)
        if thinking is None or reads_thinking(self.template):
            return self.written(turn["content"])
        if turn.get("reasoning_content"):
            return _thought(self.shielded(thinking)) + self.written(content)
        begin = turn["content"].removesuffix(content).removesuffix(THINKING_END)
        if begin == thinking:
            return self.written(turn["content"])
        return THINKING_BEGIN + self.written(thinking) + THINKING_END + self.written(content)

    def shielded(self, value: Any) -> Any:
        return value if self.shield is None else self.shield.of(value)

    def written(self, text: str) -> str:
        return text if self.shield is None else self.shield.of_answer(text)


def _thought(thinking: str) -> str:
    """Return thinking in the form in which models write it before the content."""
    return f"{THINKING_BEGIN}\n" + thinking.strip("\n") + f"\n{THINKING_END}\n\n"


def _up_to_mark(text: str, content: str) -> str:
    """Cut a rendered text at the mark behind its last turn's content.

    Source: transformers, ``render_jinja_template`` with ``continue_final_message``.
    """
    end = text.rfind(_END_MARK.strip())
    if end < 0 or content.strip() not in text:
        raise UserError(
            "continue_final_message: this model's chat template does not write the last message as "
            "it is; leave it out, or shorten the message to what the template keeps"
        )
    if text.startswith(_END_MARK, end):
        return text[:end]
    return text[:end].rstrip()  # the template has cut white space off the end of the content


def _reserved_names(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the template variables that only the server may set."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    return {*parameters, *tokenizer.special_tokens_map, "messages", "conversations"}


def _answered(
    renderer: _Renderer, prompt: str, messages: list[dict[str, Any]]
) -> tuple[str, Spans | None]:
    """Return a prompt with the last message as the model would write it behind the prompt.

    A generation prompt may open the thinking, which the template drops from a turn that is there.
    The thinking is then taken from the message; without any, it is closed at once. Beside the text
    is what the template marks as generated, or None if it marks nothing in this text.
    """
    text, generated = renderer.marked(messages)
    head, begin, space = prompt.rpartition(THINKING_BEGIN)
    is_open = bool(begin) and not space.strip()
    thinking, content = split_thinking(messages[-1])
    if thinking is not None and prompt.rstrip().endswith(THINKING_END):
        raise UserError(_CONTINUES_NOT)
    own = text.removeprefix(prompt)
    has_thought = THINKING_END in own and THINKING_BEGIN not in own
    if text.startswith(prompt) and (has_thought or not is_open):
        return text, generated if _GENERATION.search(renderer.template) else None
    if is_open:
        bare = {**messages[-1], "reasoning_content": None, "content": content.lstrip("\n")}
        behind = renderer.text([*messages[:-1], bare])
        if behind.startswith(head):
            behind = behind.removeprefix(prompt if behind.startswith(prompt) else head)
            return prompt + _behind_opening(renderer, space, messages[-1], behind), None
    return prompt + _answer_alone(renderer, text, messages[-1]), None


def _behind_opening(renderer: _Renderer, space: str, message: dict[str, Any], behind: str) -> str:
    """Return what the model writes of a message behind a prompt that opens the thinking.

    ``space`` ends the prompt, and ``behind`` is what the template writes of the message without
    its thinking; it may begin with the end of the thinking.
    """
    thinking, content = split_thinking(message)
    is_apart = bool(message.get("reasoning_content"))
    if thinking is None:
        thought = space
    elif is_apart:
        thought = renderer.shielded(thinking).strip("\n")
    else:
        thought = renderer.written(thinking)
        if message["content"].lstrip().startswith(THINKING_BEGIN):
            thought = thought.lstrip(space)
    if behind.startswith(THINKING_END):
        return "".join([thought, behind])
    gap = content[: len(content) - len(content.lstrip("\n"))]
    if is_apart or thinking is None:
        gap = "\n\n"
    line = "\n" if is_apart else ""
    return "".join([thought, line, THINKING_END, gap, behind])


def _answer_alone(renderer: _Renderer, text: str, message: dict[str, Any]) -> str:
    """Return what the template writes of a message behind a generation prompt, seen by itself.

    A template may write earlier messages otherwise as soon as there is an answer: gpt-oss drops
    the thinking before calls, which was in the prompt when the answer was written.
    """
    question = {"role": "user", "content": "x"}
    prompt = renderer.text([question], add_generation_prompt=True)
    whole = renderer.text([question, message])
    if not whole.startswith(prompt) or not text.endswith(whole[len(prompt) :]):
        raise UserError(_CONTINUES_NOT)
    return whole[len(prompt) :]


def _ended(
    renderer: _Renderer, text: str, messages: list[dict[str, Any]], ends: Collection[str]
) -> tuple[str, int, str]:
    """Return a text up to the end of its last turn, that place, and the token that ends the turn.

    GLM's templates end no turn: the model stops with the token that begins the next message, a
    question or the result of a call, which is added to the text. The token is empty if serving
    ends an output at none that the template writes.
    """
    end = len(text.rstrip())
    longest_first = sorted(ends, key=len, reverse=True)
    if token := next((each for each in longest_first if text.endswith(each, 0, end)), ""):
        return text, end, token
    calls = messages[-1].get("tool_calls")
    turn: dict[str, Any] = {"role": "assistant", "content": "x", "tool_calls": calls}
    following = {"role": "user", "content": "x"}
    if calls:
        following = {"role": "tool", "content": "x", "tool_call_id": calls[0]["id"]}
    question = {"role": "user", "content": "x"}
    try:
        before = renderer.text([question, turn]).rstrip()
        longer = renderer.text([question, turn, following])
    except UserError:
        return text, end, ""
    behind = longer.removeprefix(before).lstrip() if longer.startswith(before) else ""
    token = next((each for each in longest_first if behind.startswith(each)), "")
    if not token:
        return text, end, ""
    gap = longer[len(before) : len(longer) - len(behind)]
    text = text[:end] + gap + token
    return text, len(text), token


def _problem(
    renderer: _Renderer, index: int, message: dict[str, Any], answer: str, *, has_end: bool
) -> str | None:
    thinking, content = split_thinking(message)
    calls = [
        renderer.shielded(each["function"]["name"]) for each in message.get("tool_calls") or ()
    ]
    where = f"messages.{index}: the chat template"
    if not answer.strip():
        raise UserError(f"{where} writes nothing of this turn; use a template that does")
    if any(answer.count(name) < calls.count(name) for name in calls):
        raise UserError(
            f"{where} does not write all tool calls of this turn; leave the row out, or use a "
            "template that does"
        )
    for what, told in (("thinking", thinking), ("text", content)):
        if told and renderer.written(told).strip() not in answer:
            return f"{where} does not write the {what} of this turn"
    return None if has_end else f"{where} ends this turn with none of the model's end tokens"


def _supervised(start: int, end: int, num_last: int, generated: Spans | None) -> Spans:
    """Return the supervised characters of a turn, the last ``num_last`` of which are its end token.

    The end token is among them if anything is: a model that is not taught to end goes on for ever.
    """
    if generated is None:
        return [(start, end)]
    pairs = ((max(first, start), min(last, end)) for first, last in generated)
    spans = [(first, last) for first, last in pairs if first < last]
    if spans and num_last and spans[-1][1] < end:
        spans.append((max(spans[-1][1], end - num_last), end))
    return spans


def _sealed(rendered: RenderedTurns, shield: Shield) -> RenderedTurns:
    """Seal a text piece by piece, so that its turns are found again."""
    turns, text = rendered.turns, rendered.text
    inside = {place for turn in turns for span in turn.spans for place in span}
    edges = {place for turn in turns for place in (turn.start, turn.end)}
    places = sorted({0, len(text)} | inside | edges)
    pieces = [shield.seal(text[begin:end]) for begin, end in pairwise(places)]
    new = dict(zip(places, accumulate(map(len, pieces), initial=0), strict=True))
    moved = [
        replace(
            turn,
            start=new[turn.start],
            end=new[turn.end],
            spans=[(new[first], new[last]) for first, last in turn.spans],
        )
        for turn in turns
    ]
    return RenderedTurns("".join(pieces), moved)


def _template_of(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None
) -> str:
    if tokenizer.chat_template is None:
        raise UserError(
            "messages: the tokenizer has no chat template; add one as chat_template.jinja"
        )
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise UserError(f"messages: there is no chat template to use ({error})") from error
    assert isinstance(template, str)
    return template
