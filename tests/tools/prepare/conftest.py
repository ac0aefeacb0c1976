"""In the tests of this folder, opening a network connection is an error."""

import socket

import pytest


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    connect = socket.socket.connect

    def connect_on_this_machine(self, address):
        # processes are started over a socket that is a file
        assert self.family == socket.AF_UNIX, f"a connection to {address}"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_on_this_machine)
