import pytest
from transformers import AutoTokenizer


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path):
    return AutoTokenizer.from_pretrained(tokenizer_path)
