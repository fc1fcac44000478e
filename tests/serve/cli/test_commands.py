from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from mars_platform.checkpoint.directory import load_model, read_checkpoint
from mars_platform.cli.main import run
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.api.text import decode, encode
from mars_serve.cli.completion import Generation, generate_once, print_generation
from mars_serve.cli.serve_settings import serve_settings
from mars_serve.config.settings import ServeSettings
from mars_serve.engine.request import Sampling
from mars_serve.engine.settings import EngineSettings

PROMPT = "What is 3 plus 4?"

# Settings


def settings_of(config: Path | None = None, *models: str, **options: Any) -> ServeSettings:
    defaults: dict[str, Any] = {
        "host": None,
        "port": None,
        "replicas": None,
        "insecure": False,
        "overrides": [],
    }
    return serve_settings(config, list(models), **{**defaults, **options})


def write_config(tmp_path: Path, content: Any) -> Path:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    models = [{"name": "a", "path": "some/a"}, {"name": "b", "path": "some/b", "num_replicas": 3}]
    return write_config(tmp_path, {"models": models, "port": 9000})


def test_neither_config_nor_model() -> None:
    with pytest.raises(UserError, match="--model"):
        settings_of()


def test_model_with_a_name() -> None:
    (model,) = settings_of(None, "tiny=some/where=else").models
    assert (model.name, model.path) == ("tiny", "some/where=else")


def test_directory_gives_its_last_part_as_name(tmp_path: Path) -> None:
    (model,) = settings_of(None, str(tmp_path)).models
    assert (model.name, model.path) == (tmp_path.name, str(tmp_path))


def test_hub_id_is_its_own_name() -> None:
    (model,) = settings_of(None, "someone/some-model").models
    assert (model.name, model.path) == ("someone/some-model", "someone/some-model")


def test_defaults_listen_on_loopback() -> None:
    settings = settings_of(None, "tiny=dir")
    assert (settings.host, settings.port, settings.insecure) == ("127.0.0.1", 8000, False)
    assert settings.models[0].engine == EngineSettings()


def test_config_file(config: Path) -> None:
    settings = settings_of(config)
    assert [model.name for model in settings.models] == ["a", "b"]
    assert [model.num_replicas for model in settings.models] == [1, 3]
    assert settings.port == 9000


def test_options_win_over_the_file(config: Path) -> None:
    settings = settings_of(config, "c=some/c", host="::1", port=9001, replicas=2)
    assert [(model.name, model.num_replicas) for model in settings.models] == [("c", 2)]
    assert (settings.host, settings.port) == ("::1", 9001)


def test_replicas_apply_to_every_model(config: Path) -> None:
    assert [model.num_replicas for model in settings_of(config, replicas=2).models] == [2, 2]


def test_overrides_win_over_options(config: Path) -> None:
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
def test_invalid_overrides_name_the_field(override: str, expected: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        settings_of(None, "tiny=dir", overrides=[override])
    assert all(part in str(refusal.value) for part in expected), str(refusal.value)


def test_unknown_key_of_the_file_names_file_and_known_keys(tmp_path: Path) -> None:
    file = write_config(tmp_path, {"models": [{"name": "a", "path": "a", "replicas": 2}]})
    with pytest.raises(UserError) as refusal:
        settings_of(file)
    message = str(refusal.value)
    assert message.startswith(f"{file}: models.0.replicas: unknown key; known keys: ")
    assert "num_replicas" in message


@pytest.mark.parametrize("models", ["a", {"name": "a", "path": "a"}, ["a"], None, 3])
@pytest.mark.parametrize("replicas", [None, 2])
def test_models_of_the_wrong_kind(tmp_path: Path, models: Any, replicas: int | None) -> None:
    with pytest.raises(UserError, match="models"):
        settings_of(write_config(tmp_path, {"models": models}), replicas=replicas)


PUBLIC_HOSTS = ["0.0.0.0", "::", "192.168.1.4", "example.org"]  # noqa: S104
KEYS = {"keys": [{"name": "someone", "sha256": "0" * 64}]}


@pytest.mark.parametrize("host", PUBLIC_HOSTS)
def test_host_that_others_reach_needs_keys_or_insecure(host: str) -> None:
    with pytest.raises(UserError, match=r"host: .*no keys.*--insecure"):
        settings_of(None, "tiny=dir", host=host)
    settings = settings_of(None, "tiny=dir", host=host, insecure=True)
    assert (settings.host, settings.insecure) == (host, True)


@pytest.mark.parametrize("host", PUBLIC_HOSTS)
def test_host_that_others_reach_with_keys(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_variable_of_keys_that_is_malformed(
    host: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARSRAY_API_KEYS", content)
    with pytest.raises(UserError, match="MARSRAY_API_KEYS: ") as refusal:
        settings_of(None, "tiny=dir", host=host)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_hosts(host: str) -> None:
    assert settings_of(None, "tiny=dir", host=host).host == host


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_port_out_of_range(port: int) -> None:
    with pytest.raises(UserError, match=rf"port: .*{port}"):
        settings_of(None, "tiny=dir", port=port)


def test_names_must_differ() -> None:
    with pytest.raises(UserError, match="names must differ"):
        settings_of(None, "a=x", "a=y")


# One completion


def complete(model: Path, mode: Mode, threshold: float, **options: Any) -> Generation:
    fields: dict[str, Any] = {"max_tokens": 20, "chat": False, **options}
    return generate_once(str(model), PROMPT, mode=mode, threshold=threshold, **fields)


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


def test_ar_equals_threshold_at_one(mars_dir: Path) -> None:
    ar, one = complete(mars_dir, Mode.AR, 0.3), complete(mars_dir, Mode.THRESHOLD, 1.0)
    assert ar.passes == one.passes
    assert len(ar.passes) == ar.num_tokens == 20
    assert (ar.mode, ar.confidence_threshold) == (Mode.AR, 1.0)
    assert (one.mode, one.confidence_threshold) == (Mode.THRESHOLD, 1.0)


@pytest.mark.parametrize("threshold", [0.03, 0.9])
def test_passes_join_to_the_text(mars_dir: Path, threshold: float) -> None:
    passes = expected_passes(mars_dir, threshold, max_tokens=20)
    tokens = [token for each in passes for token in each]
    result = complete(mars_dir, Mode.THRESHOLD, threshold)
    assert "".join(result.passes) == decode(read_checkpoint(mars_dir).tokenizer, tokens)
    assert len(result.passes) == len(passes)
    assert result.num_tokens == len(tokens)
    assert result.tokens_per_forward == len(tokens) / len(passes)
    assert result.finish_reason == "length"
    assert threshold > 0.5 or result.tokens_per_forward > 1


def test_chat_renders_the_template(mars_dir: Path) -> None:
    chat = complete(mars_dir, Mode.AR, 1.0, chat=True)
    rendered = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    raw = generate_once(
        str(mars_dir), rendered, mode=Mode.AR, threshold=1.0, max_tokens=20, chat=False
    )
    assert chat.passes == raw.passes
    assert chat.passes != complete(mars_dir, Mode.AR, 1.0).passes


def test_plain_checkpoint_decodes_in_ar_only(plain_dir: Path) -> None:
    assert complete(plain_dir, Mode.AR, 0.95).num_tokens == 20
    with pytest.raises(UserError, match=r"^mode: .*'ar'"):
        complete(plain_dir, Mode.THRESHOLD, 0.95)


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.01, float("nan")])
@pytest.mark.parametrize("mode", list(Mode))
def test_threshold_outside_its_range(mars_dir: Path, mode: Mode, threshold: float) -> None:
    with pytest.raises(UserError, match=r"^--threshold: .* is not in \(0, 1\]"):
        complete(mars_dir, mode, threshold)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling": Sampling(temperature=2.5)}, r"^--temperature: 2.5 is not in \[0, 2\]"),
        ({"sampling": Sampling(temperature=float("nan"))}, "^--temperature: nan"),
        ({"sampling": Sampling(top_p=0.0)}, r"^--top-p: 0.0 is not in \(0, 1\]"),
        ({"stop": ["a", ""]}, "^--stop: an empty string"),
    ],
)
def test_options_outside_their_ranges(mars_dir: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        complete(mars_dir, Mode.AR, 1.0, **fields)


def test_exact_gives_what_ar_gives(mars_dir: Path) -> None:
    exact, ar = complete(mars_dir, Mode.EXACT, 0.3), complete(mars_dir, Mode.AR, 0.3)
    assert "".join(exact.passes) == "".join(ar.passes)
    assert (exact.mode, exact.confidence_threshold) == (Mode.EXACT, 1.0)


@pytest.mark.parametrize("threshold", [0.03, 1.0])
def test_output_ends_before_a_stop_string(mars_dir: Path, threshold: float) -> None:
    whole = complete(mars_dir, Mode.THRESHOLD, threshold)
    text = "".join(whole.passes)
    stop = text[4:6]
    cut = complete(mars_dir, Mode.THRESHOLD, threshold, stop=["not there", stop])
    assert "".join(cut.passes) == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.num_tokens < whole.num_tokens
    assert len(cut.passes) < len(whole.passes)


def test_a_seed_repeats_the_output(mars_dir: Path) -> None:
    first, again, other = (
        complete(mars_dir, Mode.AR, 1.0, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in (3, 3, 4)
    )
    assert first.passes == again.passes != other.passes
    assert (first.temperature, first.seed) == (1.0, 3)


def run_generate(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any], str]:
    """Status, figures and error message of the command."""
    status = run(["generate", *arguments, "--prompt", PROMPT, "--max-tokens", "20", "--json"])
    output = capsys.readouterr()
    return status, json.loads(output.out or "{}"), output.err


def test_the_command_draws_a_seed_and_shows_it(
    mars_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(mars_dir), "--mode", "exact", "--temperature", "0.9", "--top-p", "0.95"]
    status, first, _ = run_generate(capsys, *options)
    assert status == 0
    _, again, _ = run_generate(capsys, *options, "--seed", str(first["seed"]))
    _, other, _ = run_generate(capsys, *options)
    assert again["text"] == first["text"] != other["text"]
    assert first["seed"] != other["seed"]
    assert (first["mode"], first["temperature"]) == ("exact", 0.9)


def test_the_command_takes_several_stop_strings(
    mars_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(mars_dir), "--mode", "ar", "--raw"]
    _, whole, _ = run_generate(capsys, *options)
    stop = whole["text"][3]
    _, cut, _ = run_generate(capsys, *options, "--stop", "not there", "--stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]


def test_the_command_takes_a_json_schema(
    mars_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"enum": [1, True, None]}), encoding="utf-8")
    status, result, _ = run_generate(capsys, str(mars_dir), "--json-schema", str(file))
    assert status == 0
    assert json.loads(result["text"]) in (1, True, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "holds no JSON schema"), ("\xff", "holds no JSON schema")],
)
def test_json_schema_that_is_unusable(
    mars_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    message: str,
) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content, encoding="latin-1")
    status, _, error = run_generate(capsys, str(mars_dir), "--json-schema", str(file))
    assert status == 2
    assert error.startswith(f"error: --json-schema: {file} {message}")


def test_a_sampled_output_is_shown_with_its_seed(mars_dir: Path) -> None:
    result = complete(mars_dir, Mode.AR, 1.0, sampling=Sampling(temperature=1.0, seed=3))
    file = io.StringIO()
    print_generation(result, Console(file=file, width=200), as_json=False)
    assert "mode ar, threshold 1, seed 3, " in file.getvalue()


def test_completion_beyond_the_models_length(mars_dir: Path) -> None:
    with pytest.raises(UserError, match=r"^max_tokens: .* more than the 256 that fit"):
        complete(mars_dir, Mode.AR, 1.0, max_tokens=250)


def test_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model: .*nowhere"):
        complete(tmp_path / "nowhere", Mode.AR, 1.0)


def test_json_output(mars_dir: Path) -> None:
    result, file = complete(mars_dir, Mode.THRESHOLD, 0.03), io.StringIO()
    print_generation(result, Console(file=file), as_json=True)
    printed = json.loads(file.getvalue())
    assert printed["passes"] == result.passes
    assert printed["text"] == "".join(result.passes)
    assert printed["tokens_per_forward"] == result.tokens_per_forward
    assert (printed["mode"], printed["confidence_threshold"]) == ("threshold", 0.03)


def test_shaded_output_ends_with_the_figures(mars_dir: Path) -> None:
    result, file = complete(mars_dir, Mode.AR, 1.0), io.StringIO()
    print_generation(result, Console(file=file, width=200), as_json=False)
    assert "20 tokens in 20 forward passes (1.00 a pass), mode ar" in file.getvalue()


def test_output_fits_the_context_by_default(mars_dir: Path) -> None:
    checkpoint = read_checkpoint(mars_dir)
    done = generate_once(
        str(mars_dir), PROMPT, mode=Mode.AR, threshold=1.0, max_tokens=None, chat=False
    )
    prompt = encode(checkpoint.tokenizer, PROMPT, add_special_tokens=True)
    assert 1 <= done.num_tokens <= checkpoint.max_length - len(prompt)
