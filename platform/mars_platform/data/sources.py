"""Tells sources of data on other machines, and finds the files of data sets on Hugging Face's hub.

Imports no Ray, torch or HTTP library before it is asked for files.
"""

import re

from mars_platform.errors import UserError, one_line

_HUB = "hub:"
_PASSWORD = re.compile(r"(://[^/@:\s\"]*:)[^/@\s\"]+@")
_KEY = re.compile(r"(?i)([?&][\w-]*(?:key|password|secret|sig|signature|token)=)[^&\s\"]+")
_PARTS = re.compile(r"([^@:]+)(?:@([^:]+))?(?::(?:([^/:]+)/)?([^/:]+))?")


def is_remote(source: str) -> bool:
    """Return whether a source is a URL or a data set of the hub."""
    return "://" in source or is_of_hub(source)


def without_passwords(text: str) -> str:
    """Return a text in which three asterisks stand for passwords, keys and signatures in URLs."""
    return _KEY.sub(r"\1***", _PASSWORD.sub(r"\1***@", text))


def is_of_hub(source: str) -> bool:
    """Return whether a source is a data set of the hub, ``hub:NAME@REVISION:CONFIG/SPLIT``."""
    return source.startswith(_HUB)


def hub_files(source: str) -> list[str]:
    """Return the files of one split of a data set, as URLs that name the commit.

    All but the name may be left out; the split is then ``train``. A directory in the hub's layout
    may take the name's place.

    Raises:
        UserError: the library is missing, the hub does not answer, or there is no such split.
    """
    parts = _PARTS.fullmatch(source.removeprefix(_HUB))
    if parts is None:
        raise UserError(f"{source}: write it as hub:NAME@REVISION:CONFIG/SPLIT")
    name, revision, config, split = parts.groups()
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{source} takes a library: pip install 'marsray[hub]'") from error
    try:
        builder = datasets.load_dataset_builder(name, config, revision=revision)
    except Exception as error:  # the hub, its cache and the data's own notes fail in many ways
        raise UserError(f"{source} cannot be read ({one_line(error)})") from error
    splits = builder.config.data_files or {}
    if not (found := [str(file) for file in splits.get(split or "train", ())]):
        known = ", ".join(map(str, splits)) or "none"
        raise UserError(f"{source}: there is no split {split or 'train'}; known are {known}")
    return found
