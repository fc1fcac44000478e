"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's fields and messages.

The authentication middleware has already checked that the caller is an administrator.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from mars_platform.errors import UserError
from mars_serve.api.bodies import at_most
from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.schema import errors_described
from mars_serve.config.loras import MOST_LORAS, LoraChanges
from mars_serve.config.served import ServedModel
from mars_serve.engine.request import LoraReference
from mars_serve.http.endpoints.information import find_model
from mars_serve.http.middleware.authentication import LOAD_LORA, UNLOAD_LORA

HEARD_S = 1.0
"""Seconds within which every ingress replica hears of a change; see `report_forever`."""

_Name = Annotated[str, Field(min_length=1, max_length=128)]


class LoraUnload(BaseModel):
    """A LoRA adapter to unload."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    lora_name: _Name
    """Name that requests give as ``model``."""


class LoraLoad(LoraUnload):
    """A LoRA adapter to load."""

    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Directory of its files, on each machine of the server, below one of the model's
    ``lora_directories``."""
    load_inplace: bool = False
    """Whether it takes the place of another one with its name."""
    base_model_name: str | None = None
    """Model that it belongs to; may be left out where one model alone takes LoRA adapters."""


def loras_router(models: Mapping[str, ServedModel]) -> APIRouter:
    """Return the router of the endpoints that load and unload LoRA adapters."""
    success = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    # a plain Response, as errors are described in the type of content of the default one
    router = APIRouter(
        responses={200: success, **errors_described()}, default_response_class=Response
    )
    changing = asyncio.Lock()

    @router.post(LOAD_LORA)
    async def load(body: Annotated[LoraLoad, at_most(16)]) -> Response:
        """Let requests name a LoRA adapter as their model; for administrators."""
        model, name = _base(models, body.base_model_name), body.lora_name
        async with changing:
            await _refresh(model)
            _check_name(models, model, name, in_place=body.load_inplace)
            path = await asyncio.to_thread(_allowed, model, body.lora_path)
            try:
                lora = await asyncio.to_thread(model.read_lora, name, path)
            except UserError as error:
                raise invalid_value("lora_path", str(error)) from error
            while model.loras.current.get(name) != lora:
                _check_name(models, model, name, in_place=body.load_inplace)
                await _refresh(model, model.loras.with_change(name, lora))
        await _keep(model, name, lora)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post(UNLOAD_LORA)
    async def unload(body: Annotated[LoraUnload, at_most(16)]) -> Response:
        """Take a LoRA adapter away; requests that run with it go on. For administrators."""
        name = body.lora_name
        async with changing:
            for each in models.values():
                await _refresh(each)
            model = next((each for each in models.values() if name in each.loras.current), None)
            if model is None:
                message = f"The lora adapter '{name}' cannot be found."
                raise ApiError(404, message, code="model_not_found")
            while name in model.loras.current:
                await _refresh(model, model.loras.with_change(name, None))
        await _keep(model, name, None)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router


async def _refresh(model: ServedModel, changes: LoraChanges | None = None) -> None:
    """Learn a model's adapters as all ingress replicas have left them.

    ``changes`` are what one of them makes of it; another's that came before them count instead.
    """
    model.loras.take(await model.backend.loras(changes or model.loras.changes))


async def _keep(model: ServedModel, name: str, lora: LoraReference | None) -> None:
    await asyncio.sleep(HEARD_S)
    await _refresh(model)
    if model.loras.current.get(name) != lora:
        reason = f"lora_name: another change took the place of that of {name!r}; ask again"
        raise ApiError(503, reason, param="lora_name", code="unavailable", retry_after_s=1.0)


def _base(models: Mapping[str, ServedModel], name: str | None) -> ServedModel:
    if name is not None:
        return find_model(models, name)
    able = [model for model in models.values() if model.settings.engine.max_loras]
    if len(able) != 1:
        reason = (
            "several models take LoRA adapters; name one"
            if able
            else ("no model here has slots for LoRA adapters; set its engine.max_loras")
        )
        raise ApiError(400, f"base_model_name: {reason}", param="base_model_name")
    return able[0]


def _check_name(
    models: Mapping[str, ServedModel],
    model: ServedModel,
    name: str,
    *,
    in_place: bool,
) -> None:
    """Refuse a name that another model or adapter has, or one more than there may be."""
    known = model.loras.current
    others = (each for each in models.values() if each is not model)
    if name in models or any(name in each.loras.current for each in others):
        raise invalid_value("lora_name", f"a model is called {name!r}; give another name")
    if name in known and not in_place:
        raise invalid_value(
            "lora_name",
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter "
            "in place, set 'load_inplace' to True.",
        )
    if len(known) >= MOST_LORAS and name not in known:
        raise invalid_value("lora_name", f"{len(known)} adapters are loaded; unload one first")


def _allowed(model: ServedModel, path: str) -> Path:
    """Return the directory that a path leads to, if the settings allow it.

    Links are followed first, so that none leads out of the allowed directories.
    """
    try:
        found = Path(path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        found = None
    allowed = [Path(each).resolve() for each in model.settings.lora_directories]
    if found is None or not any(found.is_relative_to(each) for each in allowed):
        remedy = (
            "name a directory below one of the model's lora_directories"
            if allowed
            else "adapters are loaded from the model's lora_directories, of which there are none; "
            "set them, and start the server again"
        )
        raise invalid_value("lora_path", remedy)
    return found
