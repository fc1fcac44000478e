"""Control tokens in grammars: clients' grammars ask for none, and their names are plain text."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mars_platform.data.prompt_encoding import control_tokens
from mars_platform.errors import UserError
from mars_serve.engine.decoding_options import GrammarKind, GrammarSpec
from mars_serve.engine.sampling.grammar import GrammarCompiler, GrammarError
from mars_serve.engine.sampling.grammar_tokens import with_secret_names
from mars_train.run.scratch import train_tokenizer

LARK, REGEX, SCHEMA = GrammarKind.LARK, GrammarKind.REGEX, GrammarKind.JSON_SCHEMA
MASK, TAG, TABLE = "<|mask|>", "<tool_call>", "<table>"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer with a tag that its template mentions, and an ordinary added token."""
    made = train_tokenizer(["What is 1 plus 2? <tool_call> im_start"] * 10, 300)
    made.add_tokens([AddedToken(MASK, special=True), AddedToken(TAG), AddedToken(TABLE)])
    made.chat_template = f"{made.chat_template}{{# {TAG} #}}"
    return made


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer) + 8, [tokenizer.eos_token_id])


def outputs_of(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, spec: GrammarSpec
) -> str:
    """Return the output that always takes the first token allowed, and check what else is."""
    control, matcher, output = control_tokens(tokenizer), compiler.compile(spec).matcher(), []
    while not matcher.is_finished:
        allowed = set(matcher.allowed().nonzero().flatten().tolist()) - {tokenizer.eos_token_id}
        assert not allowed & control.keys() - spec.control_ids
        if not allowed:
            break
        output.append(min(allowed))
        assert matcher.advance(output[-1:]) == 1
    return str(tokenizer.decode(output))


@pytest.mark.parametrize("text", ["<|im_start|>", MASK, TAG, "<|im_end|>"])
def test_the_name_of_a_control_token_is_text(compiler, tokenizer, text):
    escaped = text.replace("|", "\\|")
    for spec, expected in (
        (GrammarSpec(LARK, f'start: "{text}" "!"'), f"{text}!"),
        (GrammarSpec(REGEX, f"a?{escaped}!"), f"{text}!"),
        (GrammarSpec(SCHEMA, json.dumps({"const": f"!{text}"})), f'"!{text}"'),
    ):
        assert outputs_of(compiler, tokenizer, spec).endswith(expected)


@pytest.mark.parametrize("rule", [MASK, TAG, "<|im_start|>", "%lark {\nstart: <|mask|>\n}"])
def test_a_grammar_knows_no_control_token_by_name(compiler, rule):
    with pytest.raises(UserError, match=r'unknown special token: "<.{4,12}>"\); change'):
        compiler.compile(GrammarSpec(LARK, f'start: {rule} "a"'))


def test_a_grammar_cannot_ask_for_a_control_token_by_its_id(compiler, tokenizer):
    mask = tokenizer.convert_tokens_to_ids(MASK)
    with pytest.raises(UserError, match="but control tokens"):
        compiler.compile(GrammarSpec(LARK, f'start: <[{mask}]> "a"'))
    later = compiler.compile(GrammarSpec(LARK, f'start: "a" <[{mask}]>')).matcher()
    assert later.advance(tokenizer.encode("a")) == 1
    assert later.allowed_after([]) is None
    with pytest.raises(GrammarError, match="but control tokens"):
        later.allowed()
    for any_token in ("<[*]>", "<[^3]>", f"<[0-{mask}]>"):
        spec = GrammarSpec(LARK, f'start: {any_token} "!"')
        assert outputs_of(compiler, tokenizer, spec).endswith("!")


def test_a_grammar_of_the_server_has_the_control_tokens_that_it_names(compiler, tokenizer):
    tag, mask = tokenizer.convert_tokens_to_ids([TAG, MASK])
    spec = GrammarSpec(LARK, f'start: <[{tag}]> "a"', frozenset({tag}))
    assert compiler.compile(spec).matcher().allowed().nonzero().flatten().tolist() == [tag]
    assert outputs_of(compiler, tokenizer, spec) == f"{TAG}a"
    with pytest.raises(UserError, match="but control tokens"):
        compiler.compile(GrammarSpec(LARK, f"start: <[{mask}]>", frozenset({tag})))


def test_tokens_that_a_models_merges_make_keep_their_names():
    vocabulary = {"<": 0, "s>": 1, "<s>": 2, "<b>": 3, "<unk>": 4}
    backend = Tokenizer(models.BPE(vocabulary, [("<", "s>")], unk_token="<unk>"))  # noqa: S106
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    special = [AddedToken(text, special=True) for text in ("<s>", "<b>", "<unk>", "<c>")]
    tokenizer.add_tokens(special)
    renamed = with_secret_names(
        tokenizer.backend_tokenizer.to_str(), control_tokens(tokenizer).keys()
    )
    content = json.loads(renamed)
    assert "<s>" in content["model"]["vocab"]
    assert not {"<b>", "<unk>"} & content["model"]["vocab"].keys()
    assert not {"<s>", "<b>", "<unk>", "<c>"} & {
        each["content"] for each in content["added_tokens"]
    }
    assert content["model"]["unk_token"] in content["model"]["vocab"]
    assert sorted(content["model"]["vocab"].values()) == [0, 1, 2, 3, 4]
