"""The hook of PyInstaller, which finds this folder by the entry point `pyinstaller40` of the distribution."""

import os


def get_hook_dirs() -> list[str]:
    """Return the folder of hook-mx_driving.py."""
    return [os.path.dirname(__file__)]
