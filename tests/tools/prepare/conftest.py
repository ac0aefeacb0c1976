"""Nothing that these tests run opens a connection."""

import socket

import pytest


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    monkeypatch.delattr(socket, "socket")
    monkeypatch.delattr(socket, "create_connection")
