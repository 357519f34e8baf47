from __future__ import annotations

import pytest
import torch
import toy

from dflash_trt.training.teacher import Teacher


def test_the_teacher_ends_where_hugging_face_ends():
    """From the output of layer 1 on, three layers: the same last hidden state."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=24, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 24, (2, 9))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    teacher = Teacher(toy.shape(target_layers=4), model.state_dict(), torch.device("cpu"))
    torch.testing.assert_close(teacher(states[2]), states[-1], atol=1e-4, rtol=1e-4)
