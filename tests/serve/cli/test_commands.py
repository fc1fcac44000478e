from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.weights import load_model
from mars_platform.cli.main import run
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.api.text import decode, encode
from mars_serve.cli.completion import LocalCompletion, generate_once, print_completion
from mars_serve.cli.options import GenerateOptions, ServeOptions
from mars_serve.cli.serve_settings import serve_settings
from mars_serve.config.settings import ServeSettings
from rest.rest_requests import PROMPT

# Help


@pytest.mark.parametrize("group", [[], ["bench"], ["data"]])
def test_no_line_of_the_help_is_cut_off(group, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*group, "--help"]) == 0
    _, _, commands = capsys.readouterr().out.partition("Commands:\n")
    assert commands
    assert not [line for line in commands.splitlines() if line.endswith("...")]


# Settings


def settings_of(config: Path | None = None, *models: str, **options: Any) -> ServeSettings:
    return serve_settings(ServeOptions(config=config, models=models, **options))


def write_config(tmp_path: Path, content: Any) -> Path:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    models = [{"name": "a", "path": "some/a"}, {"name": "b", "path": "some/b", "num_replicas": 3}]
    return write_config(tmp_path, {"models": models, "port": 9000})


def test_a_config_file_or_a_model_is_required():
    with pytest.raises(UserError, match="--model"):
        settings_of()


@pytest.mark.parametrize(
    ("model", "name", "path"),
    [
        ("tiny=some/where=else", "tiny", "some/where=else"),
        ("someone/some-model", "someone/some-model", "someone/some-model"),
    ],
)
def test_a_model_option_gives_name_and_path(model, name, path):
    (found,) = settings_of(None, model).models
    assert (found.name, found.path) == (name, path)


def test_a_directory_is_named_by_its_last_part(tmp_path):
    (model,) = settings_of(None, str(tmp_path)).models
    assert (model.name, model.path) == (tmp_path.name, str(tmp_path))


def test_options_override_the_file(config):
    assert [model.num_replicas for model in settings_of(config).models] == [1, 3]
    assert [model.num_replicas for model in settings_of(config, replicas=2).models] == [2, 2]
    settings = settings_of(config, "c=some/c", host="::1", port=9001, replicas=2)
    assert [(model.name, model.num_replicas) for model in settings.models] == [("c", 2)]
    assert (settings.host, settings.port) == ("::1", 9001)


def test_set_overrides_options(config):
    overrides = [
        "port=9002",
        "models.1.engine.page_size=8",
        "models.0.mode=ar",
        "models.0.confidence_threshold=0.92",
    ]
    settings = settings_of(config, port=9001, overrides=overrides)
    assert settings.port == 9002
    assert settings.models[1].engine.page_size == 8
    assert (settings.models[0].mode, settings.models[0].confidence_threshold) == (Mode.AR, 0.92)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("prot=9000", ["prot: unknown key", "models", "host", "port", "insecure", "cluster"]),
        ("models.0.mod=ar", ["models.0.mod: unknown key", "confidence_threshold", "num_replicas"]),
        ("models.0.engine.pages=4", ["models.0.engine.pages: unknown key", "num_pages"]),
        ("models.0.confidence_threshold=0", ["models.0.confidence_threshold", "got '0'"]),
        (
            "models.0.engine.max_num_batched_tokens=64",
            ["models.0.engine.max_num_batched_tokens", "65"],
        ),
        ("models.0.num_gpus=2", ["models.0.num_gpus"]),
        ("models.0.dtype=int8", ["models.0.dtype", "float32"]),
        ("models.7.mode=ar", ["models.7.mode", "no such place"]),
        ("models=[]", ["models: "]),
        ("port", ["'port'", "key.sub=value"]),
    ],
)
def test_invalid_overrides_name_the_field(override, expected):
    with pytest.raises(UserError) as refusal:
        settings_of(None, "tiny=dir", overrides=[override])
    assert all(part in str(refusal.value) for part in expected), str(refusal.value)


def test_an_unknown_key_is_refused_with_the_file_and_the_known_keys(tmp_path):
    file = write_config(tmp_path, {"models": [{"name": "a", "path": "a", "replicas": 2}]})
    with pytest.raises(UserError) as refusal:
        settings_of(file)
    message = str(refusal.value)
    assert message.startswith(f"{file}: models.0.replicas: unknown key; known keys: ")
    assert "num_replicas" in message


@pytest.mark.parametrize("models", ["a", {"name": "a", "path": "a"}, ["a"], None, 3])
@pytest.mark.parametrize("replicas", [None, 2])
def test_models_of_the_wrong_type_are_refused(tmp_path, models, replicas):
    with pytest.raises(UserError, match="models"):
        settings_of(write_config(tmp_path, {"models": models}), replicas=replicas)


PUBLIC_HOSTS = ["0.0.0.0", "::", "192.168.1.4", "example.org"]  # noqa: S104
KEYS = {"keys": [{"name": "someone", "sha256": "0" * 64}]}


@pytest.mark.parametrize("host", PUBLIC_HOSTS)
def test_a_reachable_host_needs_keys_or_insecure(host):
    with pytest.raises(UserError, match=r"host: .*no keys.*--insecure"):
        settings_of(None, "tiny=dir", host=host)
    settings = settings_of(None, "tiny=dir", host=host, insecure=True)
    assert (settings.host, settings.insecure) == (host, True)


@pytest.mark.parametrize("host", PUBLIC_HOSTS)
def test_a_reachable_host_is_allowed_with_keys(host, tmp_path, monkeypatch):
    file = f"keys.file={tmp_path / 'keys.yaml'}"
    assert settings_of(None, "tiny=dir", host=host, overrides=[file]).host == host
    given = {"models": [{"name": "a", "path": "a"}], "keys": {"entries": KEYS["keys"]}}
    assert settings_of(write_config(tmp_path, given), host=host).host == host
    monkeypatch.setenv("MARSRAY_API_KEYS", json.dumps(KEYS))
    settings = settings_of(None, "tiny=dir", host=host)
    assert [each.name for each in settings.keys.captured().entries] == ["someone"]


@pytest.mark.parametrize(
    "content", ["", "keys: [", '{"keys": [{"name": "a", "sha256": "secret"}]}']
)
@pytest.mark.parametrize("host", ["127.0.0.1", "192.168.1.4"])
def test_a_malformed_variable_of_keys_is_refused(host, content, monkeypatch):
    monkeypatch.setenv("MARSRAY_API_KEYS", content)
    with pytest.raises(UserError, match="MARSRAY_API_KEYS: ") as refusal:
        settings_of(None, "tiny=dir", host=host)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_a_loopback_host_needs_no_keys(host):
    assert settings_of(None, "tiny=dir", host=host).host == host


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_out_of_range_is_refused(port):
    with pytest.raises(UserError, match=rf"port: .*{port}"):
        settings_of(None, "tiny=dir", port=port)


def test_the_names_of_models_must_differ():
    with pytest.raises(UserError, match="names must differ"):
        settings_of(None, "a=x", "a=y")


# One completion


def complete(
    model: Path, mode: Mode | None, threshold: float | None, **options: Any
) -> LocalCompletion:
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "raw": True, **options}
    return generate_once(
        GenerateOptions(model=str(model), mode=mode, threshold=threshold, **fields)
    )


def expected_passes(path: Path, threshold: float, *, max_tokens: int) -> list[list[int]]:
    checkpoint = read_checkpoint(path)
    return reference.decode(
        load_model(path),
        encode(checkpoint.tokenizer, PROMPT, add_special_tokens=True),
        checkpoint.special,
        max_tokens=max_tokens,
        threshold=threshold,
        num_masks=4,
        mask_token_id=checkpoint.metadata.mask_token_id,
    ).passes


@pytest.mark.parametrize("threshold", [0.03, 0.9])
def test_the_texts_of_passes_join_to_the_reference_output(mars_dir, threshold):
    passes = expected_passes(mars_dir, threshold, max_tokens=20)
    tokens = [token for each in passes for token in each]
    result = complete(mars_dir, Mode.THRESHOLD, threshold)
    assert "".join(result.passes) == decode(read_checkpoint(mars_dir).tokenizer, tokens)
    assert len(result.passes) == len(passes)
    assert result.num_tokens == len(tokens)
    assert result.tokens_per_forward == len(tokens) / len(passes)
    assert result.finish_reason == "length"
    assert threshold > 0.5 or result.tokens_per_forward > 1


def test_without_a_mode_nothing_is_lost_unless_a_threshold_is_given(mars_dir, plain_dir):
    usual = complete(mars_dir, None, None)
    assert usual.mode is Mode.EXACT
    assert "".join(usual.passes) == "".join(complete(mars_dir, Mode.AR, None).passes)
    given = complete(mars_dir, None, 0.03)
    assert (given.mode, given.confidence_threshold) == (Mode.THRESHOLD, 0.03)
    assert complete(mars_dir, Mode.THRESHOLD, None).confidence_threshold == 0.95
    assert complete(plain_dir, None, None).mode is Mode.AR
    with pytest.raises(UserError, match="use mode"):
        complete(plain_dir, None, 0.03)


def test_a_prompt_is_rendered_with_the_chat_template(mars_dir):
    chat = complete(mars_dir, Mode.AR, 1.0, raw=False)
    rendered = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    raw = complete(mars_dir, Mode.AR, 1.0, prompt=rendered)
    assert chat.passes == raw.passes
    assert chat.passes != complete(mars_dir, Mode.AR, 1.0).passes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--threshold", "0"], "threshold: Input should be greater than 0"),
        (["--threshold", "1.01"], "'--threshold': Input should be less than or equal to 1"),
        (["--threshold", "nan"], "'--threshold': Input should be"),
        (["--temperature", "2.5"], "'--temperature': Input should be less than or equal to 2"),
        (["--temperature", "nan"], "'--temperature': Input should be"),
        (["--top-p", "0"], "top_p: Input should be greater than 0"),
        (["--stop", "a", "--stop", ""], "--stop: an empty string"),
    ],
)
def test_options_out_of_range_are_refused(mars_dir, capsys, arguments, named):
    status, _, error = run_generate(capsys, str(mars_dir), "--mode", "ar", *arguments)
    assert status == 2
    assert named in error


@pytest.mark.parametrize("threshold", [0.03, 1.0])
def test_the_output_ends_before_a_stop_string(mars_dir, threshold):
    whole = complete(mars_dir, Mode.THRESHOLD, threshold)
    text = "".join(whole.passes)
    stop = text[4:6]
    cut = complete(mars_dir, Mode.THRESHOLD, threshold, stop=("not there", stop))
    assert "".join(cut.passes) == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.num_tokens < whole.num_tokens
    assert len(cut.passes) < len(whole.passes)


def run_generate(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any], str]:
    """Return status, figures and error message of the command."""
    status = run(["generate", *arguments, "--prompt", PROMPT, "--max-tokens", "20", "--json"])
    output = capsys.readouterr()
    return status, json.loads(output.out or "{}"), output.err


def test_generate_draws_a_seed_and_prints_it(mars_dir, capsys):
    options = [str(mars_dir), "--mode", "exact", "--temperature", "0.9", "--top-p", "0.95"]
    status, first, _ = run_generate(capsys, *options)
    assert status == 0
    _, again, _ = run_generate(capsys, *options, "--seed", str(first["seed"]))
    _, other, _ = run_generate(capsys, *options)
    assert again["text"] == first["text"] != other["text"]
    assert first["seed"] != other["seed"]
    assert (first["mode"], first["temperature"]) == ("exact", 0.9)


def test_generate_accepts_several_stop_strings(mars_dir, capsys):
    options = [str(mars_dir), "--mode", "ar", "--raw"]
    _, whole, _ = run_generate(capsys, *options)
    stop = whole["text"][3]
    _, cut, _ = run_generate(capsys, *options, "--stop", "not there", "--stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]


def test_generate_accepts_a_json_schema(mars_dir, tmp_path, capsys):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"enum": [1, True, None]}), encoding="utf-8")
    status, result, _ = run_generate(capsys, str(mars_dir), "--json-schema", str(file))
    assert status == 0
    assert json.loads(result["text"]) in (1, True, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "holds no JSON schema"), ("\xff", "holds no JSON schema")],
)
def test_an_unusable_json_schema_is_refused(mars_dir, tmp_path, capsys, content, message):
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content, encoding="latin-1")
    status, _, error = run_generate(capsys, str(mars_dir), "--json-schema", str(file))
    assert status == 2
    assert error.startswith(f"error: --json-schema: {file} {message}")


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, "20 tokens in 20 forward passes (1.00 a pass), mode ar, threshold 1, "),
        ({"temperature": 1.0, "seed": 3}, "mode ar, threshold 1, seed 3, "),
    ],
)
def test_the_shaded_output_ends_with_its_figures(mars_dir, sampling, expected):
    result, file = complete(mars_dir, Mode.AR, 1.0, **sampling), io.StringIO()
    print_completion(result, Console(file=file, width=200), as_json=False)
    assert expected in file.getvalue()


def test_an_output_beyond_the_models_length_is_refused(mars_dir):
    with pytest.raises(UserError, match=r"^max_tokens: .* more than the 256 that fit"):
        complete(mars_dir, Mode.AR, 1.0, max_tokens=250)


def test_a_missing_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^model: .*nowhere"):
        complete(tmp_path / "nowhere", Mode.AR, 1.0)


def test_the_json_output_has_text_and_figures(mars_dir):
    result, file = complete(mars_dir, Mode.THRESHOLD, 0.03), io.StringIO()
    print_completion(result, Console(file=file), as_json=True)
    printed = json.loads(file.getvalue())
    assert printed["passes"] == result.passes
    assert printed["text"] == "".join(result.passes)
    assert printed["tokens_per_forward"] == result.tokens_per_forward
    assert (printed["mode"], printed["confidence_threshold"]) == ("threshold", 0.03)


def test_the_output_fits_the_context_by_default(mars_dir):
    checkpoint = read_checkpoint(mars_dir)
    done = complete(mars_dir, Mode.AR, 1.0, max_tokens=None)
    prompt = encode(checkpoint.tokenizer, PROMPT, add_special_tokens=True)
    assert 1 <= done.num_tokens <= checkpoint.max_length - len(prompt)
