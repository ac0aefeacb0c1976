"""Fixtures on the model of small_model.py; a test must not change it."""

import pytest

from tests.evaluation.small_model import random_model, save_run


@pytest.fixture(scope="session")
def small_model():
    return random_model()


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("saved") / "run")
