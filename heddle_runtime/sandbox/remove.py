"""Removes the folder of a program, whatever the program did to it."""

import os
from itertools import count


def remove_folder(folder: str) -> None:
    """Remove a folder and all that is in it.

    It empties an inner folder by moving its content up. So folders may be nested deeper than the
    longest path or Python's recursion limit.
    """
    names = count()
    inner = True
    while inner:
        inner = False
        for entry in list(os.scandir(folder)):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            inner = True
            _open_up(entry.path)
            for child in list(os.scandir(entry.path)):
                if child.is_dir(follow_symlinks=False):
                    _open_up(child.path)  # to move a folder, it must be writable itself
                    os.rename(child.path, f"{folder}/moved-{next(names)}")
                else:
                    os.unlink(child.path)
            os.rmdir(entry.path)
    os.rmdir(folder)


def _open_up(folder: str) -> None:
    os.chmod(folder, 0o700)
