"""Names of settings in other trainers: `other_trainers.toml` in this folder."""

import tomllib
from importlib.resources import files

_NAMES = tomllib.loads(files("d9d_loop.config").joinpath("other_trainers.toml").read_text(encoding="utf-8"))
WITHOUT_OURS = frozenset(_NAMES.pop("none"))
"""Names of settings in other trainers for which we have no key, although a key of ours has a similar name."""

OTHER_NAMES = {other: ours for ours, others in _NAMES.items() for other in others}
"""Our dotted key for the name of a setting in another trainer. A configuration class may lack the key."""
