"""Tells which number type a served model's weights get.

Imports no Ray, torch or HTTP library.
"""

from mars_platform.checkpoint.metadata import locate_model
from mars_platform.checkpoint.number_type import stored_dtype
from mars_serve.config.settings import ModelSettings


def with_dtype(settings: ModelSettings) -> ModelSettings:
    """Return settings in which ``dtype: auto`` has become the checkpoint's own number type.

    Raises:
        UserError: the checkpoint does not say its type, or has one that cannot be served.
    """
    if settings.dtype != "auto":
        return settings
    return settings.model_copy(update={"dtype": stored_dtype(locate_model(settings.path))})
