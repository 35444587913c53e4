"""What there is under a name that a person typed: the one place where a text is tried as a path.

Most texts that are tried are no paths at all: a list of lengths, a generator, a name of the hub. Python's own questions
(`Path.exists`, `is_file`, `is_dir`, `expanduser`) raise for some of these, such as a text that is longer than the name
of any file.
"""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISDIR

from halocline.errors import ConfigError


def existing_path(text: str) -> Path | None:
    """Return the path that `text` names, with `~` as the home folder; None where nothing is there.

    Raises ConfigError where something is there, or may be, that this user may not read: to say that there is nothing
    would be wrong.
    """
    path = Path(os.path.expanduser(text))
    try:
        is_folder = S_ISDIR(path.stat().st_mode)
    except PermissionError as error:
        raise ConfigError([f"cannot look at {text}: {error.strerror}; give this user the right to read it"]) from error
    except (OSError, ValueError):  # nothing there, or no name of a file: too long, through a file, links in a circle
        return None
    if not os.access(path, os.R_OK | os.X_OK if is_folder else os.R_OK):
        raise ConfigError([f"cannot read {text}: permission denied; give this user the right to read it"])
    return path
