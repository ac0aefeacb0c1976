"""In the tests of this folder, opening a network connection is an error."""

import socket

import pytest


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    monkeypatch.delattr(socket, "socket")
    monkeypatch.delattr(socket, "create_connection")
