import pytest
from transformers import AutoTokenizer

from mars_train.run.scratch import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    texts = ["Count a box of 12 apples", "There are 12 apples in the box."] * 10
    train_tokenizer(texts, 300).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path):
    return AutoTokenizer.from_pretrained(tokenizer_path)
