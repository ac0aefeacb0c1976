"""Skips tests that need packages of requirements-dev.txt.

    @pytest.mark.extras("safetensors", "tokenizers")         on a test: conftest.py skips it
    pytestmark = require("transformers")                     at the top of a module, before imports
"""

from importlib.util import find_spec

import pytest


def missing(*packages):
    """-> a message about the first package that is not installed, or None."""
    for package in packages:
        if find_spec(package) is None:
            return f"{package} is not installed: pip install -r requirements-dev.txt"
    return None


def require(*packages):
    """Skips the importing module if a package is missing -> the mark for its tests."""
    if sentence := missing(*packages):
        pytest.skip(sentence, allow_module_level=True)
    return pytest.mark.extras(*packages)
