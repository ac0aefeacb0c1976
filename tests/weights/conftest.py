"""Models as transformers knows them, and a base model's tokenizer.

They are from hf_models.py, imported inside because the extras may be absent.
"""

import json
from functools import cache

import pytest
import torch

import data
from tests.training.conftest import records  # noqa: F401 - a fixture of test_lora.py
from weights import base, export, files


@pytest.fixture(scope="module")
def two_threads():
    """With one thread torch resizes three channels by another kernel, and transformers' pixels
    differ by a level here and there."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, 2))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def base_tokenizer(tmp_path_factory):
    """The folder with the tokenizer of a base model: byte-level BPE with the tokens of a chat,
    without those of Molmo2."""
    import tokenizers

    from tests.weights.hf_models import ROOT

    folder = tmp_path_factory.mktemp("base")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False)
    bpe.train([str(ROOT / "LICENSE")], trainer)          # a text that never changes
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tokenizer(base_tokenizer):
    from tests.weights.hf_models import V

    return base.extended_tokenizer(base_tokenizer, V)


@pytest.fixture(scope="session")
def saved(tmp_path_factory, tokenizer):
    """saved(kind) -> SavedModel in several weight files.

    sharp: attention so sharp that what is generated does not repeat itself; with more, rounding
    decides (it grows tenfold at 2).
    """
    from tests.weights.hf_models import KINDS, SavedModel, V, peer_config, transformers

    @cache
    def make(kind, sharp=0):
        torch.manual_seed(1)
        peer = transformers.Molmo2ForConditionalGeneration(peer_config(KINDS[kind])).eval()
        with torch.no_grad():
            for name, p in peer.named_parameters():
                if p.ndim > 1:
                    p.normal_(std=p.shape[-1] ** -0.5)
                elif "norm" in name:
                    shift = sharp * ("q_norm" in name or "k_norm" in name)
                    p.add_(0.1 * torch.randn_like(p) + shift)
            if kind == "tied":
                peer.lm_head.weight.copy_(peer.model.language_model.embed_tokens.weight[:V])
        folder = tmp_path_factory.mktemp(kind)
        export.write_processors(KINDS[kind], tokenizer, data.DataConfig(), folder)
        peer.save_pretrained(folder, max_shard_size="100KB")
        return SavedModel(peer, folder, files.load(folder))

    return make


@pytest.fixture(scope="session")
def processor(saved):
    from tests.weights.hf_models import transformers

    return transformers.AutoProcessor.from_pretrained(saved("untied").folder)
