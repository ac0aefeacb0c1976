import pytest
import torch

from tests.tools.memory.small_model import attend_as_on_a_gpu


@pytest.fixture(autouse=True)
def _gpu_attention(monkeypatch):
    attend_as_on_a_gpu(monkeypatch.setattr)
    torch.manual_seed(0)
