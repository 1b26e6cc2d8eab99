"""torch's private name for extensions that are compiled at first use (2.13)."""

from __future__ import annotations

from pathlib import Path

LOCK = "lock"
"""Name of the file in an extension's folder that ``torch.utils.file_baton.FileBaton`` makes for the time of a build.

Whoever makes it keeps it open until it removes it, and whoever finds it waits for its end, for ever: a process that was
killed in between is not noticed.
"""


def extension_folder(name: str) -> Path:
    """The folder in which ``torch.utils.cpp_extension.load`` builds an extension; made when it is not there.

    The documented ``get_default_build_root`` is only a part of it: ``load`` also asks ``TORCH_EXTENSIONS_DIR``, and
    adds the versions of Python and CUDA otherwise.
    """
    from torch.utils import cpp_extension  # slow to import, and only wanted when an op is

    return Path(cpp_extension._get_build_directory(name, verbose=False))
