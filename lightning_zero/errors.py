"""Every error that this package raises on purpose.

The tree, each class with the builtin that a caller would catch::

    ZeroError(Exception)
    ├── ConfigError(ValueError)                   a setting is wrong, missing or contradicts another one
    │   └── ConfigNotFoundError(FileNotFoundError)    a config file is not there
    └── CheckpointError(RuntimeError)             a checkpoint is damaged, incomplete or cannot be used this way
        └── CheckpointNotFoundError(FileNotFoundError)    a checkpoint is not there

A message names the subject, the value and where it was read; then the remedy. What is found in one pass over a config
stands in one error, a line for each finding.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigError",
    "ConfigNotFoundError",
    "ZeroError",
]


class ZeroError(Exception):
    """Anything that ``lightning_zero`` refuses."""


class ConfigError(ZeroError, ValueError):
    """A setting is wrong, missing or contradicts another one."""


class ConfigNotFoundError(ConfigError, FileNotFoundError):
    """A config file is not there."""


class CheckpointError(ZeroError, RuntimeError):
    """A checkpoint is damaged, incomplete or cannot be used this way."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint is not there."""
