from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest
from ray.serve._private.build_app import build_app

from mars_platform.errors import UserError
from mars_serve.deploy.app import application
from mars_serve.replica.replica import ModelReplica

ARGS: dict[str, Any] = {"models": [{"name": "some/model", "path": "p"}], "insecure": True}


def facts_of(path: str) -> list[Any]:
    """Read a model as an ingress replica does, and return what it found, as JSON holds it."""
    from mars_serve.config.served import ServedModel, read_served
    from mars_serve.config.settings import ModelSettings

    settings = ModelSettings(name="m", path=path)
    served = ServedModel(settings, read_served(settings), None, 0)  # type: ignore[arg-type]
    checkpoint = served.checkpoint
    chat = served.prompts.chat([{"role": "user", "content": "Zoë has <|mask|> 3 hats."}])
    eos = sorted(checkpoint.special.eos)
    sizes = [checkpoint.num_tokens, checkpoint.max_length]
    return [checkpoint.config.to_json_string(), checkpoint.fingerprint, eos, sizes, chat]


def deployments_of(args: dict[str, Any]) -> dict[str, Any]:
    built = build_app(application(args), name="app", default_runtime_env={})
    return {deployment.name: deployment for deployment in built.deployments}


def test_there_is_an_ingress_and_a_deployment_for_each_model():
    models = [*ARGS["models"], {"name": "other", "path": "p", "num_replicas": 3, "num_gpus": 1}]
    proxy = {"num_replicas": 2}
    deployments = deployments_of({**ARGS, "models": models, "proxy": proxy, "drain_s": 90})
    assert deployments.keys() == {"model-0-some-model", "model-0-other", "ingress"}
    numbers = {name: each._deployment_config.num_replicas for name, each in deployments.items()}
    assert numbers == {"model-0-some-model": 1, "model-0-other": 3, "ingress": 2}
    assert all(
        each._deployment_config.graceful_shutdown_timeout_s == 90 for each in deployments.values()
    )
    assert deployments["model-0-other"].ray_actor_options["num_gpus"] == 1
    assert deployments["model-0-some-model"].ray_actor_options["num_gpus"] == 0


def test_a_models_deployment_keeps_its_name_if_models_are_added():
    """An update ends a deployment whose name is gone, even if it still receives requests."""
    before = deployments_of(ARGS).keys()
    models = [{"name": "first", "path": "p"}, *ARGS["models"], {"name": "some-model", "path": "p"}]
    added = {"model-0-first", "model-1-some-model"}
    assert deployments_of({**ARGS, "models": models}).keys() - before == added


def test_replicas_that_start_after_a_promotion_get_the_checkpoint_of_their_deployment(tmp_path):
    for name in ("v3", "v4", "adapter"):
        (tmp_path / name).mkdir()
    for link in ("current", "own"):
        (tmp_path / link).symlink_to("v3" if link == "current" else "adapter")
    paths = {"path": str(tmp_path / "current"), "adapter": str(tmp_path / "own")}
    built = deployments_of({**ARGS, "models": [{"name": "mine", **paths}]})
    for link in ("current", "own"):
        (tmp_path / link).unlink()
        (tmp_path / link).symlink_to("v4")
    ingress, model = (built[name].init_args[0] for name in ("ingress", "model-0-mine"))
    expected = (str(tmp_path / "v3"), str(tmp_path / "adapter"))
    assert [(each.path, each.adapter) for each in (ingress.models[0], model)] == [expected] * 2


@pytest.mark.parametrize(("given", "percent"), [({}, 25), ({"surge_percent": 0}, 0)])
def test_an_update_starts_replicas_before_it_ends_others(given, percent):
    deployments = deployments_of({**ARGS, **given}).values()
    assert [each._deployment_config.max_surge_percent for each in deployments] == [percent] * 2


def test_ray_serve_neither_routes_nor_limits_requests_and_gives_replicas_time_to_drain():
    """They do not pass through it; its own choice of replicas then is as good as any."""
    models = [{"name": "two", "path": "p", "num_replicas": 2}]
    deployments = deployments_of({**ARGS, "models": models, "drain_s": 90})
    config = deployments["model-0-two"]._deployment_config
    assert "mars_serve" not in config.request_router_config.request_router_class
    assert config.max_ongoing_requests >= 10_000
    assert config.graceful_shutdown_timeout_s == 90
    assert inspect.iscoroutinefunction(ModelReplica.__del__), "Ray Serve awaits it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"insecure": False}, r"^args: host: 0\.0\.0\.0 is reachable .* there are no keys"),
        ({"modles": []}, r"^args: modles: unknown key"),
        ({"models": []}, r"^args: models: "),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        application({**ARGS, **change})


def test_a_server_with_keys_may_be_reachable():
    entry = {"name": "a", "sha256": "0" * 64}
    args = {**ARGS, "insecure": False, "keys": {"entries": [entry]}}
    assert "ingress" in deployments_of(args)


def test_a_server_of_its_own_machine_needs_no_keys():
    assert "ingress" in deployments_of({**ARGS, "insecure": False, "host": "127.0.0.1"})


def test_an_ingress_reads_a_model_without_torch_as_others_do_with_it(mars_dir):
    script = f"""
import json, sys
from typing import Any
from mars_serve.deploy.app import _import_modules
{inspect.getsource(facts_of)}
_import_modules([])
print(json.dumps([facts_of(sys.argv[1]), "torch" in sys.modules]))
"""
    command = [sys.executable, "-c", script, str(mars_dir)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stdout) == [facts_of(str(mars_dir)), False]
