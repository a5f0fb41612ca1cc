"""The trainer's own network against transformers."""

import random
from pathlib import Path

import numpy as np
import pytest

from kvstore.sglang import stubs
from server.demo.dialogues import dialogue
from server.demo.encoding import IMAGE_PAD, Sample, encode
from server.demo.network import MEAN, SPREAD
from server.demo.packing import Shape, pack

WEIGHTS = Path(__file__).parents[2] / "server" / "demo" / "weights"


def short_samples(count: int) -> list[Sample]:
    r, found = random.Random(11), []
    while len(found) < count:
        sample = encode(dialogue(r))
        if len(sample.ids) < 300:
            found.append(sample)
    return found


@pytest.mark.long
def test_packed_and_folded_is_the_same_function_as_transformers() -> None:
    """Two conversations in one pack, with W + 2BA folded, give the hidden states that transformers gives each of them alone, in float32."""
    stubs.install()
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from server.demo import build, train

    network, _ = train.start(torch.device("cpu"), False, WEIGHTS)
    samples = short_samples(2)
    made = pack(samples, Shape(sum(len(s.ids) for s in samples) + 20, sum(len(p.patches) for s in samples for p in s.pictures) + 16, 0))
    batch = train.to_device(made, torch.device("cpu"))
    with torch.no_grad():
        seen = network.see(batch["patches"], batch["grid"], batch["picture_starts"], train.LONGEST_PICTURE)
        packed = network.read(batch["ids"], batch["positions"], seen, batch["image_places"], batch["starts"], train.LONGEST_DIALOGUE)

    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(WEIGHTS.parent / "files"))
    weights = build.weights("float32").items()
    names = {("model." + n if n.startswith("visual") else n.replace("model.", "model.language_model.", 1)): w for n, w in weights}
    assert model.load_state_dict(names, strict=False).unexpected_keys == []
    model.tie_weights()
    mean, spread = (np.array(v)[:, None, None, None] for v in (MEAN, SPREAD))
    for i, sample in enumerate(samples):
        pixels = np.concatenate([p.patches for p in sample.pictures]).reshape(-1, 3, 1, 14, 14) / 255
        ids = torch.from_numpy(sample.ids).long()[None]
        with torch.no_grad():
            alone = model.eval().model(
                input_ids=ids, pixel_values=torch.from_numpy(((pixels - mean) / spread).repeat(2, 2).reshape(len(pixels), -1)).float(),
                image_grid_thw=torch.tensor([(1, *p.grid) for p in sample.pictures]), mm_token_type_ids=(ids == IMAGE_PAD).int(),
            )[0][0]  # fmt: skip
        ours = packed[made.starts[i] : made.starts[i + 1]]
        assert float((ours - alone).norm() / alone.norm()) < 1e-4
