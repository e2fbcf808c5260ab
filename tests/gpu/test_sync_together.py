"""One launch that writes a model's tensors and one that sums them, against torch, which takes them one by one."""

from __future__ import annotations

import pytest
import torch

from jetgraph.sync.receiver import word_sums
from jetgraph.sync.together import Together

pytestmark = pytest.mark.gpu


def test_a_model_of_many_tensors_is_written_and_summed():
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(4096, 4096), (32, 32), (4096,), (128,), (12288, 4096), (151936, 64), (3, 5), (8, 24)]
    new = {
        f"{i}.{shape}": torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
        for i in range(20)
        for shape in shapes
    }
    live = {name: torch.zeros_like(t) for name, t in new.items()}
    together = Together.prepare(live, new)
    assert together is not None
    assert set(new) - set(together.names) == {name for name in new if name.endswith("(3, 5)")}
    assert set(together.sums().values()) == {0}
    together.copy()
    assert together.sums() == word_sums({name: new[name] for name in together.names})
    assert all(torch.equal(live[name], new[name]) for name in together.names)
    live[together.names[-1]].view(-1)[-1] += 1
    differing = [name for name, total in together.sums().items() if total != word_sums({name: new[name]})[name]]
    assert differing == [together.names[-1]]
