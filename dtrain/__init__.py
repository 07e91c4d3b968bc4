"""dtrain trains PyTorch models on any set of machines that answer ssh.

`import dtrain` loads nothing but the standard library; a name below resolves on its first use, so the same import
serves a script on a node and a notebook on the launching machine.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {"log_metrics": "dtrain.node.metrics", "launch": "dtrain.api"}

__all__ = ["__version__", "launch", "log_metrics"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dtrain' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
