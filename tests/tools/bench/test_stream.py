"""The stream of sizes: it is the one that RESULTS.md was measured on, and its sizes are those of
training."""

import numpy as np
import pytest

import data
import vision
from text.tokenizer import ByteTokenizer
from text.visual_tokens import image_tokens, video_tokens
from tools.bench import stream

pytestmark = pytest.mark.slow

# Of streams of 4,000 examples, 20 seeds (stage 1: 5): means of tokens, crops and annotations. 5
# seeds: the tenth, fiftieth and ninetieth percentile of the tokens, and the shares of examples
# without crops and with as many as a video can have.
MEASURED = {
    1: (1367.7, 5.699, 2.503, 854, 1421, 1831, 0.0993, 0),
    2: (3520.9, 32.033, 3.778, 871, 2012, 9977, 0.0905, 0.0642),
    3: (4192.6, 39.555, 3.778, 871, 2012, 9977, 0.0905, 0.0099),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stream_is_the_one_that_was_measured(stage):
    """Means within 3 %, quantiles within 4 %, shares within 0.01: each bound is more than three
    standard deviations."""
    examples = [e for seed in range(2) for e in stream.stream(stage, 4000, seed)]
    limits = stream.recipe(stage)
    tokens, crops = np.array([(e.tokens, e.crops) for e in examples]).T
    measured = np.array(MEASURED[stage])
    means = [tokens.mean(), crops.mean(), np.mean([len(e.branches) for e in examples])]
    np.testing.assert_allclose(means, measured[:3], rtol=0.03)
    np.testing.assert_allclose(np.percentile(tokens, [10, 50, 90]), measured[3:6], rtol=0.04)
    as_many_as_a_video = (crops == limits.max_frames).mean() * (stage > 1)
    shares = (crops == 0).mean(), as_many_as_a_video
    np.testing.assert_allclose(shares, measured[6:], atol=0.01)
    assert tokens.max() <= limits.max_tokens
    assert crops.max() <= limits.max_crops
    assert all(e.tokens == e.trunk + sum(e.branches) for e in examples)


def test_sizes_are_those_of_training():
    """Every image and video has the tokens that data.py lays out, and the crops that it cuts."""
    tokenizer = ByteTokenizer()
    config = data.DataConfig()
    rng = np.random.default_rng(0)
    for height, width in [stream.draw_image_size(rng) for _ in range(50)]:
        ids = image_tokens(width, height, tokenizer, config)
        assert stream.image_size(height, width)[0] == len(ids), (height, width)
    assert stream.image_size(378, 378) == (14 * 14 + 2 + 14 * 15 + 2, 2)
    for seconds, frames in (2.0, 5), (7.3, 16), (130.0, 128), (9.96, 21):
        times = vision.frame_times(seconds, 128)
        ids, _ = video_tokens(times, None, tokenizer, config)
        assert stream.video_size(seconds, 128) == (len(ids), frames)
