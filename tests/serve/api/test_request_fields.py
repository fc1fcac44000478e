"""Each request field of vLLM's is honoured or refused by name, and the documentation says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mars_serve.api.errors import ApiError
from mars_serve.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from rest.field_table import ENDPOINTS, field_table, refusal_table

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "request-fields.md"
BASES: dict[str, dict[str, Any]] = {
    "completions": {"model": "mars", "prompt": "x"},
    "chat": {"model": "mars", "messages": [{"role": "user", "content": "x"}]},
}
# Source: vLLM 0.32.0, the models of both requests in ``vllm/entrypoints/openai``.
SHARED = """
add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo
frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params length_penalty
logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens mm_payload model n
presence_penalty priority prompt_logprobs repetition_detection repetition_penalty request_id
response_format return_mm_kwargs return_token_ids return_token_offsets
return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
structured_outputs temperature thinking_token_budget top_k top_p truncate_prompt_tokens
truncation_side use_beam_search user vllm_xargs watermarking
"""
OF_CHATS = """
add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
include_reasoning max_completion_tokens media_io_kwargs messages mm_processor_kwargs
parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools top_logprobs
"""
OF_COMPLETIONS = "prompt prompt_embeds suffix"
REFUSED = [(endpoint, name) for endpoint, body in ENDPOINTS.items() for name in body.neutral]


@pytest.mark.parametrize(
    ("body", "names"),
    [(ChatCompletionRequest, SHARED + OF_CHATS), (CompletionRequest, SHARED + OF_COMPLETIONS)],
)
def test_every_field_of_vllm_is_known(body: type[GenerationRequest], names: str) -> None:
    assert set(names.split()) - body.model_fields.keys() - body.neutral.keys() == set()


def test_the_documentation_has_the_tables_of_the_models() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.startswith("|")]
    tables = [*field_table(), *refusal_table()]
    assert found == tables, f"put the lines of rest.field_table into {DOCUMENT.name}"


@pytest.mark.parametrize(("endpoint", "name"), REFUSED)
def test_a_field_that_is_not_implemented_is_refused_with_the_reason(
    endpoint: str, name: str
) -> None:
    body, neutral = ENDPOINTS[endpoint], ENDPOINTS[endpoint].neutral[name]
    for value in (None, *neutral.values):
        body(**BASES[endpoint], **{name: value}).refuse_unsupported()
    with pytest.raises(ApiError) as refusal:
        body(**BASES[endpoint], **{name: "another"}).refuse_unsupported()
    assert (refusal.value.status, refusal.value.param) == (400, name)
    assert str(refusal.value).startswith(f"{name}: 'another' is not supported, since ")
    assert f"{neutral.reason}; leave it out" in str(refusal.value)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_body_notes_the_names_that_it_does_not_know(endpoint: str) -> None:
    body = ENDPOINTS[endpoint]
    assert body(**BASES[endpoint]).unknown_fields == ()
    assert body(**BASES[endpoint], heat=1, n=2, é=3).unknown_fields == ("heat", "é")
    nested = {"stream_options": {"inclde_usage": True, "include_usage": True}}
    assert body(**BASES[endpoint], **nested).unknown_fields == ("stream_options.inclde_usage",)
    many = {f"field{number}": number for number in range(1000)}
    assert len(body(**BASES[endpoint], **many).unknown_fields) == 64


def test_a_conversation_notes_the_names_that_it_does_not_know() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "", "x": 1}}
    form = {"type": "json_schema", "json_schema": {"schema": {"x": 1}, "name": "a", "strct": 1}}
    messages = [{"role": "user", "content": "a", "reasoning": "b"}, {"role": "assistant"}]
    messages[1]["tool_calls"] = [call]
    body = ChatCompletionRequest(model="mars", messages=messages, response_format=form)
    assert set(body.unknown_fields) == {
        "messages.0.reasoning",
        "messages.1.tool_calls.0.function.x",
        "response_format.json_schema.strct",
    }


def test_token_ids_do_not_reveal_hidden_thinking() -> None:
    fields = {"return_token_ids": True, "include_reasoning": False}
    with pytest.raises(ApiError, match=r"return_token_ids: .*; leave out include_reasoning"):
        ChatCompletionRequest.model_validate({**BASES["chat"], **fields}).refuse_unsupported()
